"""The command line: `python -m autopar.what_if plan.json --bandwidth tensor=2x`. Needs no GPU and no model."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autopar.errors import BadArgument, Infeasible, NoAnswerInTime, PlanMismatch
from autopar.ir.words import count_of
from autopar.machine.cli import BAD_ARGUMENTS, INTERRUPTED, Parser, writable, writing
from autopar.machine.device import has_expandable_segments, memory_bytes, total_bytes
from autopar.machine.plan_files import plan_at, profile_of
from autopar.machine.rules_files import FLAG, HELP, METAVAR
from autopar.plan import Plan
from autopar.plan.tell import human
from autopar.search.command.arguments import check_time_limit, memory_given, or_bad, pins_given
from autopar.search.context import Progress
from autopar.search.memory_options import ALLOWED, allowed
from autopar.what_if.changes import Changes, changes_of, imagined
from autopar.what_if.question import Answers, Asked, what_if
from autopar.what_if.report import report, to_json
from cost_models.hardware import Hardware
from cost_models.reserve import Room, room_in
from cost_models.steps import Compute

INFEASIBLE, NO_ANSWER = 3, 4  # as of a search

DESCRIPTION = """\
Ask the question of a plan anew, with other hardware or less memory: what the same plan takes then, and which plan is
the best then. The plan's file is all that is needed: no model, no trace, no GPU."""

