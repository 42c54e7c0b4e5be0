"""The command line where the first axis of the mesh is one of pipeline stages."""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.errors import BadArgument, Infeasible, NoAnswerInTime, NotCut
from autopar.ir.graph import batch_size
from autopar.ir.mesh import Mesh
from autopar.ir.words import count_of
from autopar.machine.cli import writing
from autopar.search import stage_policies
from autopar.search.command.arguments import Asked, or_bad, parser
from autopar.search.command.posing import Posing, posed, timed
from autopar.search.command.sized import request_of
from autopar.search.context import Progress, Question
from autopar.search.micro_batches import AUTO, counts_in_stages
from autopar.search.orders import PIPE, can_be_ordered, orders_of, ranks_of, within_stage
from autopar.search.pins import pinned
from autopar.search.pipeline import Pipeline
from autopar.search.pipeline_files import to_dot, to_trace
from autopar.search.pipeline_told import document, explain, summary
from autopar.search.pipelines import pipeline_of
from autopar.search.reserved import telling
from autopar.search.splits import settled
from autopar.search.stage_policies import STAGED, StagedRow, compare_staged
from cost_models.reserve import Room, room_in
from cost_models.whole_file import write_whole

NOT_YET = (
    "devices", "html", "problem", "memory_curve", "top",
    "no_simulation", "price", "tokens", "days", "picture",
)  # fmt: skip  # by the names of the arguments


def is_staged(given: argparse.Namespace) -> bool:
    """Whether stages are asked for: by an axis of the mesh, or by --stages. Raises BadArgument for what makes no sense
    with them, or only with them.
    """
    names = [part.partition("=")[0].strip() for part in (given.mesh or "").split(",")]
    if PIPE not in names and given.stages is None:
        for flag, value in (("--schedule", given.schedule), ("--stages-per-rank", given.stages_per_rank)):
            if value is not None:
                raise BadArgument(
                    f"{flag} {value} is of pipeline stages; give --mesh a first axis {PIPE}, or leave it out"
                )
        return False
    if given.stages is not None and (given.devices is None or "," in given.devices):
        raise BadArgument(
            f"--stages {given.stages} goes with --devices and one number of them; with --mesh the first axis says how "
            f"many stages there are: {PIPE}=4,data=2"
        )
    here = f"--mesh {given.mesh}" if given.stages is None else f"--stages {given.stages}"
    without = f"the axis {PIPE}" if given.stages is None else "--stages"
    default = parser().get_default
    for name in (*NOT_YET, *(("baselines", "policy", "dot", "trace") if given.stages is not None else ())):
        if getattr(given, name) != default(name) and not (name == "devices" and given.stages is not None):
            flag = "--" + name.replace("_", "-")
            raise BadArgument(
                f"{flag} is not there yet for a step in pipeline stages ({here}); leave it out, or plan without "
                f"{without}"
            )
    if "," in (given.hardware or ""):
        raise BadArgument(
            f"--hardware {given.hardware} names several machines, and a step in pipeline stages is planned for one; "
            "leave the others out"
        )
    return True


@dataclass
class _Tried:
    """What each number of micro-batches came to."""

    found: dict[int, Pipeline] = field(default_factory=dict[int, Pipeline])
    why: dict[int, Exception] = field(default_factory=dict[int, Exception])

    def best(self) -> Pipeline:
        """The quickest. Raises the reason of the last one where there is none, or why the model cannot be cut."""
        if not self.found:
            first, last = (list(self.why.values())[place] for place in (0, -1))
            if isinstance(first, NotCut):
                raise BadArgument(str(first)) from first
            raise last
        return min(self.found.values(), key=lambda one: one.step_seconds)

    def told(self) -> list[str]:
        """A line for each, where there are several."""
        if len(self.found) + len(self.why) < 2:
            return []
        lines = [f"  {summary(one)}" for _, one in sorted(self.found.items())]
        why = {Infeasible: "does not fit", NoAnswerInTime: "no answer in time"}
        lines += [
            f"  {count_of(count, 'micro-batch', 'micro-batches')}: {why.get(type(error), str(error))}"
            for count, error in sorted(self.why.items())
        ]
        return ["numbers of micro-batches that were tried:", *lines]


