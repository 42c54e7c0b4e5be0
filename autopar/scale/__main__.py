"""The command line: `python -m autopar.scale plan.json`. Needs no GPU and no model: the plan has its graph."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence

from autopar.errors import BadArgument, PlanMismatch
from autopar.ir.graph import Graph
from autopar.ir.words import count_of
from autopar.machine.cli import BAD_ARGUMENTS, INTERRUPTED, Parser
from autopar.machine.plan_files import plan_at, profile_of
from autopar.machine.rules_files import FLAG, HELP, METAVAR
from autopar.plan.fit import check_rules
from autopar.rewrite import plain
from autopar.rules.patterns import is_pattern
from autopar.scale.elsewhere import splits_behind
from autopar.scale.grow import growth_where_possible
from autopar.scale.growth import Sources, usual_sources
from autopar.scale.report import report, spelled
from autopar.scale.study import Ground, study

DESCRIPTION = """\
Say how a plan's time and memory grow with the batch, the sequence and the devices, where it leaves memory, and where
another plan would be better. The plan's file is all that is needed."""

EPILOG = """\
example
  $ python -m autopar.search examples/gpt2.py:build --mesh data=4,tensor=2 --hardware h100-sxm -o plan.json
  $ python -m autopar.scale plan.json

What grows is named by dims of the model's inputs. The batch is dim 0 of the inputs that agree in it, the sequence dim 1
of integer inputs; --grow sequence=x:1 says it for others, --grow frames=video:1 adds a name, --grow sequence= takes one
out. The rest of the graph follows from the operators' sharding rules; where it does not, the answer says so.

exit status: 0 answered, 2 bad arguments, 130 interrupted
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m autopar.scale", DESCRIPTION, EPILOG)
    add = parser.add_argument
    add("plan", metavar="PLAN", help="a file that python -m autopar.search wrote with -o")
    add("--grow", action="append", default=[], metavar="NAME=INPUT:DIM[,INPUT:DIM...]",
        help="a size that grows, by dims of inputs; may stand several times (default: batch and sequence)")  # fmt: skip
    add("--times", default="2,4", metavar="N[,N...]", help="by what each of them grows in the table (default: 2,4)")
    add("--hardware", metavar="NAME|FILE", help="the profile that the plan was made with, if it is your own file")
    add(FLAG, metavar=METAVAR, help=HELP)
    add("--no-search", action="store_true", help="do not search for better plans; each takes as long as a search")
    add("--time-limit", type=float, default=60.0, metavar="S", help="seconds for each of these searches (default: 60)")
    add("--quiet", action="store_true", help="no progress lines on stderr")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Unless it is 0, a sentence on stderr says why."""
    try:
        return _scale(_parser().parse_args(arguments))
    except (BadArgument, PlanMismatch) as error:
        return _say(error, BAD_ARGUMENTS)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)


def _say(what: object, status: int) -> int:
    print(f"autopar.scale: {what}", file=sys.stderr)
    return status


def _scale(given: argparse.Namespace) -> int:
    started = time.perf_counter()

    def progress(text: str) -> None:
        if not given.quiet:
            print(f"{time.perf_counter() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

    times = _times(given.times)
    if not 0 < given.time_limit < math.inf:
        raise BadArgument(f"--time-limit {given.time_limit:g} is not a time; give seconds above 0, for example 60")
    plan = plan_at(given.plan, given.rules)
    if plan.residence or plain(plan.graph) is not plan.graph:
        raise BadArgument(
            f"{given.plan} recomputes values, keeps some on the host, or keeps gathered weights (zero1, zero2), and "
            "how that grows is not known; make a plan with python -m autopar.search ... --allow none --no-simulation"
        )
    if looped := next((name for name, choice in plan.choices.items() if is_pattern(choice.body)), None):
        raise BadArgument(
            f"{given.plan} runs %{looped} in a loop, and how that grows is not known; make a plan without with "
            "python -m autopar.search ... --policy NAME"
        )
    if tokens := next((node for node in plan.graph.nodes if splits_behind(plan, node)), None):
        raise BadArgument(
            f"{given.plan} splits the tokens of %{tokens.name} by the sequence behind a batch of one a rank, and how "
            "that grows is not known; make a plan of a larger batch, or one without: python -m autopar.search ... "
            "--policy NAME"
        )
    if (count := plan.graph.rounds.count) > 1:
        raise BadArgument(
            f"{given.plan} runs a step in {count} micro-batches, and how that grows is not known; make a plan with "
            "python -m autopar.search ... --micro-batches 1"
        )
    check_rules(plan, str(given.plan))
    hardware = profile_of(plan, given.hardware)
    progress(f"read {given.plan}: {count_of(len(plan.graph.nodes), 'operator')} on {plan.mesh}")
    try:
        growth, why_not = growth_where_possible(plan.graph, _sources(given.grow, plan.graph))
    except ValueError as error:
        raise BadArgument(str(error)) from error
    found = study(
        Ground(plan, growth, hardware), times,
        why_not=why_not, search_s=None if given.no_search else given.time_limit, progress=progress,
    )  # fmt: skip
    print(report(found), end="")
    return 0


# --- arguments -------------------------------------------------------------------------------------------------------


def _times(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 1 for part in parts):
        raise BadArgument(f"--times {text!r} are not whole numbers from 2; write for example 2,4,8")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _sources(grow: Sequence[str], graph: Graph) -> Sources:
    """The usual ones, less the dims that were given another name."""
    usual = usual_sources(graph)
    given: dict[str, tuple[tuple[str, int], ...]] = {}
    targets = {spelled(node.target): node.target for node in graph.nodes if node.op == "input"}
    for text in grow:
        name, equals, dims = text.partition("=")
        if not equals or not name.isidentifier():
            raise BadArgument(f"--grow {text!r} is not NAME=INPUT:DIM; write for example sequence=x:1")
        if not dims:
            usual.pop(name, None)
            continue
        listed: list[tuple[str, int]] = []
        for part in dims.split(","):
            target, colon, dim = part.strip().rpartition(":")
            if not colon or not dim.isdigit():
                raise BadArgument(f"--grow {text!r}: {part!r} is not INPUT:DIM; write for example x:1")
            if target not in targets and target not in targets.values():
                raise BadArgument(f"--grow {text!r}: no input {target!r}; this plan has {', '.join(targets)}")
            listed.append((targets.get(target, target), int(dim)))
        given[name] = tuple(listed)
    taken = {dim for dims in given.values() for dim in dims}
    kept = {name: left for name, dims in usual.items() if (left := tuple(dim for dim in dims if dim not in taken))}
    found = {**kept, **given}
    if not found:
        raise BadArgument("this plan's model has no inputs with a batch; say what grows with --grow NAME=INPUT:DIM")
    return found


if __name__ == "__main__":
    sys.exit(main())
