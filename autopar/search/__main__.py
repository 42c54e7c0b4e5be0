"""The command line: `python -m autopar.search MODEL --mesh NAME=N[,NAME=N...]`, on any machine, without weights."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.errors import BadArgument, TraceError
from autopar.ir.words import count_of
from autopar.machine.cli import BAD_ARGUMENTS, INTERRUPTED, writing
from autopar.page import write_html
from autopar.plan import Plan
from autopar.search import curve, meshes, stopping
from autopar.search.baselines import Row, besides, compare, table
from autopar.search.command.arguments import Asked, parser, read
from autopar.search.command.arranged import arranged
from autopar.search.command.posing import Answered, Posing, in_best_rounds, posed, timed
from autopar.search.command.sized import is_sizing, request_of, sized
from autopar.search.command.staged import is_staged, staged
from autopar.search.command.traced import as_ddp
from autopar.search.document import document
from autopar.search.limits import size
from autopar.search.policies import policies_for
from autopar.search.problems import Stop
from autopar.search.problems import write as write_posed
from autopar.search.search import Infeasible, NoAnswerInTime, Progress
from autopar.search.top import Top, top_within
from autopar.simulate.timeline import to_trace
from autopar.trace.interrupts import interruptible
from cost_models.whole_file import write_whole

INFEASIBLE, NO_ANSWER = 3, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Unless it is 0, a sentence on stderr says why, and no file is written,
    but for a search that was interrupted, whose best plan is.
    """
    try:
        given = parser().parse_args(arguments)
        with interruptible(always=True) as check, _seldom_collected():
            return _search(given, check)
    except (BadArgument, TraceError) as error:
        return _say(error, BAD_ARGUMENTS)
    except Infeasible as error:
        return _say(error, INFEASIBLE)
    except NoAnswerInTime as error:
        return _say(error, NO_ANSWER)
    except KeyboardInterrupt:
        return _say(stopping.NOTHING_YET, INTERRUPTED)


def _say(what: object, status: int) -> int:
    print(f"autopar.search: {what}", file=sys.stderr)
    return status


@contextlib.contextmanager
def _seldom_collected() -> Generator[None]:
    """Python looks for cycles whenever some hundred objects were made. Here millions are, and most of them stay: that
    takes a fifth of the time of a search, and of tracing.
    """
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


# --- the search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """The answer, and what its plan was compared with."""

    answered: Answered
    rows: tuple[Row, ...] = ()
    points: tuple[curve.Point, ...] = ()
    top: Top | None = None

    @property
    def plan(self) -> Plan:
        return self.answered.plan


