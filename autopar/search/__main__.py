"""The command line: `python -m autopar.search MODEL --mesh NAME=N[,NAME=N...]`, on any machine, without weights."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from autopar.assemble.problem import Assembled
from autopar.errors import BadArgument, TraceError
from autopar.ir.batch_norm import parts_of
from autopar.ir.graph import Graph
from autopar.machine.cli import BAD_ARGUMENTS, INTERRUPTED
from autopar.machine.device import device_type_of, tf32_set
from autopar.page import write_html
from autopar.plan import Plan
from autopar.search import curve, stopping
from autopar.search.baselines import Row, besides, compare, table
from autopar.search.command.arguments import Asked, or_bad, parser, read
from autopar.search.command.traced import as_ddp, traced
from autopar.search.document import document
from autopar.search.limits import size
from autopar.search.pins import pinned
from autopar.search.problems import Stop
from autopar.search.problems import write as write_posed
from autopar.search.request import Request
from autopar.search.reserved import held_within, telling
from autopar.search.search import Infeasible, NoAnswerInTime, Progress, Question, answer, ask
from autopar.simulate.timeline import to_trace
from autopar.trace import graph_of
from autopar.trace.interrupts import interruptible
from cost_models.whole_file import write_whole

T = TypeVar("T")

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
class _Posed:
    """The question of a model, and how its graph is made with other batch norms. `seconds`: of each part of the work,
    which goes on."""

    asked: Asked
    question: Question
    graph_with: Callable[[str], Graph]
    again: Callable[[Graph], Question]
    seconds: dict[str, float]


@dataclass(frozen=True)
class _Found:
    plan: Plan
    rows: tuple[Row, ...] = ()
    points: tuple[curve.Point, ...] = ()
    problems: list[Assembled] = field(default_factory=list[Assembled])


def _search(given: argparse.Namespace, check: Callable[[], None]) -> int:
    started = time.perf_counter()

    def progress(text: str) -> None:
        check()
        if not given.quiet:
            print(f"{time.perf_counter() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

    asked = read(given, progress)
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints must not mix with our answer
        asking = _ask(given, asked, progress)
    check()
    with stopping.until_pressed(lambda: progress(stopping.AGAIN)) as stop:  # from here on there is something to be had
        with contextlib.redirect_stdout(sys.stderr):
            found = _found(given, asking, progress, stop)
        interrupted = stop()  # not by Ctrl-C while files are written: those are whole, or not there
        asking.seconds["total"] = time.perf_counter() - started
        _tell(given, asking, found, progress, interrupted)
    return _say(stopping.told(found.plan), INTERRUPTED) if interrupted else 0


def _ask(given: argparse.Namespace, asked: Asked, progress: Progress) -> _Posed:
    """The model's graph, with the strategies of every node."""
    seconds: dict[str, float] = {}
    mesh, hardware = asked.mesh, asked.hardware
    measured = ", a profile that was measured" if hardware.is_measured else ""
    progress(f"mesh {mesh}, {mesh.ranks} ranks of {hardware.name}{measured}, {size(asked.memory)} each")
    device_type = device_type_of(hardware)
    captured = _timed(seconds, "trace", lambda: traced(asked.model, asked.precision, device_type, progress))
    if device_type == "cuda":
        hardware = hardware.allowing(tf32_set() if asked.tf32 is None else asked.tf32)

    def graph_with(statistics: str) -> Graph:
        return graph_of(captured, asked.precision, parts=parts_of(statistics, mesh))

    graph = graph_with(given.batch_norm)
    progress(f"traced {len(graph.nodes):,} operators, forward and backward")
    or_bad(lambda: pinned(asked.pin, graph))

    def again(graph: Graph) -> Question:
        return ask(graph, mesh, hardware, optimizer=given.optimizer, profile=asked.profile, progress=progress)

    question = _timed(seconds, "propose", lambda: again(graph))
    return _Posed(replace(asked, hardware=hardware), question, graph_with, again, seconds)


def _found(given: argparse.Namespace, asking: _Posed, progress: Progress, stop: Stop) -> _Found:
    """The plan, and what it is to be compared with. Once it is time to stop, what there is by then."""
    asked, question, room = asking.asked, asking.question, asking.asked.room
    request = Request(
        outputs=given.outputs, time_limit_s=given.time_limit, pin=asked.pin, allow=asked.allow,
        simulation=not given.no_simulation,
    )  # fmt: skip
    problems: list[Assembled] = []

    def held(most: float) -> Plan:
        limited = replace(request, memory=most)
        return answer(question, limited, progress=progress, stop=stop, as_posed=problems.append)

    try:
        with telling(room):
            plan = _timed(asking.seconds, "search", lambda: held_within(room, held, question.pricer))
    except NoAnswerInTime:
        if stop():
            raise KeyboardInterrupt from None
        raise
    if stop():
        return _Found(stopping.cut_short(plan), problems=problems)
    found = _Found(plan, problems=problems)

    def compared() -> tuple[Row, ...]:
        others = as_ddp(asking.graph_with, question, asking.again)
        limited = replace(request, memory=room.tensors)
        return compare(question, plan, limited, as_ddp=others, progress=progress, stop=stop)

    def along_memory() -> tuple[curve.Point, ...]:
        points = curve.memory_curve(question, request, (plan,), progress=progress, stop=stop)
        return tuple(replace(point, limit=math.ceil(room.taken(point.limit))) for point in points)

    if given.baselines:
        found = replace(found, rows=_timed(asking.seconds, "baselines", compared))
    if given.memory_curve is not None and not stop():
        found = replace(found, points=_timed(asking.seconds, "memory_curve", along_memory))
    return found


def _timed(seconds: dict[str, float], part: str, work: Callable[[], T]) -> T:
    began = time.perf_counter()
    done = work()
    seconds[part] = time.perf_counter() - began
    return done


# --- what is written and printed -------------------------------------------------------------------------------------


def _tell(given: argparse.Namespace, asking: _Posed, found: _Found, progress: Progress, interrupted: bool) -> None:
    """Write the files, then print the answer."""
    plan, rows, points = found.plan, found.rows, found.points
    if given.json:
        told = document(given.model, plan, rows, points, asking.seconds, asking.asked.room, interrupted)
        text = json.dumps(told, indent=1, allow_nan=False) + "\n"
    else:
        tables = [*([table(plan, rows)] if rows else []), *([curve.table(points)] if points else [])]
        text = "\n".join([plan.explain(), *tables])
    _write(asking.asked, found, progress)
    print(text, end="", flush=True)


def _write(asked: Asked, found: _Found, progress: Progress) -> None:
    plan, points = found.plan, found.points
    writers: Mapping[str, Callable[[Path], None]] = {
        "-o": plan.save,
        "--html": lambda path: _write_page(path, asked, found),
        "--dot": lambda path: write_whole(path, plan.to_dot()),
        "--trace": lambda path: to_trace(plan, path, asked.hardware),
        "--problem": lambda path: write_posed(found.problems[-1], path),
        "--memory-curve": lambda path: write_whole(path, curve.picture(points)),
    }
    for flag, path in asked.paths.items():
        if flag == "--memory-curve" and not points:
            continue  # interrupted
        try:
            writers[flag](path)
        except OSError as error:
            raise BadArgument(f"cannot write {error.filename or path}: {error.strerror}") from error
        progress(f"wrote {path}")


def _write_page(path: Path, asked: Asked, found: _Found) -> None:
    write_html(
        found.plan, path, asked.hardware, model=asked.model, baselines=besides(found.plan, found.rows),
        curve=[(point.limit, point.plan.predicted_seconds) for point in found.points],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