EPILOG = """\
example
  $ python -m autopar.search examples/gpt2.py:build --mesh data=4,tensor=2 --hardware h100-sxm -o plan.json
  $ python -m autopar.what_if plan.json --bandwidth tensor=2x
  $ python -m autopar.what_if plan.json --memory 40GiB
  $ python -m autopar.what_if plan.json --bandwidth all=50GB/s --latency data=0.5x --flops 1.5x

All that is changed is one question. A plan does not say what it was pinned to, or allowed: give --pin and --allow again
where they matter.

exit status: 0 answered, 2 bad arguments, 3 nothing fits then (the same plan is told all the same), 4 no answer in time,
130 interrupted
"""
ASKABLE = (
    "nothing is changed; ask with --bandwidth or --latency AXIS=2x, --flops or --hbm 2x, --memory SIZE, "
    "--pin or --allow"
)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m autopar.what_if", DESCRIPTION, EPILOG)
    add = parser.add_argument
    add("plan", metavar="PLAN", help="a file that python -m autopar.search wrote with -o")
    add("--bandwidth", metavar="AXIS=FIGURE[,...]",
        help="of the links of mesh axes, or all: a factor (tensor=2x, all=0.5x) or a figure (data=50GB/s)")  # fmt: skip
    add("--latency", metavar="AXIS=FIGURE[,...]", help="likewise, of a message: data=0.5x or data=5us")
    add("--flops", metavar="FACTOR", help="of the device's arithmetic in every precision: 2x")
    add("--hbm", metavar="FACTOR", help="of the bandwidth of the device's memory: 1.5x")
    add("--memory", metavar="SIZE", help="what a plan may use of each rank's device, as in the search: 60GiB, or 0.9 "
        "of it; it may be more than the device has (default: as the plan was searched with)")  # fmt: skip
    add("--pin", metavar="NAME=WORD[,NAME=WORD...]", help="as in the search")
    add("--allow", metavar="WORDS", help=f"as in the search: some of {', '.join(ALLOWED)}, or none")
    add("--hardware", metavar="NAME|FILE", help="the profile that the plan was made with, if it is your own file")
    add(FLAG, metavar=METAVAR, help=HELP)
    add("--time-limit", type=float, default=60.0, metavar="S", help="seconds for the solver (default: 60)")
    add("-o", "--output", metavar="FILE", help="write the best plan then; it says that its hardware is imagined")
    add("--json", action="store_true", help="print one JSON object in the place of the text")
    add("--quiet", action="store_true", help="no progress lines on stderr")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Unless it is 0, a sentence on stderr says why."""
    try:
        return _what_if(_parser().parse_args(arguments))
    except (BadArgument, PlanMismatch) as error:
        return _say(error, BAD_ARGUMENTS)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)


def _say(what: object, status: int) -> int:
    print(f"autopar.what_if: {what}", file=sys.stderr)
    return status


def _what_if(given: argparse.Namespace) -> int:
    started = time.perf_counter()

    def progress(text: str) -> None:
        if not given.quiet:
            print(f"{time.perf_counter() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

    check_time_limit(given.time_limit)
    path = None if given.output is None else writable(given.output, "-o", (given.plan, given.hardware or ""))
    asks = (given.bandwidth, given.latency, given.flops, given.hbm, given.memory, given.pin, given.allow)
    if all(one is None for one in asks):
        raise BadArgument(ASKABLE)
    plan = plan_at(given.plan, given.rules)
    hardware = profile_of(plan, given.hardware)
    _check_not_measured(plan, given.plan)
    asked = _asked(given, plan, hardware)
    progress(
        f"read {given.plan}: {count_of(len(plan.graph.nodes), 'operator')} on {plan.mesh}; then: {asked.hardware.name}"
    )
    answers = or_bad(lambda: what_if(plan, hardware, asked, origin=given.plan, progress=progress))
    return _tell(given, answers, path, progress)


def _asked(given: argparse.Namespace, plan: Plan, hardware: Hardware) -> Asked:
    def changed() -> Hardware:
        changes = changes_of(
            hardware, plan.mesh, bandwidth=given.bandwidth, latency=given.latency, flops=given.flops, hbm=given.hbm
        )
        return imagined(hardware, _roomier(given.memory, hardware, changes))

    then = or_bad(changed)
    allow, pin = or_bad(lambda: allowed(given.allow)), pins_given(given.pin)
    return Asked(then, _room(given.memory, plan, then), pin, allow, given.time_limit)


def _room(memory: str | None, plan: Plan, hardware: Hardware) -> Room | None:
    """What a plan may take then; without a word, as much as before."""
    if memory is None and plan.memory_limit is None:
        return None
    sizes, expandable = plan.mesh.sizes, has_expandable_segments()
    if memory is None:
        assert plan.memory_limit is not None
        limit = room_in(0.0, hardware, sizes, expandable=expandable).taken(plan.memory_limit)
    else:
        limit = memory_given(memory, hardware)
    return room_in(limit, hardware, sizes, expandable=expandable)


def _roomier(memory: str | None, hardware: Hardware, changes: Changes) -> Changes:
    """More memory than the device has is imagined, too."""
    total = total_bytes(None, hardware)
    endless = replace(hardware.tiers["hbm"], capacity_bytes=10**15)
    if memory is None or not hardware.reserve or _is_share(memory):
        return changes
    nbytes = memory_bytes(memory, replace(hardware, tiers={**hardware.tiers, "hbm": endless}))
    if nbytes <= total:
        return changes
    capacity = math.ceil(nbytes + hardware.reserve["context_bytes"])
    return replace(changes, words=(*changes.words, f"memory {human(nbytes)}"), capacity_bytes=capacity)


def _is_share(memory: str) -> bool:
    try:
        float(memory)
    except ValueError:
        return False
    return True


def _check_not_measured(plan: Plan, path: str) -> None:
    steps = (step for choice in plan.choices.values() for step in choice.steps)
    if any(isinstance(step, Compute) and step.seconds is not None for step in steps):
        raise BadArgument(
            f"{path} has times of operators that were measured (--profile), which say nothing of another machine; "
            "search for the plan without --profile"
        )


def _tell(given: argparse.Namespace, answers: Answers, path: Path | None, progress: Progress) -> int:
    if path is not None and answers.best is not None:
        with writing(path):
            answers.best.save(path)
        progress(f"wrote {path}")
    if given.json:
        print(json.dumps(to_json(answers, given.plan), indent=1, allow_nan=False))
    else:
        print(report(answers, given.plan), end="", flush=True)
    match answers.why:
        case Infeasible():
            return _say(answers.why, INFEASIBLE)
        case NoAnswerInTime():
            return _say(answers.why, NO_ANSWER)
        case None:
            return 0


if __name__ == "__main__":
    sys.exit(main())