def staged(given: argparse.Namespace, asked: Asked, progress: Progress, check: Callable[[], None]) -> int:
    """Print the pipeline, and write its file; returns the exit status. Raises as the search of one plan does."""
    started = time.perf_counter()
    (mesh,) = asked.meshes
    or_bad(lambda: ranks_of(mesh))
    inner, tried = within_stage(mesh), _Tried()
    room = room_in(asked.memory, asked.hardware, mesh.sizes)
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints must not mix with our answer
        progress(f"mesh {mesh}, {count_of(mesh.ranks, 'rank')} of {asked.hardware.name}")
        posing = posed(replace(asked, meshes=(inner,)), given.optimizer, None, progress)
        for count in _counts(given, posing, ranks_of(mesh)):
            if count == 1 and (tried.found or not all(isinstance(why, NotCut) for why in tried.why.values())):
                break  # a single one is the slowest, for models that cannot be cut into more
            check()
            progress(f"a step in {count_of(count, 'micro-batch', 'micro-batches')}")
            try:
                tried.found[count] = _found(given, posing.of(count, in_stages=True), mesh, room, progress)
            except (Infeasible, NoAnswerInTime, NotCut) as error:
                tried.why[count] = error
        rows = _compared(given, posing, mesh, tried.best(), room, progress)
    best = tried.best()
    posing.seconds["total"] = time.perf_counter() - started
    text = explain(best, room.tensors) + "".join(f"{line}\n" for line in tried.told())
    text += f"\n{stage_policies.table(best, rows)}" if rows else ""
    if given.json:
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        told = document(given.model, best, room) | {
            "tried": [
                {"micro_batches": count, "simulated_seconds": one.step_seconds, "peak_bytes": one.peak_bytes}
                for count, one in sorted(tried.found.items())
            ]
            + [{"micro_batches": count, "why": str(error)} for count, error in sorted(tried.why.items())],
            "baselines": stage_policies.documents(best, rows),
            "seconds": posing.seconds,
            "cpu_seconds": sum(one.ru_utime + one.ru_stime for one in usage),
        }
        text = json.dumps(told, indent=1, allow_nan=False) + "\n"
    write(asked, best, progress)
    print(text, end="", flush=True)
    return 0


def write(asked: Asked, found: Pipeline, progress: Progress) -> None:
    """The files that were asked for."""
    files: dict[str, Callable[[Path], None]] = {
        "-o": found.save,
        "--dot": lambda path: write_whole(path, to_dot(found)),
        "--trace": lambda path: to_trace(found, path),
    }
    for flag, path in asked.paths.items():
        with writing(path):
            files[flag](path)
        progress(f"wrote {path}")


def _counts(given: argparse.Namespace, posing: Posing, stages: int) -> list[int]:
    """Numbers of micro-batches to try, so many or more ranks of stages."""
    schedule, chunks = given.schedule or AUTO, given.stages_per_rank
    wanted = posing.asked.micro_batches
    if not isinstance(wanted, str):
        or_bad(lambda: orders_of(schedule, stages, wanted, chunks))
        return [wanted]
    graph = posing.graph(posing.asked.batch_norm, posing.asked.meshes[0]).graph
    if counts := counts_in_stages(graph, stages):
        or_bad(lambda: orders_of(schedule, stages, counts[0], chunks))
        return [one for one in (*counts, 1) if can_be_ordered(schedule, stages, one, chunks)]
    raise BadArgument(
        f"a batch of {batch_size(graph)} does not divide into {stages} micro-batches, one for each stage, nor into 2, "
        f"4 or 8 times as many, and --micro-batches {AUTO} tries no others; give a number that divides the batch"
    )


def _compared(
    given: argparse.Namespace, posing: Posing, mesh: Mesh, best: Pipeline, room: Room, progress: Progress
) -> tuple[StagedRow, ...]:
    """The baselines that were asked for, in as many micro-batches as the best."""
    named = tuple(dict.fromkeys((*(STAGED if given.baselines else ()), *posing.asked.policies)))
    if not named:
        return ()
    request = replace(request_of(given, posing.asked), memory=room.tensors)
    question = posing.of(best.schedule.micro_batches, in_stages=True).question(within_stage(mesh))

    def compare() -> tuple[StagedRow, ...]:
        return compare_staged(question, mesh, request, named, progress=progress)

    return timed(posing.seconds, "baselines", compare)


def _found(given: argparse.Namespace, posing: Posing, mesh: Mesh, room: Room, progress: Progress) -> Pipeline:
    asked = posing.asked
    question: Question = posing.question(within_stage(mesh))
    or_bad(lambda: settled(question, pinned(asked.pin, question.graph).splits))
    request = replace(request_of(given, asked), memory=room.tensors)

    def find() -> Pipeline:
        with telling(room):
            return pipeline_of(
                question, mesh, request, schedule=given.schedule or AUTO, stages_per_rank=given.stages_per_rank,
                progress=progress,
            )  # fmt: skip

    return timed(posing.seconds, "search", find)
