"""`python -m autopar`, or `autopar`: the commands, a line each; `autopar search` is `python -m autopar.search`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from autopar.machine.cli import BAD_ARGUMENTS

COMMANDS = {
    "search": ("autopar.search", "find a plan, with no GPU and no cluster"),
    "what-if": ("autopar.what_if", "a plan on hardware that you imagine, and the best plan there"),
    "scale": ("autopar.scale", "how a plan's time and memory grow, from its file"),
    "diff": ("autopar.diff", "compare two plans of one model, and say what costs what"),
    "pipeline": ("autopar.pipeline", "schedules of pipeline parallelism, played: who does what when, who is idle"),
    "measure": ("autopar.measure", "run a plan, and print predicted beside measured"),
    "calibrate": ("autopar.calibrate", "measure this machine, and write its profile"),
    "solve": ("solver", "solve a problem file"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of the command; 0 where they are listed, 2 for a name that is none."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments), ""]
    name = name.replace("_", "-")  # python -m autopar.what_if, autopar what-if
    if name in COMMANDS:
        command = importlib.import_module(f"{COMMANDS[name][0]}.__main__")
        return int(command.main(rest[:-1]))
    told = "\n".join(f"  {known:10} {about}" for known, (_, about) in COMMANDS.items())
    usage = f"usage: autopar COMMAND ...\n\n{told}\n\nautopar COMMAND --help says more"
    if name in ("", "-h", "--help"):
        print(usage)
        return 0
    print(f"autopar: there is no command {name!r}\n{usage}", file=sys.stderr)
    return BAD_ARGUMENTS


if __name__ == "__main__":
    sys.exit(main())
