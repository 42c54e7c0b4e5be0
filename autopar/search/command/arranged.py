"""The command line where the number of pipeline stages is searched for, with --devices and --stages."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from autopar.errors import BadArgument, Infeasible, NoAnswerInTime
from autopar.ir.mesh import Mesh
from autopar.ir.words import count_of
from autopar.machine.cli import INTERRUPTED, writing
from autopar.search import stage_meshes, stopping
from autopar.search.command.arguments import Asked, or_bad
from autopar.search.command.posing import Posing, in_best_rounds, posed, timed
from autopar.search.command.sized import request_of
from autopar.search.context import Progress
from autopar.search.document import document as plan_document
from autopar.search.micro_batches import AUTO, counts_in_stages
from autopar.search.orders import can_be_ordered, within_stage
from autopar.search.pipeline import Pipeline
from autopar.search.pipeline_told import document, explain
from autopar.search.pipelines import pipeline_of
from autopar.search.problems import Stop
from autopar.search.request import Request
from autopar.search.reserved import telling
from autopar.search.solve import floor_s
from autopar.search.splits import needs_no_axis
from autopar.search.stage_meshes import Arranged, arrangements, best_arranged
from cost_models.reserve import Room, room_in


def arranged(given: argparse.Namespace, asked: Asked, progress: Progress, check: Callable[[], None]) -> int:
    """Print the best arrangement and the table, and write its file; returns the exit status. Raises as the search of
    one plan does. Ctrl-C: the best by then is the answer.
    """
    started = time.perf_counter()
    devices = asked.meshes[0].ranks
    numbers = _stages(given.stages, devices)
    check()
    with stopping.until_pressed(lambda: progress(stopping.AGAIN)) as stop:
        with contextlib.redirect_stdout(sys.stderr):  # what the model prints must not mix with our answer
            progress(f"{count_of(devices, 'device')} of {asked.hardware.name}, in stages or without")
            posing = posed(asked, given.optimizer, None, progress)
            or_bad(lambda: needs_no_axis(asked.pin))
            rows = timed(posing.seconds, "search", lambda: _rows(given, posing, numbers, progress, stop))
        interrupted = stop()
        best = rows[0].found
        assert best is not None
        posing.seconds["total"] = time.perf_counter() - started
        room = _room(posing, best.mesh)
        if (path := asked.paths.get("-o")) is not None:
            with writing(path):
                best.save(path)
            progress(f"wrote {path}")
        if given.json:
            told = (
                document(given.model, best, room)
                if isinstance(best, Pipeline)
                else plan_document(given.model, best, (), (), posing.seconds, room, interrupted)
            )
            told |= {"arrangements": stage_meshes.documents(rows), "seconds": posing.seconds}
            text = json.dumps(told, indent=1, allow_nan=False) + "\n"
        else:
            first = explain(best, room.tensors) if isinstance(best, Pipeline) else best.explain()
            text = f"{first}\n{stage_meshes.table(rows)}"
        print(text, end="", flush=True)
    if interrupted:
        print(f"autopar.search: {stopping.TABLE}", file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def _stages(text: str, devices: int) -> tuple[int, ...] | None:
    """How many stages there may be; None: any number. Raises BadArgument."""
    if text == AUTO:
        return None
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or int(word) < 1 or devices % int(word):
            raise BadArgument(
                f"--stages {word!r} does not divide {count_of(devices, 'device')}; give numbers that do, with commas "
                f"between, or {AUTO}"
            )
    return tuple(map(int, words))


def _rows(
    given: argparse.Namespace, posing: Posing, numbers: tuple[int, ...] | None, progress: Progress, stop: Stop
) -> tuple[Arranged, ...]:
    asked, request = posing.asked, request_of(given, posing.asked)
    of_count: dict[int, Posing] = {}

    def within(count: int) -> Posing:
        return of_count.setdefault(count, posing.of(count, in_stages=True))

    def find(mesh: Mesh, count: int, request: Request, moved: bool) -> Pipeline:
        room, question = _room(posing, mesh), within(count).question(within_stage(mesh))
        schedule = given.schedule or AUTO
        with telling(room):
            return pipeline_of(
                question, mesh, replace(request, memory=room.tensors), schedule=schedule,
                stages_per_rank=given.stages_per_rank, moved=moved, named=True,
            )  # fmt: skip

    def counts(stages: int) -> list[int]:
        if not isinstance(asked.micro_batches, str) and given.micro_batches is not None:
            found = [asked.micro_batches]
        else:
            found = counts_in_stages(posing.graph(asked.batch_norm, asked.meshes[0]).graph, stages)
        return [one for one in found if can_be_ordered(given.schedule or AUTO, stages, one, given.stages_per_rank)]

    unstaged = None
    if numbers is None or 1 in numbers:
        progress("without stages")
        try:
            _, best = in_best_rounds(posing, request, progress, stop)
            unstaged = Arranged(best.plan.mesh, found=best.plan, searched=True)
        except (Infeasible, NoAnswerInTime) as error:
            if stop():
                raise KeyboardInterrupt from None
            unstaged = Arranged(asked.meshes[0], why=f"without stages: {stage_meshes.why(error)}")
    rows = arrangements(asked.meshes[0].ranks, asked.hardware, numbers, counts)
    if not rows and (unstaged is None or unstaged.found is None):
        raise BadArgument(
            f"--stages {given.stages}: the batch divides into no number of micro-batches that goes with so many stages "
            "(as many as stages, or 2, 4 or 8 times as many); give --micro-batches a number that divides the batch"
        )

    def floor(mesh: Mesh, count: int) -> float:
        return floor_s(within(count).question(within_stage(mesh)), None)

    in_turns = given.schedule in ("1f1b", "gpipe")  # one stage per rank, and backward in one
    return best_arranged(rows, unstaged, find, floor, request, in_halves=not in_turns, progress=progress, stop=stop)


def _room(posing: Posing, mesh: Mesh) -> Room:
    return room_in(posing.asked.memory, posing.asked.hardware, mesh.sizes)
