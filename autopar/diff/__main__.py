"""The command line: `python -m autopar.diff A.json B.json`. Needs no GPU and no model: plans have their graphs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from autopar.diff import difference, report, sentence
from autopar.errors import BadArgument, PlanMismatch
from autopar.machine.cli import BAD_ARGUMENTS, INTERRUPTED, Parser
from autopar.machine.plan_files import plan_at, profile_of
from autopar.machine.rules_files import FLAG, HELP, METAVAR
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.simulate.timeline import pricer_of
from cost_models.hardware import Hardware, known_hardware

DESCRIPTION = """\
Compare two plans of one model: what the second does otherwise, and where its step gains or loses time. Each instant of
a step belongs to one class, so the classes add up to the whole difference."""

EPILOG = """\
example
  $ python -m autopar.search examples/gpt2.py:build --mesh data=8 --hardware h100-sxm -o one.json
  $ python -m autopar.search examples/gpt2.py:build --mesh data=4,tensor=2 --hardware h100-sxm -o two.json
  $ python -m autopar.diff one.json two.json

exit status: 0 compared, 2 bad arguments or plans of different models, 130 interrupted
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m autopar.diff", DESCRIPTION, EPILOG)
    add = parser.add_argument
    add("one", metavar="A", help="a file that python -m autopar.search wrote with -o")
    add("other", metavar="B", help="another one, of the same model")
    add("--hardware", metavar="NAME|FILE",
        help="the profile that the plans were made with, if it is your own file; a plan that names one of autopar's "
        "has that")  # fmt: skip
    add(FLAG, metavar=METAVAR, help=HELP)
    add("--json", action="store_true", help="print one JSON object in the place of the text")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Unless it is 0, a sentence on stderr says why."""
    try:
        return _diff(_parser().parse_args(arguments))
    except (BadArgument, PlanMismatch) as error:
        return _say(error, BAD_ARGUMENTS)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)


def _say(what: object, status: int) -> int:
    print(f"autopar.diff: {what}", file=sys.stderr)
    return status


def _diff(given: argparse.Namespace) -> int:
    one, other = plan_at(given.one, given.rules), plan_at(given.other, given.rules)
    pricers = _pricer(one, given.hardware), _pricer(other, given.hardware)
    found = difference(one, other, pricers, (given.one, given.other))
    if given.json:
        told = {"plans": [given.one, given.other], "told": sentence(found), **asdict(found)}
        print(json.dumps(told, indent=1, allow_nan=False))
    else:
        print(report(found), end="")
    return 0


def _pricer(plan: Plan, name: str | None) -> Pricer:
    """What priced the plan: a profile of autopar's where that has the plan's figures, else the one that was given."""
    is_known = plan.hardware in known_hardware() and _has_figures(plan, Hardware.known(plan.hardware))
    return pricer_of(plan, profile_of(plan, None if is_known else name))


def _has_figures(plan: Plan, hardware: Hardware) -> bool:
    return hardware.allowing(plan.tf32).digest == plan.hardware_digest


if __name__ == "__main__":
    sys.exit(main())
