"""A stage of a rank's pipeline, and what it has in hand while a step runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.attach.rows import Rows
from autopar.attach.run import Runner, Step
from autopar.emit.halves import Halves
from autopar.emit.moves import settle
from autopar.ir.graph import Result, is_channel
from autopar.ir.layout import Layout, local_shape
from autopar.rewrite.stages import Stage


@dataclass(frozen=True)
class StagePart:
    """One of the stages of this rank, with its own program.

    runner       of this stage alone
    halves       its backward in two, where the schedule has that
    rows         in what its micro-batches add up their gradients
    parameters   places of what it reads among the parameters of the rank; `others`: among what else a call brings
    own          places of what the model gives back among its program's results
    """

    number: int
    stage: Stage
    runner: Runner
    halves: Halves | None
    rows: Rows
    parameters: tuple[int, ...]
    others: tuple[int, ...]
    own: tuple[int, ...]

    @property
    def gradients(self) -> list[tuple[int, Result, Layout]]:
        """(place among those of the program, result, layout) of the gradients of parameters and arguments."""
        told = enumerate(self.runner.program.gradients)
        return [(at, result, layout) for at, (result, layout) in told if not is_channel(result.target)]


class Held:
    """What one stage of a rank has in hand while a step runs; micro-batches by their numbers."""

    def __init__(self, part: StagePart, at: int, step: Step, pieces: Sequence[Tensor], trains: bool) -> None:
        assert part.runner.played is not None
        self.part, self.at, self.runner, self.stage, self.trains = part, at, part.runner, part.stage, trains
        self.played, self.step = part.runner.played, step
        self.pieces = [pieces[place] for place in part.parameters]
        self.others = [step.others[place] for place in part.others]
        self.came: dict[tuple[str, int], Tensor] = {}  # (channel, micro-batch) -> an activation that is read here
        self.back: dict[tuple[str, int], Tensor] = {}  # and a gradient
        self.going: dict[tuple[str, str, int], Tensor] = {}  # ("output" or "gradient", channel, micro-batch)
        self.saved: dict[int, list[Any]] = {}
        self.left: dict[int, list[Any]] = {}  # of a backward whose first half has run, what the second needs
        self.outputs: list[Tensor | None] = [None] * len(part.own)
        self.dtypes: list[Any] | None = None
        self.so_far: list[Tensor | None] = []  # in the order of the program's gradients
        self.rows: list[Tensor] = []  # in which of these are summed over ranks
        if trains:
            self.so_far, self.rows = part.rows.begun(part.runner.coordinates[0].device)

    def forward(self, number: int) -> None:
        program = self.runner.program
        others, taken = iter(self.played.part(self.others, number)), list[Tensor]()
        for node in program.inputs[len(self.pieces) :]:
            taken.append(self.came[node.target, number] if is_channel(node.target) else next(others))
        made = program.forward(*self.pieces, *taken, *self._ranks_own(number))
        own, kept = made[: len(program.results)], list(made[len(program.results) :])
        del made, taken
        for (result, _), value in zip(program.results, own, strict=True):
            if is_channel(result.target):
                assert value is not None
                self.going["output", result.target, number] = value
        results = [own[place] for place in self.part.own]
        self.dtypes = [None if one is None else one.dtype for one in results]
        self.played.put(self.outputs, results, number)
        for channel in self.stage.receives:
            self.came.pop((channel, number))
        if self.trains:
            self.saved[number] = kept

    def backward(self, number: int) -> None:
        backward = self.runner.program.backward
        if not self.trains or backward is None:
            return
        made = backward(self.saved.pop(number), *self._tangents(number), *self._ranks_own(number), *self._sums())
        settle()
        self._give(range(len(made)), made, number)

    def input_gradients(self, number: int) -> None:
        if not self.trains or (halves := self.part.halves) is None:
            return
        made = halves.inputs(self.saved[number], *self._tangents(number), *self._ranks_own(number), *self._sums())
        settle()
        self.left[number] = list(made[len(halves.first) :])
        self._give(halves.first, made[: len(halves.first)], number)

    def weight_gradients(self, number: int) -> None:
        if not self.trains or (halves := self.part.halves) is None:
            return
        made = halves.weights(self.left.pop(number), self.saved.pop(number), *self._ranks_own(number), *self._sums())
        settle()
        places = [place for place in range(len(self.runner.program.gradients)) if place not in halves.first]
        self._give(places, made, number)

    def takes(self, channel: str, op: str) -> tuple[list[int], torch.dtype]:
        """Shape and dtype of what comes over a channel. `op`: "input", or "tangent"."""
        plan = self.runner.plan
        node = next(one for one in plan.graph.nodes if one.op == op and one.target == channel)
        (type,) = node.outputs
        assert type is not None
        shape = local_shape(type.shape, plan.choices[node.name].gives[0], plan.mesh)
        assert shape is not None
        return [*shape], getattr(torch, type.dtype)

    def _tangents(self, number: int) -> list[Tensor]:
        nodes = zip(self.runner.program.tangents, self.runner.ones(), strict=True)
        return [self.back.pop((node.target, number)) if is_channel(node.target) else one for node, one in nodes]

    def _ranks_own(self, number: int) -> tuple[Tensor, ...]:
        drawn = self.step.seeds[number][self.at : self.at + 1] if self.runner.pieces else ()
        return *self.runner.coordinates, *drawn

    def _sums(self) -> tuple[list[Tensor | None], ...]:
        return (self.so_far,) if self.runner.program.added_up else ()

    def _give(self, places: Iterable[int], made: Sequence[Tensor | None], number: int) -> None:
        """Gradients that were made and not added up: of what came over a cut, to be sent; of arguments; of parameters,
        where a step is one micro-batch.
        """
        for place, value in zip(places, made, strict=True):
            result, _ = self.runner.program.gradients[place]
            if is_channel(result.target):
                assert value is not None
                self.going["gradient", result.target, number] = value
            else:
                self.played.put_gradient(self.so_far, place, value, number)
