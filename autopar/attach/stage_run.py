"""One rank's part of a pipeline, as it runs: its stages, and its list of actions, from the first forward to the last
gradient.

All of a step runs inside the call, as with micro-batches on one stage (`autopar.attach.run`): the last stage begins
backward with a gradient of 1 for the loss, and the user's is multiplied in when it arrives. What goes
between two of its own stages does not travel. Behind the list, outputs and buffers go to all ranks, and the gradients
of a parameter that several stages hold are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar.attach.pipe import Pipe
from autopar.attach.rounds import played_in_stage, widened
from autopar.attach.rows import Rows
from autopar.attach.run import Runner, Step, as_terms
from autopar.attach.stage_part import Held, StagePart
from autopar.attach.staging import Staged
from autopar.emit.emit import INPUT_KINDS
from autopar.emit.halves import Halves
from autopar.emit.seeded import seeds
from autopar.ir.graph import Node, Result, TensorType, input_type, is_channel, output_types
from autopar.ir.layout import Layout, local_shape, local_type
from autopar.pipeline import Action
from autopar.plan import Plan


def _inputs(staged: Staged, runners: Iterable[Runner]) -> tuple[Node, ...]:
    """What a call brings to these programs, each once, in the order of kinds that an emitted program has. Arguments
    that have a gradient come to every rank, whose caller gets it.
    """
    found = {node.name: node for node in staged.whole.graph.inputs_with_gradient}
    for node in (node for one in runners for node in one.program.inputs if not is_channel(node.target)):
        found.setdefault(node.name, node)
    return tuple(node for kind in INPUT_KINDS for node in found.values() if node.op == kind)


@dataclass(frozen=True)
class OfArgument:
    """A gradient of an argument, the places along `pipe` that make terms of it, and how it lies, as this rank's piece
    does.
    """

    result: Result
    places: Sequence[int]
    layout: Layout
    piece: TensorType


@dataclass(frozen=True)
class StageRunner(Runner):
    """`Runner`, of the stages of this rank; `plan` is that of the whole model, `program` that of the first stage."""

    pipe: Pipe = field(kw_only=True)
    staged: Staged = field(kw_only=True)
    parts: tuple[StagePart, ...] = field(kw_only=True)

    @staticmethod
    def of(
        runners: Sequence[tuple[int, Runner, Halves | None]], plan: Plan, pipe: Pipe, staged: Staged,
        groups: Mapping[str, str],
    ) -> StageRunner:  # fmt: skip
        """`runners`: (number, runner, halves) of each stage of this rank, in order; `plan`: of the whole model, with
        the residence of what this rank holds; `groups`: axis of the mesh -> process group.
        """
        inputs = _inputs(staged, (one for _, one, _ in runners))
        held = [node.name for node in inputs if node.op == "parameter"]
        others = [node.name for node in inputs if node.op != "parameter"]
        parts: list[StagePart] = []
        for number, one, halves in runners:
            program = one.program
            read = [node for node in program.inputs if not is_channel(node.target)]
            own = [at for at, (result, _) in enumerate(program.results) if not is_channel(result.target)]
            played = played_in_stage(staged.whole, one.plan, read, [program.results[at] for at in own])
            parts.append(
                StagePart(
                    number, staged.stages[number], replace(one, played=played), halves,
                    Rows.of(one.plan, program, groups),
                    tuple(held.index(node.name) for node in read if node.op == "parameter"),
                    tuple(others.index(node.name) for node in read if node.op != "parameter"),
                    tuple(own),
                )
            )  # fmt: skip
        first = parts[0].runner
        pieces = tuple(piece for part in parts for piece in part.runner.pieces)
        return StageRunner(
            first.program, plan, first.mesh, first.coordinates, pieces, first.updates, first.watch, first.played,
            pipe=pipe, staged=staged, parts=tuple(parts),
        )  # fmt: skip

    # --- what it looks like from outside: the whole model ------------------------------------------------------------

    @cached_property
    def results(self) -> tuple[tuple[Result, Layout], ...]:
        """What the model gives back, whatever stage makes it."""
        found: list[tuple[Result, Layout]] = []
        for plan in self.staged.plans:
            for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
                if result.kind != "gradient" and not is_channel(result.target):
                    found.append((result, () if delivery is None else delivery.layout))
        return tuple(found)

    @property
    def differentiable(self) -> frozenset[str]:
        last = self.staged.plans[-1].graph
        return frozenset(node.target for node in last.nodes if node.op == "tangent")

    @cached_property
    def gradients(self) -> tuple[tuple[Result, Layout], ...]:
        """Of the parameters of this rank, each once, in one order, and of all arguments that have one."""
        found: dict[str, tuple[Result, Layout]] = {}
        for part in self.parts:
            for _, result, layout in part.gradients:
                found.setdefault(result.target, (result, layout))
        held = {node.target for node in self.parameters}  # some for outputs alone: other stages make all of the terms
        for plan in self.staged.plans:
            for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
                if result.kind == "gradient" and result.target in held and delivery is not None:
                    found.setdefault(result.target, (result, delivery.layout))
        return tuple((found | {one.result.target: (one.result, one.layout) for one in self.of_arguments}).values())

    @cached_property
    def of_arguments(self) -> tuple[OfArgument, ...]:
        """In the same order on all ranks."""
        whole, found = self.staged.whole, list[OfArgument]()
        of = {result.target: result for result in whole.graph.results if result.kind == "gradient"}
        for node in whole.graph.inputs_with_gradient:
            layout = whole.choices[node.name].gives[0]
            piece = local_type(input_type(whole.graph, node), layout, whole.mesh)
            made = [stage for stage, plan in enumerate(self.staged.plans) if node in plan.graph.inputs_with_gradient]
            places = tuple(dict.fromkeys(self.staged.schedule.rank_of[stage] for stage in made))
            found.append(OfArgument(of[node.target], places, layout, piece))
        return tuple(found)

    @cached_property
    def beside(self) -> tuple[str, ...]:
        own = {result.target for result, _ in self.gradients}
        every = [result for plan in self.staged.plans for result in plan.graph.results if result.kind == "gradient"]
        made = (result for result in every if result.ref is not None)  # a rank of their stage gives the others none
        names = dict.fromkeys(result.target for result in made if not is_channel(result.target))
        return tuple(name for name in names if name not in own)

    @cached_property
    def parameters(self) -> tuple[Node, ...]:
        return tuple(node for node in self._inputs if node.op == "parameter")

    @property
    def own_inputs(self) -> tuple[Node, ...]:
        return self._inputs

    @cached_property
    def _inputs(self) -> tuple[Node, ...]:
        return _inputs(self.staged, (part.runner for part in self.parts))

    @cached_property
    def lets_go(self) -> dict[Action, tuple[Action, ...]]:
        """Receive -> the sends that have been received by then."""
        return self.staged.schedule.lets_go()

    def seeds(self, seed: int, call: int) -> tuple[Tensor, ...]:
        """One tensor for each stage of this rank."""
        stages = self.staged.schedule.stages
        return tuple(seeds(seed, call * stages + part.number, part.runner.pieces) for part in self.parts)

    def as_read(self, pieces: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Cast, and then gathered where they are stored in more pieces than micro-batches read."""
        cast = super().as_read(pieces)
        told, rows = zip(cast, self.parameters, strict=True), self.parts[0].rows
        return tuple(rows.changed(piece, self.plan.gathers(node)) for piece, node in told)

    # --- a step ------------------------------------------------------------------------------------------------------

    def play(
        self, step: Step, pieces: Sequence[Tensor], trains: bool
    ) -> tuple[tuple[Tensor | None, ...], list[Tensor | None] | None]:
        played = _Played(self, step, pieces, trains)
        for action in self.staged.schedule.lists[self.pipe.place]:
            played.act(action)
        played.finish_sends()
        given = played.shared_results()
        if not trains or self.program.backward is None:
            return given, None
        return given, played.gradients()


