"""One policy on one mesh axis: which strategies of each node it would use (`autopar.search.policies`).

The values of the graph are told apart by what they are made of:

    a number    the dim that holds the batch
    weight      made of parameters alone: "matrix" (two dims or more) or "vector"
    free        made of constants alone, or of scalars: whoever reads it takes the piece it needs
    summed      everything else: gradients of weights, statistics of the batch, losses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from autopar.ir.graph import Graph, Node, batch_size
from autopar.ir.layout import Placement, Shard
from autopar.propose.strategies import Strategy
from autopar.rewrite import is_gathered_once

Strategies = Mapping[str, tuple[Strategy, ...]]
Kind = int | Literal["matrix", "vector", "free", "summed"]
Wish = Callable[[Strategy], bool]
WEIGHT: tuple[Kind, ...] = ("matrix", "vector")


def prefer(options: tuple[Strategy, ...], *wishes: Wish) -> tuple[Strategy, ...]:
    """The options that the first wish which any of them fulfils leaves; all of them where none does."""
    for wish in wishes:
        if kept := tuple(option for option in options if wish(option)):
            return kept
    return options


def everywhere(strategies: Strategies, wish: Wish) -> dict[str, tuple[Strategy, ...]]:
    """`prefer` for all nodes. Those that shared one tuple share one still, which is what pricing them once rests on."""
    known: dict[int, tuple[Strategy, ...]] = {}
    for options in strategies.values():
        if id(options) not in known:
            kept = prefer(options, wish)
            known[id(options)] = kept if len(kept) < len(options) else options
    return {name: known[id(options)] for name, options in strategies.items()}


def in_walking_order(graph: Graph) -> list[Node]:
    """Forward, then tangents, then the rest: a tangent takes after an output, wherever it stands."""
    turn = {"tangent": 1}
    return sorted(graph.nodes, key=lambda node: turn.get(node.op, 0 if node.phase == "forward" else 2))


class PolicyAxis:
    """One policy on one mesh axis: a walk through the graph keeps strategies and learns the kind of every value."""

    def __init__(self, policy: str, axis: int, graph: Graph, strategies: Strategies) -> None:
        self.policy, self.axis, self.graph, self.strategies = policy, axis, graph, strategies
        self.node_of = graph.by_name
        self.batch = batch_size(graph)
        self.kinds: dict[str, tuple[Kind, ...]] = {}
        self.known: dict[object, tuple[tuple[Strategy, ...], tuple[Kind, ...]]] = {}
        self.output_of = {result.target: result.ref for result in graph.results if result.kind == "output"}

    def run(self) -> dict[str, tuple[Strategy, ...]]:
        kept: dict[str, tuple[Strategy, ...]] = {}
        for node in in_walking_order(self.graph):
            options = self.strategies[node.name]
            if node.is_source:
                key: object = (id(options), node.op, self.kind_of_source(node))
            else:
                operands = tuple(
                    (self.kinds[ref.name][ref.index], self._numel(ref.name, ref.index)) for ref in node.operands
                )
                key = (id(options), node.outputs, operands)
            if key not in self.known:  # equal nodes share one tuple, which is what pricing them once rests on
                self.known[key] = self.source(node, options) if node.is_source else self.operator(node, options)
            kept[node.name], self.kinds[node.name] = self.known[key]
        return kept

    def takes(self, option: Strategy) -> tuple[Placement, ...]:
        return tuple(layout[self.axis] for layout in option.takes)

    def does(self, role: str) -> Wish:
        """That the axis does that in a node."""
        return lambda option: option.roles[self.axis] == role

    def is_split(self, option: Strategy) -> bool:
        """Whether a source enters the program in pieces."""
        return isinstance(option.gives[0][self.axis], Shard)

    # --- sources ---------------------------------------------------------------------------------------------------

    def kind_of_source(self, node: Node) -> Kind:
        (type,) = node.outputs
        assert type is not None
        match node.op:
            case "parameter":
                return "matrix" if len(type.shape) > 1 else "vector"
            case "input":
                is_split = Shard(0) in {option.gives[0][self.axis] for option in self.strategies[node.name]}
                return 0 if is_split and type.shape[0] == self.batch else "summed"
            case "tangent":  # laid out as the output that it belongs to
                ref = self.output_of[node.target]
                return self.kinds[ref.name][ref.index] if ref is not None else "summed"
            case _:
                return "free"

    def source(self, node: Node, options: tuple[Strategy, ...]) -> tuple[tuple[Strategy, ...], tuple[Kind, ...]]:
        kind = self.kind_of_source(node)
        match node.op:
            case "parameter" if self.policy == "fsdp" or (self.policy == "tensor-parallel" and kind == "matrix"):
                options = prefer(options, self.is_split)
            case "parameter" if self.policy == "data-parallel":
                options = prefer(options, lambda option: not self.is_split(option))
            case "input" if kind == 0 and self.policy != "tensor-parallel":
                options = prefer(options, lambda option: option.gives[0][self.axis] == Shard(0))
            case "input":
                options = prefer(options, lambda option: not self.is_split(option))
            case _:
                pass
        return options, (kind,)

    # --- operators -------------------------------------------------------------------------------------------------

    def operator(self, node: Node, options: tuple[Strategy, ...]) -> tuple[tuple[Strategy, ...], tuple[Kind, ...]]:
        kinds: tuple[Kind, ...] = tuple(self.kinds[ref.name][ref.index] for ref in node.operands)
        along = self.along_the_batch(options, kinds)
        results = self._results(node, kinds, along)
        if self.policy == "tensor-parallel":
            return self._on_tensor_axis(options, kinds, results), results
        if along:
            return along, results
        if is_gathered_once(node):
            return prefer(options, self._is_whole), results
        if all(kind == "free" for kind in results) or (self.policy == "fsdp" and all(kind in WEIGHT for kind in kinds)):
            return options, results
        return prefer(options, self._is_whole), results

    def along_the_batch(self, options: tuple[Strategy, ...], kinds: tuple[Kind, ...]) -> tuple[Strategy, ...]:
        """The options that split the batch of the most operands, and nothing else of those that have one."""

        def matched(option: Strategy) -> int:
            ends = zip(kinds, self.takes(option), strict=True)
            splits = [place.dim == kind for kind, place in ends if isinstance(kind, int) and isinstance(place, Shard)]
            return len(splits) if all(splits) else 0

        best = max(map(matched, options), default=0)
        if not best:
            return ()
        found = [option for option in options if matched(option) == best]
        return tuple(option for option in found if self.takes(option) == self.takes(found[0]))

    def _results(self, node: Node, kinds: tuple[Kind, ...], along: tuple[Strategy, ...]) -> tuple[Kind, ...]:
        if along:
            gives = [layout[self.axis] for layout in along[0].gives]
            return tuple(place.dim if isinstance(place, Shard) else "summed" for place in gives)
        same: Kind = "summed"
        if all(kind == "free" for kind in kinds):
            same = "free"
        elif all(kind in WEIGHT for kind in kinds):
            same = "matrix" if "matrix" in kinds else "vector"
        elif all(
            kind == "free" or self._numel(ref.name, ref.index) == 1
            for kind, ref in zip(kinds, node.operands, strict=True)
        ):
            return tuple("free" if type is not None and type.numel > 1 else "summed" for type in node.outputs)
        return (same,) * len(node.outputs)

    def _is_whole(self, option: Strategy) -> bool:
        return not any(isinstance(place, Shard) for place in self.takes(option))

    def _on_tensor_axis(
        self, options: tuple[Strategy, ...], kinds: tuple[Kind, ...], results: tuple[Kind, ...]
    ) -> tuple[Strategy, ...]:
        ends = *kinds, *results

        def leaves_the_batch(option: Strategy) -> bool:
            places = (*self.takes(option), *(layout[self.axis] for layout in option.gives))
            return not any(
                isinstance(place, Shard) and place.dim == kind for kind, place in zip(ends, places, strict=True)
            )

        def reads_pieces(option: Strategy) -> bool:
            pairs = zip(kinds, self.takes(option), strict=True)
            return all(isinstance(place, Shard) for kind, place in pairs if kind == "matrix")

        return prefer(options, lambda option: leaves_the_batch(option) and reads_pieces(option), leaves_the_batch)

    def _numel(self, name: str, index: int) -> int:
        type = self.node_of[name].outputs[index]
        return type.numel if type is not None else 0
