"""Mutants: the code with one wrong thing at a time, and whether the tests that must see it do.

    python -m benchmarks.mutants [WORDS] [--list]

Works on a copy of the tree in a temporary folder. WORDS: only mutants with these in what they say. Ends with 1 where
one survives, 2 where one does not apply any more.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.mutants.list import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
FOLDERS = ("autopar", "solver", "cost_models", "benchmarks", "examples", "tests", "docs")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutants with these words in what they say")
    parser.add_argument("--list", action="store_true", help="name them, run nothing")
    given = parser.parse_args(words)
    chosen = [one for one in MUTANTS if all(word in f"{one.what} {one.path}" for word in given.words)]
    stale = [one for one in chosen if (ROOT / one.path).read_text().count(one.old) != 1]
    for one in stale:
        print(f"does not apply: {one.what} ({one.path})")
    if given.list or stale:
        print("\n".join(f"{one.path:40} {one.what}" for one in chosen if one not in stale))
        return 2 if stale else 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        survived = [one for one in chosen if not is_killed(one, tree)]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} killed ({1 - len(survived) / max(1, len(chosen)):.0%})")
    return 1 if survived else 0


def copied(folder: Path) -> Path:
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def is_killed(mutant: Mutant, tree: Path) -> bool:
    """Whether a test fails with it."""
    path = tree / mutant.path
    before, start = path.read_text(), time.monotonic()
    path.write_text(before.replace(mutant.old, mutant.new))
    try:
        args = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *shlex.split(mutant.tests)]
        done = subprocess.run([sys.executable, *args], cwd=tree, capture_output=True, text=True, check=False)
    finally:
        path.write_text(before)
    told = {0: "SURVIVED", 1: "killed"}.get(done.returncode, f"no test ran (status {done.returncode})")
    print(f"{told:10} {time.monotonic() - start:5.0f} s  {mutant.path:40} {mutant.what}", flush=True)
    return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
