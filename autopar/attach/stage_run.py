"""One rank's part of a pipeline, as it runs: its list of actions, from the first forward to the last gradient.

All of a step runs inside the call, as with micro-batches on one stage (`autopar.attach.run`): the last stage begins
backward with a gradient of 1 for the loss, and the user's is multiplied in when it arrives. Behind the list, outputs
and buffers go to all stages, and the gradients of a parameter that several stages hold are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar.attach.pipe import Pipe
from autopar.attach.rounds import Played, played_in_stage, widened
from autopar.attach.rows import Rows
from autopar.attach.run import Runner, Step, as_terms
from autopar.attach.staging import Staged
from autopar.emit.halves import Halves
from autopar.emit.moves import settle
from autopar.ir.graph import Graph, Node, Result, output_types
from autopar.ir.layout import Layout, local_shape, local_type
from autopar.pipeline import Action
from autopar.rewrite.stages import CHANNEL


@dataclass(frozen=True)
class StageRunner(Runner):
    """`Runner`, of the stage of this rank."""

    pipe: Pipe = field(kw_only=True)
    staged: Staged = field(kw_only=True)
    halves: Halves | None = field(kw_only=True)
    groups: Mapping[str, str] = field(kw_only=True)

    @staticmethod
    def of(
        rest: tuple[Any, ...], pipe: Pipe, staged: Staged, halves: Halves | None, groups: Mapping[str, str]
    ) -> StageRunner:
        """`rest`: what a `Runner` begins with; `halves`: its backward in two, where the schedule has that; `groups`:
        axis of the mesh -> process group.
        """
        made = StageRunner(*rest, pipe=pipe, staged=staged, halves=halves, groups=groups)
        own = [one for one in made.program.results if not one[0].target.startswith(CHANNEL)]
        played = played_in_stage(staged.whole, made.plan, made.own_inputs, own)
        return replace(made, played=played)

    @property
    def graph(self) -> Graph:
        return self.staged.whole.graph

    # --- what it looks like from outside: the whole model ------------------------------------------------------------

    @cached_property
    def results(self) -> tuple[tuple[Result, Layout], ...]:
        """What the model gives back, whatever stage makes it."""
        found: list[tuple[Result, Layout]] = []
        for _, plan in self._stages:
            for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
                if result.kind != "gradient" and not result.target.startswith(CHANNEL):
                    found.append((result, () if delivery is None else delivery.layout))
        return tuple(found)

    @property
    def differentiable(self) -> frozenset[str]:
        last = self._stages[-1][1].graph
        return frozenset(node.target for node in last.nodes if node.op == "tangent")

    @property
    def gradients(self) -> tuple[tuple[Result, Layout], ...]:
        return tuple(one for one in self.program.gradients if not one[0].target.startswith(CHANNEL))

    @cached_property
    def rows(self) -> Rows:
        return Rows.of(self.plan, self.program, self.groups)

    @property
    def own_inputs(self) -> tuple[Node, ...]:
        return tuple(node for node in self.program.inputs if not node.target.startswith(CHANNEL))

    @property
    def _stages(self) -> list[tuple[Any, Any]]:
        return [*zip(self.staged.stages, self.staged.plans, strict=True)]

    def as_read(self, pieces: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Cast, and then gathered where they are stored in more pieces than micro-batches read."""
        cast = super().as_read(pieces)
        told = zip(cast, self.parameters, strict=True)
        return tuple(self.rows.changed(piece, self.plan.gathers(node)) for piece, node in told)

    # --- a step ------------------------------------------------------------------------------------------------------

    def play(
        self, step: Step, pieces: Sequence[Tensor], trains: bool
    ) -> tuple[tuple[Tensor | None, ...], list[Tensor | None] | None]:
        assert self.played is not None
        part = _Part(self, self.pipe, self.staged, self.played, step, pieces, trains)
        for action in self.staged.schedule.lists[self.pipe.place]:
            part.act(action)
        part.finish_sends()
        given = part.shared_results()
        if not trains or self.program.backward is None:
            return given, None
        return given, part.gradients()


