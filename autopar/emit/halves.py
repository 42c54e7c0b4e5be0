"""halved: the code of a backward in two functions, as `autopar.lower.halves` divides its program.

The first gives the gradients that another rank waits for; what the second still needs of its values leaves with them,
as one list. Both pop what the forward saved off the same list, so the second goes on where the first stopped.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.emit.compiled import compiled
from autopar.emit.emitted import Emitted


@dataclass(frozen=True)
class Halves:
    """inputs    (saved, tangents, coordinates and seeds) -> the gradients at the places `first`, then what it leaves
    weights   (that as a list, saved, coordinates and seeds) -> the other gradients, in their order

    Both take as many values off `saved`, and off what is left, as they read. `one_at_a_time`: as the program has it.
    """

    inputs: Callable[..., Sequence[Any]]
    weights: Callable[..., Sequence[Any]]
    first: tuple[int, ...]
    one_at_a_time: bool

    def compiled(self) -> Halves:
        """Both compiled by inductor at their first call."""
        assert isinstance(self.inputs, fx.GraphModule) and isinstance(self.weights, fx.GraphModule)
        return replace(
            self,
            inputs=compiled(self.inputs, one_at_a_time=self.one_at_a_time),
            weights=compiled(self.weights, one_at_a_time=self.one_at_a_time),
        )


def halved(program: Emitted, targets: Collection[str]) -> Halves:
    """The two halves of a program's backward. `targets`: of the gradients that come first."""
    assert program.backward is not None
    nodes = [*program.backward.graph.nodes]
    saved, *placeholders = (node for node in nodes if node.op == "placeholder")
    every = [saved, *placeholders[len(program.tangents) :]]  # with coordinates and seeds, what both halves take
    work = [node for node in nodes if node.op not in ("placeholder", "output")]
    made: Sequence[fx.Node | None] = nodes[-1].args[0]  # pyright: ignore[reportAssignmentType]
    first = tuple(place for place, (result, _) in enumerate(program.gradients) if result.target in targets)
    others = [node for place, node in enumerate(made) if place not in first]
    end = _end(work, [node for place in first if (node := made[place]) is not None])
    left = _read_later(work[end:], others, {*placeholders[: len(program.tangents)], *work[:end]})

    inputs, weights = fx.Graph(), fx.Graph()
    env = {node: _placeholder(inputs, node) for node in (saved, *placeholders)}
    for node in work[:end]:
        env[node] = inputs.node_copy(node, env.__getitem__)
    gives = [*(made[place] for place in first), *reversed(left)]
    inputs.output(tuple(None if node is None else env[node] for node in gives))

    rest = weights.placeholder("left")
    env, waiting = {node: _placeholder(weights, node) for node in every}, [*left]
    for node in work[end:]:  # each is taken right before its first use, so that none outlives its last
        while waiting and waiting[0] in node.all_input_nodes:
            env[waiting[0]] = weights.call_method("pop", (rest,))
            waiting.pop(0)
        env[node] = weights.node_copy(node, env.__getitem__)
    for node in waiting:
        env[node] = weights.call_method("pop", (rest,))
    weights.output(tuple(None if node is None else env[node] for node in others))
    return Halves(_module(inputs, "InputGradients"), _module(weights, "WeightGradients"), first, program.one_at_a_time)


def _module(graph: fx.Graph, name: str) -> fx.GraphModule:
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph, class_name=name)


def _end(work: Sequence[fx.Node], wanted: Collection[fx.Node]) -> int:
    """How many of the nodes, from the first on, have to run for those that are wanted."""
    needed, end = {*wanted}, 0
    for place in range(len(work) - 1, -1, -1):
        if work[place] in needed:
            needed |= {*work[place].all_input_nodes}
            end = max(end, place + 1)
    while end < len(work) and work[end].target is operator.getitem:  # all results of what ran, each by itself
        end += 1
    return end


def _read_later(work: Sequence[fx.Node], results: Sequence[fx.Node | None], known: set[fx.Node]) -> list[fx.Node]:
    """Those that are known and read by the nodes, or are results, in the order of their first use."""
    found: dict[fx.Node, None] = {}
    for node in work:
        found |= dict.fromkeys(one for one in node.all_input_nodes if one in known)
    return [*(found | dict.fromkeys(one for one in results if one in known))]  # pyright: ignore


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.placeholder(node.name)
    made.target = made.name
    return made
