"""A pipeline, executed: seconds of each stage, what ranks send each other, and the most that each holds, beside what
was predicted of them.

As for a plan of one stage (`autopar.measure.twin`) in three passes: whole steps, undisturbed; steps in which every part
of a stage is timed by itself; one step in which live storages, messages and collectives are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar._compat import TorchDispatchMode
from autopar.attach.module import ParallelModule
from autopar.attach.stage_part import StagePart
from autopar.attach.stage_run import StageRunner
from autopar.ir.layout import local_type
from autopar.measure.pipeline_report import MeasuredPipeline, MeasuredRank, MeasuredStage
from autopar.measure.report import Moved, Pair
from autopar.measure.twin import OTHER, WATCHED, Twin, here, twin_of
from autopar.measure.watch import now
from autopar.pipeline import Action, Durations, play
from autopar.search.pipeline import Pipeline
from cost_models.hardware import Hardware
from cost_models.steps import Comm, received_bytes

FORWARD, INPUTS, WEIGHTS = "forward", "inputs", "weights"  # a whole backward is among the inputs
Key = tuple[int, str]  # (stage, part)


def measure_pipeline(
    pipeline: Pipeline,
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    steps: int = 10,
    hardware: Hardware | None = None,
    precision: MixedPrecisionPolicy | None = None,
    device_type: str = "cpu",
) -> MeasuredPipeline:
    """Execute the pipeline on the running process group, as `autopar.measure.twin.measure` does a plan. All ranks call
    it, and all get the same answer.
    """
    twin, _, notes = twin_of(pipeline, model, args, kwargs, hardware, precision, device_type)
    twin.warm_up()
    step = twin.undisturbed(steps)
    spent = _part_by_part(twin)
    with _Messages(twin) as messages:
        traffic, peaks = twin.counted()
    return _Found(pipeline, twin).report(
        steps, notes, step, spent, peaks["step"], messages.sent, Counter(traffic.nbytes) + messages.summed
    )


# --- seconds ---------------------------------------------------------------------------------------------------------


class _Timed:
    """A part of a stage's program, which adds what it takes to `spent`."""

    def __init__(self, run: Callable[..., Any], key: Key, device: torch.device, spent: Counter[Key]) -> None:
        self.run, self.key, self.device, self.spent = run, key, device, spent

    def __call__(self, *args: Any) -> Any:
        begin = now(self.device)
        made = self.run(*args)
        self.spent[self.key] += now(self.device) - begin  # pyright: ignore[reportArgumentType]
        return made


def _part_by_part(twin: Twin) -> dict[Key, float]:
    """Median seconds over steps of each part of this rank's stages, for one micro-batch."""
    found: list[Counter[Key]] = []
    for _ in range(WATCHED):
        spent = Counter[Key]()
        with each_part(twin.parallel, lambda run, key, spent=spent: _Timed(run, key, twin.device, spent)):
            dist.barrier()
            twin.step()
        found.append(spent)
    rounds = twin.plan.graph.rounds.count
    return {key: median(spent[key] for spent in found) / rounds for key in found[0]}


@contextmanager
def each_part(parallel: ParallelModule, instead: Callable[[Callable[..., Any], Key], Any]) -> Iterator[None]:
    """Inside the context every part of this rank's stages is what `instead` makes of it."""
    (prepared,) = parallel._autopar.prepared()
    runner = prepared.runner
    assert isinstance(runner, StageRunner)

    def of(part: StagePart) -> StagePart:
        program, halves, number = part.runner.program, part.halves, part.number
        backward = None if program.backward is None else instead(program.backward, (number, INPUTS))
        program = replace(program, forward=instead(program.forward, (number, FORWARD)), backward=backward)
        if halves is not None:
            first, second = instead(halves.inputs, (number, INPUTS)), instead(halves.weights, (number, WEIGHTS))
            halves = replace(halves, inputs=first, weights=second)
        return replace(part, runner=replace(part.runner, program=program), halves=halves)

    prepared.runner = replace(runner, parts=tuple(map(of, runner.parts)))
    try:
        yield
    finally:
        prepared.runner = runner


# --- bytes -----------------------------------------------------------------------------------------------------------


class _Messages(TorchDispatchMode):
    """Counts inside the context what this rank sends to other stages, and the sums of gradients behind the last
    micro-batch, which are no functional collectives.
    """

    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self.axis_of, self.mesh = twin.axis_of, twin.plan.mesh
        self.sent, self.summed = 0, Counter[Moved]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.sent += sum(one.nbytes for one in args[0])
        elif func is torch.ops.c10d.allreduce_.default:
            axis = self.axis_of.get(dist.ProcessGroup.unbox(args[1]).group_name)
            if axis is not None:
                nbytes = sum(one.nbytes for one in args[0])
                comm = Comm("all_reduce", axis, self.mesh.size(axis), nbytes)
                self.summed["all_reduce", axis] += received_bytes(comm)
        return func(*args, **(kwargs or {}))


# --- all ranks together ----------------------------------------------------------------------------------------------


