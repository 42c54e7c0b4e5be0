"""`python -m benchmarks` lists the benchmarks, each with the first line of what it says of itself."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def commands() -> dict[str, str]:
    """`benchmarks.small` -> the first line of its docstring, for every module and package that can be run."""
    files = {path: f"benchmarks.{path.stem}" for path in FOLDER.glob("*.py") if path != Path(__file__)}
    files |= {path: f"benchmarks.{path.parent.name}" for path in FOLDER.glob("*/__main__.py")}
    found: dict[str, str] = {}
    for path, name in files.items():
        text = path.read_text()
        if '__name__ == "__main__"' in text:
            found[name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return dict(sorted(found.items()))


def main() -> int:
    told = commands()
    width = max(map(len, told))
    print("\n".join(f"python -m {name:{width}}  {about}" for name, about in told.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
