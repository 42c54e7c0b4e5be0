"""A step in micro-batches, as it runs: which part of each input a round reads, and how its outputs are put together.

Whatever the plan splits over ranks, a rank cuts what it holds, and nothing is sent for that: the rows of the batch lie
in as many blocks as any input or output is split into, and each round takes its share of every block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.errors import PlanMismatch
from autopar.ir.graph import Node, Result
from autopar.ir.layout import REPLICATE, Layout, Shard
from autopar.ir.mesh import Mesh
from autopar.ir.rounds import LAST, SUM, wide
from autopar.plan import Plan
from autopar.rewrite.one_loss import WITHOUT_PIPE, WITHOUT_ROUNDS, why_not_played


@dataclass(frozen=True)
class Cut:
    """A dim of which each round has its share, in each of `blocks` equal blocks that a rank holds."""

    dim: int
    blocks: int


@dataclass(frozen=True)
class Played:
    """`inputs`: how a round reads each input of the program that is no parameter; None: whole. `outputs`: how results
    that are no gradients are put together: cut as they are, added up, or the last one's; `gradients`: those of inputs,
    in the order of all gradients of the program.
    """

    count: int
    inputs: tuple[Cut | None, ...]
    outputs: tuple[Cut | str, ...]
    gradients: tuple[Cut | str, ...]

    def part(self, others: Sequence[Tensor], number: int) -> list[Tensor]:
        """What the round of that number reads."""
        return [
            value
            if cut is None
            else _blocks(value, cut, self.count).select(cut.dim + 1, number).flatten(cut.dim, cut.dim + 1)
            for value, cut in zip(others, self.inputs, strict=True)
        ]

    def put(self, so_far: list[Tensor | None], given: Sequence[Tensor | None], number: int) -> None:
        """Put what a round gives to what the rounds before gave."""
        for place, (value, how) in enumerate(zip(given, self.outputs, strict=True)):
            self._put(so_far, place, value, how, number)

    def put_gradient(self, so_far: list[Tensor | None], place: int, value: Tensor | None, number: int) -> None:
        """The same of a gradient that backward has not added up itself."""
        self._put(so_far, place, value, self.gradients[place], number)

    def _put(self, so_far: list[Tensor | None], place: int, value: Tensor | None, how: Cut | str, number: int) -> None:
        if value is None:
            return
        before = so_far[place]
        if isinstance(how, Cut):
            if before is None:
                shape = list(value.shape)
                shape[how.dim] *= self.count
                before = so_far[place] = value.new_empty(shape)
            part = _blocks(before, how, self.count).select(how.dim + 1, number)
            part.copy_(value.unflatten(how.dim, (how.blocks, -1)))
        elif how == SUM:
            so_far[place] = widened(value) if before is None else before.add_(value)
        else:
            so_far[place] = value


def played(plan: Plan, inputs: Sequence[Node], results: Sequence[tuple[Result, Layout]]) -> Played | None:
    """How the program of a plan is played, whose `inputs` and `results` these are; None: once. Raises PlanMismatch
    where backward cannot run behind the forward of each round.
    """
    rounds = plan.graph.rounds
    if rounds.count == 1:
        return None
    _check_playable(plan)
    others = [node for node in inputs if node.op != "parameter"]
    joins = [join for one, join in zip(plan.graph.results, rounds.joined, strict=True) if one.kind != "gradient"]
    return _played(plan, others, [layout for _, layout in results], joins, _blocks_of(plan))


def _played(
    plan: Plan, others: Sequence[Node], layouts: Sequence[Layout], joins: Sequence[str | int], blocks: int
) -> Played:
    rounds, mesh = plan.graph.rounds, plan.mesh
    parts_in = [_parts(plan.choices[n.name].gives[0], rounds.cut.get(n.name), mesh) for n in others]
    whole: Layout = (REPLICATE,) * len(mesh.sizes)
    told = zip(plan.graph.results, plan.deliveries, rounds.joined or (LAST,) * len(plan.deliveries), strict=True)
    gradients = [(whole if to is None else to.layout, join) for one, to, join in told if one.kind == "gradient"]
    return Played(
        rounds.count,
        tuple(
            Cut(rounds.cut[node.name], blocks // parts) if node.name in rounds.cut else None
            for node, parts in zip(others, parts_in, strict=True)
        ),
        _joins(plan, layouts, joins, blocks),
        _joins(plan, [layout for layout, _ in gradients], [join for _, join in gradients], blocks),
    )


def _joins(plan: Plan, layouts: Sequence[Layout], joins: Sequence[str | int], blocks: int) -> tuple[Cut | str, ...]:
    """How results with these layouts are put together."""
    return tuple(
        Cut(join, blocks // _parts(layout, join, plan.mesh)) if isinstance(join, int) else join
        for layout, join in zip(layouts, joins, strict=True)
    )


def _blocks_of(whole: Plan) -> int:
    """Into how many blocks the rows of a batch fall: the same for all that is cut or put together, in all stages, so
    that a round is of the same rows everywhere.
    """
    rounds, graph, mesh = whole.graph.rounds, whole.graph, whole.mesh
    parts = [_parts(whole.choices[name].gives[0], dim, mesh) for name, dim in rounds.cut.items()]
    for result, delivery, join in zip(graph.results, whole.deliveries, rounds.joined, strict=False):
        if delivery is not None and result.kind != "gradient" and isinstance(join, int):
            parts.append(_parts(delivery.layout, join, mesh))
    return math.lcm(*parts)


def played_in_stage(
    whole: Plan, plan: Plan, inputs: Sequence[Node], results: Sequence[tuple[Result, Layout]]
) -> Played:
    """The same of one stage's plan of a pipeline, whose `whole` model's is given: without what crosses cuts, in one
    micro-batch, too.
    """
    if any(node.op == "tangent" for node in whole.graph.nodes):
        _check_playable(whole, WITHOUT_PIPE)
    rounds = plan.graph.rounds
    others = [node for node in inputs if node.op != "parameter"]
    joined = dict(zip(((r.kind, r.target) for r in plan.graph.results), rounds.joined, strict=False))
    joins = [joined.get((result.kind, result.target), LAST) for result, _ in results]
    return _played(plan, others, [layout for _, layout in results], joins, _blocks_of(whole))


def _check_playable(plan: Plan, instead: str = WITHOUT_ROUNDS) -> None:
    if any(type is not None and type.dtype == "float16" for node in plan.graph.nodes for type in node.outputs):
        raise PlanMismatch(
            "float16 needs its loss scaled before backward, and in micro-batches backward runs inside the call, before "
            f"a GradScaler can: compute in bfloat16 (precision='bf16'), or {instead}"
        )
    if (why := why_not_played(plan.graph, plan.graph.rounds.count, instead)) is not None:
        raise PlanMismatch(why)


def widened(value: Tensor) -> Tensor:
    """A tensor of its own, to which others are added."""
    name = str(value.dtype).removeprefix("torch.")
    return value.to(getattr(torch, wide(name)), copy=True)


def _parts(layout: Layout, dim: int | None, mesh: Mesh) -> int:
    """Into how many parts the dim is split over ranks."""
    if dim is None:
        return 1
    split = (size for place, size in zip(layout, mesh.sizes, strict=True) if place == Shard(dim))
    return math.prod(split)


def _blocks(value: Tensor, cut: Cut, count: int) -> Tensor:
    return value.unflatten(cut.dim, (cut.blocks, count, -1))