class _Found:
    """What the ranks found, put together."""

    def __init__(self, pipeline: Pipeline, twin: Twin) -> None:
        self.pipeline, self.twin = pipeline, twin
        (prepared,) = twin.parallel._autopar.prepared()
        assert isinstance(prepared.runner, StageRunner)
        self.runner = prepared.runner
        self.place = self.runner.pipe.place

    def report(
        self, steps: int, notes: tuple[str, ...], step: float, spent: Mapping[Key, float], peak: int, sent: int,
        moved: Mapping[Moved, int],
    ) -> MeasuredPipeline:  # fmt: skip
        told, pipeline = self.pipeline, self.pipeline
        schedule, durations = told.schedule, told.durations
        stages, ranks = range(schedule.stages), range(schedule.ranks)
        (longest,) = self.twin.largest([step])
        seconds = self.of_all({(stage, what): spent.get((stage, what), 0.0) for stage in stages
                               for what in (FORWARD, INPUTS, WEIGHTS)}, list(spent))  # fmt: skip
        kinds = sorted({kind for plan in pipeline.plans for kind in plan.comm_bytes})
        others = sum(nbytes for kind, nbytes in moved.items() if kind not in kinds)
        kinds, moved = [*kinds, OTHER], {**moved, OTHER: others}
        held = self.per_place([peak, sent, self.tied(), *(moved.get(kind, 0) for kind in kinds)])
        forward, inputs, weights = (
            tuple(seconds[stage, what] for stage in stages) for what in (FORWARD, INPUTS, WEIGHTS)
        )
        whole = tuple(one + other for one, other in zip(inputs, weights, strict=True))
        again = play(schedule, Durations(forward, inputs, weights, durations.send, whole, durations.send_back))
        planned = [self.collectives(rank, kinds) for rank in ranks]
        messages = self.messages()
        return MeasuredPipeline(
            str(pipeline.mesh), pipeline.whole.hardware, schedule.name, schedule.micro_batches,
            pipeline.whole.optimizer, here(self.twin.device, pipeline.mesh.ranks), steps,
            Pair(pipeline.step_seconds, longest), Pair(pipeline.played.makespan, again.makespan),
            tuple(
                MeasuredStage(
                    schedule.rank_of[stage], Pair(durations.forward[stage], forward[stage]),
                    Pair(durations.whole[stage], whole[stage]),
                )
                for stage in stages
            ),
            tuple(
                MeasuredRank(
                    Pair(pipeline.memory[rank].peak, held[rank][0]),
                    (round(messages[rank] + held[rank][2]), round(held[rank][1])),
                    {
                        kind: both
                        for at, kind in enumerate(kinds)
                        if any(both := (planned[rank][kind], round(held[rank][3 + at])))
                    },
                )
                for rank in ranks
            ),
            notes,
        )  # fmt: skip

    def messages(self) -> list[float]:
        """Bytes that each rank of the pipe is to send in its list."""
        nbytes = self.pipeline.nbytes

        def of(action: Action) -> float:
            match action.kind:
                case "SA":
                    return nbytes.sent[action.stage]
                case "SG":
                    return nbytes.gradients[action.stage - 1]
                case _:
                    return 0.0

        return [sum(map(of, row)) for row in self.pipeline.schedule.lists]

    def tied(self) -> int:
        """Bytes that this rank is to send of parameters' gradients that other ranks have terms of, too."""
        found = 0
        staged = self.runner.staged
        for name, places in staged.holders.items():
            if self.place not in places or len(places) == 1:
                continue
            part, at, result, layout = next(
                (part, at, result, layout)
                for part in self.runner.parts
                for at, result, layout in part.gradients
                if result.target == name
            )
            type = part.rows.types[at]
            if type is None and result.ref is not None:
                type = local_type(part.runner.plan.graph.type_of(result.ref), layout, part.runner.plan.mesh)
            if type is not None:
                found += type.nbytes * (len(places) - 1 if self.place == places[0] else 1)
        return found

    def collectives(self, rank: int, kinds: list[Moved]) -> dict[Moved, int]:
        """Bytes that a rank of the pipe is to receive within its place."""
        own = [plan.comm_bytes for plan, at in zip(self.pipeline.plans, self.pipeline.schedule.rank_of, strict=True)
               if at == rank]  # fmt: skip
        return {kind: sum(one.get(kind, 0) for one in own) for kind in kinds}

    def of_all(self, values: Mapping[Key, float], own: list[Key]) -> dict[Key, float]:
        """Of each the largest over the ranks that have it."""
        given = [values[key] if key in own else 0.0 for key in values]
        return dict(zip(values, self.twin.largest(given), strict=True))

    def per_place(self, values: list[float]) -> list[list[float]]:
        """Of each rank of the pipe, the largest over the devices of its stages."""
        ranks = self.pipeline.schedule.ranks
        rows = [values if rank == self.place else [0.0] * len(values) for rank in range(ranks)]
        flat = self.twin.largest([float(value) for row in rows for value in row])
        return [flat[at : at + len(values)] for at in range(0, len(flat), len(values))]