def _search(given: argparse.Namespace, check: Callable[[], None]) -> int:
    started = time.perf_counter()

    def progress(text: str) -> None:
        check()
        if not given.quiet:
            print(f"{time.perf_counter() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

    in_stages = is_staged(given)
    asked, *others = read(given, progress)
    if in_stages:
        return (staged if given.stages is None else arranged)(given, asked, progress, check)
    if others or is_sizing(given):
        return sized(given, (asked, *others), progress, check)
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints must not mix with our answer
        progress(f"{_where(asked)}, {size(asked.memory)} each")
        posing = posed(asked, given.optimizer, None, progress)
    check()
    with stopping.until_pressed(lambda: progress(stopping.AGAIN)) as stop:  # from here on there is something to be had
        with contextlib.redirect_stdout(sys.stderr):
            posing, found = _found(given, posing, progress, stop)
        interrupted = stop()  # not by Ctrl-C while files are written: those are whole, or not there
        posing.seconds["total"] = time.perf_counter() - started
        _tell(given, posing, found, progress, interrupted)
    return _say(stopping.told(found.plan), INTERRUPTED) if interrupted else 0


def _where(asked: Asked) -> str:
    """What is planned for, in words."""
    mesh, *others = asked.meshes
    measured = ", a profile that was measured" if asked.hardware.is_measured else ""
    ranks = f"{count_of(mesh.ranks, 'rank')} of {asked.hardware.name}{measured}"
    return f"{len(others) + 1} meshes of {ranks}" if others else f"mesh {mesh}, {ranks}"


def _found(given: argparse.Namespace, posing: Posing, progress: Progress, stop: Stop) -> tuple[Posing, _Found]:
    """The plan, and what it is to be compared with, and what was posed in the end. Once it is time to stop, what there
    is by then.
    """
    request = request_of(given, posing.asked)
    try:
        posing, best = in_best_rounds(posing, request, progress, stop)
    except NoAnswerInTime:
        if stop():
            raise KeyboardInterrupt from None
        raise
    if stop():
        return posing, _Found(replace(best, plan=stopping.cut_short(best.plan)))
    found, plan, question, room = _Found(best), best.plan, best.question, best.room

    def compared() -> tuple[Row, ...]:
        others = as_ddp(question, lambda statistics: posing.question(plan.mesh, statistics))
        limited = replace(request, memory=room.tensors)
        usual = policies_for(plan.mesh, saving=question.pricer.updates_together, dominated=True)
        named = tuple(dict.fromkeys((*(usual if given.baselines else ()), *posing.asked.policies)))
        ddp = others if given.baselines else None
        return compare(question, plan, limited, as_ddp=ddp, policies=named, progress=progress, stop=stop)

    def along_memory() -> tuple[curve.Point, ...]:
        points = curve.memory_curve(question, request, (plan,), progress=progress, stop=stop)
        return tuple(replace(point, limit=math.ceil(room.taken(point.limit))) for point in points)

    def quickest() -> Top:
        return top_within(question, request, plan, best.simulated, given.top, room, progress=progress, stop=stop)

    if given.top > 1:
        found = replace(found, top=timed(posing.seconds, "top", quickest))
    if given.baselines or given.policy:
        found = replace(found, rows=timed(posing.seconds, "baselines", compared))
    if given.memory_curve is not None and not stop():
        found = replace(found, points=timed(posing.seconds, "memory_curve", along_memory))
    return posing, found


# --- what is written and printed -------------------------------------------------------------------------------------


def _tell(given: argparse.Namespace, posing: Posing, found: _Found, progress: Progress, interrupted: bool) -> None:
    """Write the files, then print the answer."""
    plan, rows, points, top, among = found.plan, found.rows, found.points, found.top, found.answered.meshes
    if given.json:
        told = document(given.model, plan, rows, points, posing.seconds, found.answered.room, interrupted, among)
        told |= {"top": top.rows(), "top_why": top.why} if top else {}
        text = json.dumps(told, indent=1, allow_nan=False) + "\n"
    else:
        tables = [
            *([meshes.table(among)] if among else []),
            *([top.table()] if top else []),
            *([table(plan, rows)] if rows else []),
            *([curve.table(points)] if points else []),
        ]
        text = "\n".join([plan.explain(), *tables])
    _write(posing.asked, found, progress)
    print(text, end="", flush=True)


def _write(asked: Asked, found: _Found, progress: Progress) -> None:
    plan, points = found.plan, found.points
    writers: dict[str, Callable[[Path], None]] = {
        "-o": plan.save,
        "--html": lambda path: _write_page(path, asked, found),
        "--dot": lambda path: write_whole(path, plan.to_dot()),
        "--trace": lambda path: to_trace(plan, path, asked.hardware),
        "--problem": lambda path: write_posed(found.answered.problem, path),
        "--memory-curve": lambda path: write_whole(path, curve.picture(points)),
    }
    others = found.top.plans[1:] if found.top else ()
    writers |= {f"-o {number}": one.save for number, one in enumerate(others, 2)}
    for flag, path in asked.paths.items():
        if flag.startswith("-o ") and flag not in writers:
            continue  # so many were not found
        if flag == "--memory-curve" and not points:
            continue  # interrupted
        with writing(path):
            writers[flag](path)
        progress(f"wrote {path}")


def _write_page(path: Path, asked: Asked, found: _Found) -> None:
    write_html(
        found.plan, path, asked.hardware, model=asked.model, baselines=besides(found.plan, found.rows),
        curve=[(point.limit, point.plan.predicted_seconds) for point in found.points],
        meshes=meshes.besides(found.answered.meshes),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
