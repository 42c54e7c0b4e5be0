"""runner_of: a plan, or those of a rank's stages, as what runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.attach.rounds import played
from autopar.attach.run import Runner
from autopar.attach.stage_run import StageRunner
from autopar.attach.staging import Staged
from autopar.emit import Emitted, emit
from autopar.emit.groups import name_groups
from autopar.emit.halves import Halves
from autopar.emit.seeded import pieces_of
from autopar.plan import Plan


def runner_of(state: Any, plan: Plan, staged: Staged | None) -> Runner:
    device, pipe = state.device_mesh.device_type, state.pipe
    if pipe is None or staged is None:
        groups = name_groups(state.groups, plan.groups(), state.device_mesh, state.mesh)
    else:
        groups = pipe.name_groups(state.groups, {axis for one in staged.plans for axis in one.groups()})
    coordinate = state.device_mesh.get_coordinate()
    assert coordinate is not None
    coordinates = tuple(torch.tensor(index, device=device) for index in state.mesh.indices(coordinate))

    def part(plan: Plan, stage: int | None) -> tuple[Runner, Halves | None]:
        program: Emitted = emit(plan, groups, device, one_at_a_time=device == "cpu")
        halves = None if staged is None or stage is None else staged.halves(program, stage)
        if state.backend == "inductor":
            program, halves = program.compiled(), halves and halves.compiled()
        pieces = pieces_of(program.drawing, state.mesh, coordinate)
        return Runner(program, plan, state.mesh, coordinates, pieces, state.updates, state.watch), halves

    if pipe is not None and staged is not None:
        parts = [(stage, *part(staged.plans[stage], stage)) for stage in staged.stages_at(pipe.place)]
        return StageRunner.of(parts, plan, pipe, staged, groups)
    runner, _ = part(plan, None)
    return replace(runner, played=played(plan, runner.program.inputs, runner.program.results))