class _Played:
    """One step of one rank: its stages, and what goes between them and other ranks."""

    def __init__(self, runner: StageRunner, step: Step, pieces: Sequence[Tensor], trains: bool) -> None:
        self.runner, self.pipe, self.staged, self.trains = runner, runner.pipe, runner.staged, trains
        self.pieces, self.rank_of = pieces, runner.staged.schedule.rank_of
        self.held = {part.number: Held(part, at, step, pieces, trains) for at, part in enumerate(runner.parts)}
        self.sends: dict[Action, list[tuple[Any, Tensor]]] = {}

    def act(self, action: Action) -> None:
        number, held = action.micro_batch, self.held[action.stage]
        match action.kind:
            case "F":
                held.forward(number)
                self._hand_over(held, action.stage + 1, "output", held.stage.sends, number)
            case "B":
                held.backward(number)
                self._hand_over(held, action.stage - 1, "gradient", held.stage.gives_back, number)
            case "I":
                held.input_gradients(number)
                self._hand_over(held, action.stage - 1, "gradient", held.stage.gives_back, number)
            case "W":
                held.weight_gradients(number)
            case "SA":
                self._send(held, action, action.stage + 1, "output", held.stage.sends)
            case "RA":
                self._receive(held, action.stage - 1, held.stage.receives, held.came, number, "input")
            case "SG":
                if self.trains:
                    self._send(held, action, action.stage - 1, "gradient", held.stage.gives_back)
            case "RG":
                if self.trains:
                    self._receive(held, action.stage + 1, held.stage.gets_back, held.back, number, "tangent")
        for send in self.runner.lets_go.get(action, ()):  # the other has it: this does not wait
            self._finish(send)

    # --- from stage to stage -----------------------------------------------------------------------------------------

    def _hand_over(self, held: Held, stage: int, kind: str, channels: Sequence[str], number: int) -> None:
        """To another stage of this rank, where the next one is: nothing travels."""
        if (other := self.held.get(stage)) is None or (kind == "gradient" and not self.trains):
            return
        into = other.came if kind == "output" else other.back
        for channel in channels:
            into[channel, number] = held.going.pop((kind, channel, number))

    def _send(self, held: Held, action: Action, stage: int, kind: str, channels: Sequence[str]) -> None:
        values = [held.going.pop((kind, channel, action.micro_batch)).contiguous() for channel in channels]
        self.sends[action] = [(self.pipe.send(self.rank_of[stage], value), value) for value in values]

    def _finish(self, send: Action) -> None:
        for work, _ in self.sends.pop(send, ()):
            work.wait()

    def _receive(
        self, held: Held, stage: int, channels: Sequence[str], into: dict[tuple[str, int], Tensor], number: int,
        op: str,
    ) -> None:  # fmt: skip
        for channel in channels:
            into[channel, number] = self.pipe.receive(self.rank_of[stage], *held.takes(channel, op))

    def finish_sends(self) -> None:
        for send in [*self.sends]:
            self._finish(send)

    # --- behind the list ---------------------------------------------------------------------------------------------

    def shared_results(self) -> tuple[Tensor | None, ...]:
        """Outputs and new buffers, which every rank has then."""
        mine = {stage: iter(as_terms(held.outputs, held.dtypes or [])) for stage, held in self.held.items()}
        found: list[Tensor | None] = []
        for stage, plan in enumerate(self.staged.plans):
            types = output_types(plan.graph)
            for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
                if result.kind == "gradient" or is_channel(result.target):
                    continue
                value = next(mine[stage]) if stage in mine else None
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
                found.append(self.pipe.from_place(self.rank_of[stage], value.contiguous()))
        return tuple(found)

    def gradients(self) -> list[Tensor | None]:
        """Of the rank's own parameters, in the order of the runner's; those of others are theirs. The terms of a
        parameter that several stages hold are added up, first those of one rank. Those of arguments go to all ranks.
        """
        total: dict[str, Tensor | None] = {result.target: None for result, _ in self.runner.gradients}
        dtypes: dict[str, Any] = {}
        for held in self.held.values():
            held.part.rows.sum(held.so_far, held.rows)
            held.rows.clear()
            terms = held.runner.terms
            for place, result, _ in held.part.gradients:
                value, name = held.so_far[place], result.target
                dtypes[name] = dtypes.get(name) or terms[place]
                if value is not None:
                    before = total[name]
                    total[name] = value if before is None else before + value
        plan, holders = self.runner.plan, self.staged.holders
        nodes = {node.target: node for node in self.runner.parameters}
        for name in sorted(total):
            if len(holders.get(name, ())) > 1:
                if (mine := total[name]) is None:  # all of its terms are made by other ranks
                    stored = local_type(plan.graph.stored_type(nodes[name]), plan.parameters[name], plan.mesh)
                    dtypes[name] = dtype = getattr(torch, stored.dtype)
                    device = self.runner.coordinates[0].device
                    mine = widened(torch.zeros(stored.shape, dtype=dtype, device=device))
                total[name] = self.pipe.sum_over(holders[name], mine)
        for one in self.runner.of_arguments:
            name, device = one.result.target, self.runner.coordinates[0].device
            if (mine := total[name]) is None:
                mine = torch.empty(one.piece.shape, dtype=getattr(torch, one.piece.dtype), device=device)
            elif len(one.places) > 1:
                mine = self.pipe.sum_over(one.places, mine)
            value = mine.to(dtypes.setdefault(name, mine.dtype)).contiguous()
            total[name] = self.pipe.from_place(one.places[0], value)
        return as_terms([*total.values()], [dtypes[name] for name in total])
