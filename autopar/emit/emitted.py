"""What `emit` writes: two functions, and what goes in and comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, fx

from autopar.emit.compiled import C10D, compiled
from autopar.emit.text import commented
from autopar.ir.graph import Node, Result, TensorType
from autopar.ir.layout import Layout, local_type
from autopar.ir.rounds import wide
from autopar.plan import Plan


@dataclass(frozen=True)
class Emitted:
    """What runs on every rank.

    `inputs`: the sources that the forward takes, in order (nodes of the graph); after them this rank's index on each of
    `mesh.groups`, and the seeds (`autopar.emit.seeded.seeds`) of the operators in `drawing`, each with the layout of
    what it draws. A program for one rank has no seeds: there operators draw from the default generator, as the model
    does.
    `results`: (result, layout) of what the forward returns, in order, before the saved values. `tangents`, `gradients`:
    likewise for the backward, which is None for inference. `added_up`: of each gradient the type of the sum of those of
    a step's micro-batches, which lie in a list that backward takes behind all else, and adds to instead of returning
    them; None: it is returned. `exposed`: places, among the saved values, of those that lie where an output or a buffer
    lies, so that whoever has that can change them. `alone`: places of results that lie where nothing else lies.
    `one_at_a_time`: as `emit` has it; compiled code keeps to it.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    inputs: tuple[Node, ...]
    results: tuple[tuple[Result, Layout], ...]
    tangents: tuple[Node, ...]
    gradients: tuple[tuple[Result, Layout], ...]
    drawing: tuple[tuple[Node, Layout], ...] = ()
    added_up: tuple[TensorType | None, ...] = ()
    exposed: tuple[int, ...] = ()
    alone: frozenset[int] = frozenset()
    one_at_a_time: bool = False

    def to_keep(self, saved: Sequence[Any]) -> list[Any]:
        """What backward is given of the saved values where it may run again: it takes them off its list, and sums over
        ranks some of them where they lie.
        """
        graph = getattr(self.backward, "graph", None)
        if graph is None or not graph.find_nodes(op="call_function", target=C10D.all_reduce_.default):
            return [*saved]
        return [one.clone() if isinstance(one, Tensor) else one for one in saved]

    def compiled(self) -> Emitted:
        """The same program with both parts compiled by inductor at their first call."""
        made = partial(compiled, one_at_a_time=self.one_at_a_time)
        return replace(
            self, forward=made(self.forward), backward=None if self.backward is None else made(self.backward)
        )

    @property
    def code(self) -> str:
        """Both parts as text, each line with the module it came from and the layout it gives."""
        parts = [commented(self.forward)]
        if self.backward is not None:
            parts.append(commented(self.backward).replace("def forward(", "def backward(", 1))
        return "\n".join(parts)


def added_up(plan: Plan) -> tuple[TensorType | None, ...]:
    """`Emitted.added_up`: a rank's piece of each."""
    if plan.graph.rounds.count == 1:
        return ()
    found: list[TensorType | None] = []
    for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
        if result.kind != "gradient":
            continue
        if result.ref is None or delivery is None or not plan.graph.adds_up(result):
            found.append(None)
            continue
        local = local_type(plan.graph.type_of(result.ref), delivery.layout, plan.mesh)
        found.append(replace(local, dtype=wide(local.dtype)))
    return tuple(found)