class _Part:
    """One step of one rank."""

    def __init__(
        self, runner: StageRunner, pipe: Pipe, staged: Staged, played: Played, step: Step, pieces: Sequence[Tensor],
        trains: bool,
    ) -> None:  # fmt: skip
        self.runner, self.pipe, self.played, self.step, self.trains = runner, pipe, played, step, trains
        self.staged, self.stage = staged, staged.stages[pipe.place]
        self.plan, self.pieces = staged.plans[pipe.place], [*pieces]
        self.came: dict[tuple[str, int], Tensor] = {}  # (channel, micro-batch) -> an activation that is read here
        self.back: dict[tuple[str, int], Tensor] = {}  # and a gradient
        self.going: dict[tuple[str, str, int], Tensor] = {}  # ("output" or "gradient", channel, micro-batch)
        self.saved: dict[int, list[Any]] = {}
        self.left: dict[int, list[Any]] = {}  # of a backward whose first half has run, what the second needs
        self.sends: list[tuple[Any, Tensor]] = []
        program = runner.program
        self.own = [place for place, (one, _) in enumerate(program.results) if not one.target.startswith(CHANNEL)]
        self.outputs: list[Tensor | None] = [None] * len(self.own)
        self.dtypes: list[Any] | None = None
        self.so_far: list[Tensor | None] = []  # in the order of the program's gradients
        self.rows: list[Tensor] = []  # in which of these are summed over ranks
        if trains:
            self.so_far, self.rows = runner.rows.begun(runner.coordinates[0].device)

    def act(self, action: Action) -> None:
        number = action.micro_batch
        match action.kind:
            case "F":
                self._forward(number)
            case "B":
                if self.trains and self.runner.program.backward is not None:
                    self._backward(number)
            case "I":
                if self.trains and self.runner.halves is not None:
                    self._input_gradients(number, self.runner.halves)
            case "W":
                if self.trains and self.runner.halves is not None:
                    self._weight_gradients(number, self.runner.halves)
            case "SA":
                self._send(action.stage + 1, "output", self.stage.sends, number)
            case "RA":
                self._receive(action.stage - 1, self.stage.receives, self.came, number, "input")
            case "SG":
                if self.trains:
                    self._send(action.stage - 1, "gradient", self.stage.gives_back, number)
            case "RG":
                if self.trains:
                    self._receive(action.stage + 1, self.stage.gets_back, self.back, number, "tangent")

    # --- computing ---------------------------------------------------------------------------------------------------

    def _forward(self, number: int) -> None:
        program = self.runner.program
        others, taken = iter(self.played.part(self.step.others, number)), list[Tensor]()
        for node in program.inputs[len(self.pieces) :]:
            is_channel = node.target.startswith(CHANNEL)
            taken.append(self.came[node.target, number] if is_channel else next(others))
        made = program.forward(*self.pieces, *taken, *self._ranks_own(number))
        own, kept = made[: len(program.results)], list(made[len(program.results) :])
        del made, taken
        for (result, _), value in zip(program.results, own, strict=True):
            if result.target.startswith(CHANNEL):
                assert value is not None
                self.going["output", result.target, number] = value
        results = [own[place] for place in self.own]
        self.dtypes = [None if one is None else one.dtype for one in results]
        self.played.put(self.outputs, results, number)
        for channel in self.stage.receives:
            self.came.pop((channel, number))
        if self.trains:
            self.saved[number] = kept

    def _backward(self, number: int) -> None:
        backward = self.runner.program.backward
        assert backward is not None
        made = backward(self.saved.pop(number), *self._tangents(number), *self._ranks_own(number), *self._sums())
        settle()
        self._give(range(len(made)), made, number)

    def _input_gradients(self, number: int, halves: Halves) -> None:
        made = halves.inputs(self.saved[number], *self._tangents(number), *self._ranks_own(number), *self._sums())
        settle()
        self.left[number] = list(made[len(halves.first) :])
        self._give(halves.first, made[: len(halves.first)], number)

    def _weight_gradients(self, number: int, halves: Halves) -> None:
        made = halves.weights(self.left.pop(number), self.saved.pop(number), *self._ranks_own(number), *self._sums())
        settle()
        places = [place for place in range(len(self.runner.program.gradients)) if place not in halves.first]
        self._give(places, made, number)

    def _tangents(self, number: int) -> list[Tensor]:
        nodes = zip(self.runner.program.tangents, self.runner.ones(), strict=True)
        return [self.back.pop((node.target, number)) if node.target.startswith(CHANNEL) else one for node, one in nodes]

    def _ranks_own(self, number: int) -> tuple[Tensor, ...]:
        return *self.runner.coordinates, *self.step.seeds[number]

    def _sums(self) -> tuple[list[Tensor | None], ...]:
        return (self.so_far,) if self.runner.program.added_up else ()

    def _give(self, places: Iterable[int], made: Sequence[Tensor | None], number: int) -> None:
        """Gradients that were made and not added up: of what came over a cut, to be sent; of parameters, where a step
        is one micro-batch.
        """
        for place, value in zip(places, made, strict=True):
            result, _ = self.runner.program.gradients[place]
            if result.target.startswith(CHANNEL):
                assert value is not None
                self.going["gradient", result.target, number] = value
            elif value is not None:
                self.so_far[place] = value

    # --- messages ----------------------------------------------------------------------------------------------------

    def _send(self, stage: int, kind: str, channels: Sequence[str], number: int) -> None:
        self.sends = [(work, value) for work, value in self.sends if not work.is_completed()]
        for channel in channels:
            value = self.going.pop((kind, channel, number)).contiguous()
            self.sends.append((self.pipe.send(stage, value), value))

    def _receive(
        self, stage: int, channels: Sequence[str], into: dict[tuple[str, int], Tensor], number: int, op: str
    ) -> None:
        nodes = {node.target: node for node in self.plan.graph.nodes if node.op == op}
        for channel in channels:
            node = nodes[channel]
            (type,) = node.outputs
            assert type is not None
            shape = local_shape(type.shape, self.plan.choices[node.name].gives[0], self.plan.mesh)
            assert shape is not None
            into[channel, number] = self.pipe.receive(stage, shape, getattr(torch, type.dtype))

    def finish_sends(self) -> None:
        for work, _ in self.sends:
            work.wait()
        self.sends = []

    # --- behind the list ---------------------------------------------------------------------------------------------

    def shared_results(self) -> tuple[Tensor | None, ...]:
        """Outputs and new buffers, which every stage has then."""
        mine = iter(as_terms(self.outputs, self.dtypes or []))
        found: list[Tensor | None] = []
        for stage, plan in enumerate(self.staged.plans):
            types = output_types(plan.graph)
            for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
                if result.kind == "gradient" or result.target.startswith(CHANNEL):
                    continue
                value = next(mine) if stage == self.pipe.place else None
                if result.ref is None or delivery is None:
                    found.append(None)
                    continue
                if value is None:
                    type = types[result.target] if result.kind == "output" else plan.graph.type_of(result.ref)
                    assert type is not None
                    shape = local_shape(type.shape, delivery.layout, plan.mesh)
                    assert shape is not None
                    value = torch.empty(
                        shape, dtype=getattr(torch, type.dtype), device=self.runner.coordinates[0].device
                    )
                found.append(self.pipe.from_stage(stage, value.contiguous()))
        return tuple(found)

    def gradients(self) -> list[Tensor | None]:
        """Of the stage's own parameters, in the order of the program's; those of others are theirs."""
        self.runner.rows.sum(self.so_far, self.rows)
        self.rows.clear()
        gradients = self.runner.program.gradients
        own = [place for place, (result, _) in enumerate(gradients) if not result.target.startswith(CHANNEL)]
        total, dtypes = [self.so_far[place] for place in own], [self.runner.terms[place] for place in own]
        owners = self.staged.owners
        places = {result.target: at for at, (result, _) in enumerate(self.runner.gradients)}
        held = {node.target: at for at, node in enumerate(self.runner.parameters)}
        for name in sorted(places):
            if len(owners[name]) > 1:
                at = places[name]
                if (mine := total[at]) is None:  # all of its terms are made in other stages
                    node = self.runner.parameters[held[name]]
                    stored = local_type(self.plan.graph.stored_type(node), self.plan.parameters[name], self.plan.mesh)
                    dtypes[at] = dtype = getattr(torch, stored.dtype)
                    device = self.runner.coordinates[0].device
                    mine = widened(torch.zeros(stored.shape, dtype=dtype, device=device))
                total[at] = self.pipe.sum_over(owners[name], mine)
        return as_terms(total, dtypes)
