"""The command line: `python -m autopar.pipeline --stages 4 --micro-batches 8`. Needs no GPU and no model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from autopar.errors import BadArgument
from autopar.ir.words import count_of
from autopar.machine.cli import BAD_ARGUMENTS, INTERRUPTED, Parser
from autopar.pipeline.generate import SCHEDULES, make_schedule, recipe_of
from autopar.pipeline.picture import comparison, picture
from autopar.pipeline.play import Durations, Played, play
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.verify import verify

DESCRIPTION = """\
Show the schedules of pipeline parallelism: who computes what when, how long a step takes, who is idle, and how much is
in flight. Everything is played from the seconds that you give; nothing is run."""

EPILOG = """\
examples
  $ python -m autopar.pipeline --stages 4 --micro-batches 8
  $ python -m autopar.pipeline --stages 4 --micro-batches 8 --schedule zb-h1 --backward-weight 0.5 --send 0.03
  $ python -m autopar.pipeline --stages 3 --micro-batches 6 --forward 1,2,1.5 --send 0.1,0.3

Each stage has a rank of its own, and seconds are those of one micro-batch: one value for all stages, or one for each,
by commas; sends have one for each cut. Schedules with several stages per rank (interleaved, looped-bfs,
interleaved-zb, zb-v) cut each rank's share into equal chunks.

exit status: 0 shown, 2 bad arguments, 130 interrupted
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m autopar.pipeline", DESCRIPTION, EPILOG)
    add = parser.add_argument
    add("--stages", type=int, required=True, metavar="P", help="stages, each on a rank of its own")
    add("--micro-batches", type=int, required=True, metavar="M", help="micro-batches of a step")
    add("--schedule", default="all", metavar="NAME", help=f"{', '.join(SCHEDULES)}, or all (default)")
    add("--chunks", type=int, metavar="V", help="stages per rank where a schedule leaves that open (default: 2)")
    add("--forward", default="1", metavar="S[,S...]", help="seconds of a stage's forward (default: 1)")
    add("--backward-input", default="1", metavar="S[,S...]", help="of the gradient of its input (default: 1)")
    add("--backward-weight", default="1", metavar="S[,S...]", help="of the gradient of its weights (default: 1)")
    add("--send", default="0", metavar="S[,S...]", help="of a message over the cut behind it, one way (default: 0)")
    add("--lists", action="store_true", help="print each rank's list with its sends and receives, too")
    add("--width", type=int, default=120, metavar="COLUMNS", help="of a picture, at most (default: 120)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Unless it is 0, a sentence on stderr says why."""
    try:
        return _show(_parser().parse_args(arguments))
    except BadArgument as error:
        return _say(error, BAD_ARGUMENTS)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)


def _say(what: object, status: int) -> int:
    print(f"autopar.pipeline: {what}", file=sys.stderr)
    return status


def _show(given: argparse.Namespace) -> int:
    for flag, number in (("--stages", given.stages), ("--micro-batches", given.micro_batches)):
        if number < 1:
            raise BadArgument(f"{flag} {number} is too few; at least 1 is needed")
    if given.width < 20:
        raise BadArgument(f"--width {given.width} is too narrow for a picture; give 20 columns or more")
    shares = {flag: _seconds(flag, getattr(given, flag), given.stages) for flag in SHARES}
    send = _seconds("send", given.send, given.stages - 1)
    one_send = "," not in given.send
    plays: list[tuple[Played, Durations]] = []
    left_out: list[str] = []
    for name in SCHEDULES if given.schedule == "all" else [given.schedule]:
        try:
            chunks = given.chunks if given.schedule != "all" or not recipe_of(name).fixed else None
            schedule = make_schedule(name, given.stages, given.micro_batches, chunks)
            durations = _durations(schedule, shares, send, one_send)
        except ValueError as error:
            if given.schedule != "all":
                raise BadArgument(str(error)) from error
            left_out.append(f"left out: {error}")
            continue
        verify(schedule)
        played = play(schedule, durations)
        plays.append((played, durations))
        counted = count_of(schedule.micro_batches, "micro-batch", "micro-batches")
        print(f"{name}: {count_of(schedule.stages, 'stage')}, {counted}")
        print(picture(played, given.width))
        if given.lists:
            print(*(f"list {rank:<3} {schedule.text(rank)}" for rank in range(schedule.ranks)), sep="\n")
        print()
    print("\n".join([comparison(plays), *left_out]))
    return 0


# --- arguments -------------------------------------------------------------------------------------------------------

SHARES = ("forward", "backward_input", "backward_weight")


def _seconds(name: str, text: str, count: int) -> tuple[float, ...]:
    """One value for all, or `count` of them."""
    flag = f"--{name.replace('_', '-')}"
    try:
        entries = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise BadArgument(f"{flag} {text!r} is no list of seconds; write for example {flag} 1,2,1.5") from None
    if len(entries) not in (1, count):
        things = "cuts between the stages" if name == "send" else "stages"
        raise BadArgument(f"{flag} has {len(entries)} entries for {count} {things}; give one for each, or one for all")
    if wrong := [one for one in entries if not 0 <= one < float("inf")]:
        raise BadArgument(f"{flag} has {wrong[0]:g}; seconds must be finite and not negative")
    return entries if len(entries) == count else entries * count


def _durations(
    schedule: Schedule, shares: dict[str, tuple[float, ...]], send: tuple[float, ...], one_send: bool
) -> Durations:
    """Each rank's share in equal chunks. Raises ValueError for a cut of which nobody has said what a send takes."""
    parts = {
        name: tuple(share[rank] / schedule.stages_per_rank for rank in schedule.rank_of)
        for name, share in shares.items()
    }
    sends: list[float] = []
    for one, other in zip(schedule.rank_of, schedule.rank_of[1:], strict=False):
        if abs(one - other) > 1 and not one_send:
            raise ValueError(
                f"{schedule.name} sends from rank {one} to rank {other}, too, and --send has seconds for neighbours "
                "only; give one value for all"
            )
        sends.append(0.0 if one == other else send[min(one, other)] if abs(one - other) == 1 else send[0])
    return Durations(**parts, send=tuple(sends))


if __name__ == "__main__":
    sys.exit(main())
