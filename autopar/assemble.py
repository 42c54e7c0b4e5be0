"""assemble: the strategies and prices of a graph become a `solver.Problem`, which knows nothing of graphs.

items    one per class of nodes (options: its strategies) and one per output of the model (options: its layouts)
edges    producer -> consumer: the price of the layout change between them, for each use of the value;
         gradient -> parameter: the price of bringing the gradient into the parameter's layout
usages   bytes of each storage over the instants it lives, as `liveness` shares them out between its maker and
         its last readers; of each layout change's new tensor, and the copies on the way; gradients, optimizer states
         and what the optimizer makes while it steps with their parameter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.classes import classes_of
from autopar.graph import Graph, Node, Ref, TensorType
from autopar.layout import REPLICATE, Layout, Partial, local_type
from autopar.liveness import Liveness, Read, liveness
from autopar.price import Pricer
from autopar.strategy import NOTHING, Strategy, even_layouts, operand_types
from autopar.work import temporary_bytes
from solver import Edge, EdgeUsage, Problem, Usage

Array = NDArray[np.float64]
DEVICE = "hbm"


@dataclass(frozen=True)
class Assembled:
    """The problem, and what its items mean: `item_of[node or output name]`, `options[item]`."""

    problem: Problem
    item_of: Mapping[str, int]
    options: tuple[tuple[Strategy, ...], ...]


def output_name(index: str) -> str:
    return f"output[{index}]"


class _Assembly:
    def __init__(
        self, graph: Graph, strategies: Mapping[str, tuple[Strategy, ...]], pricer: Pricer, fixed: Mapping[str, Layout]
    ):
        self.graph, self.pricer, self.fixed = graph, pricer, fixed
        self.strategies = strategies
        self.node_of = graph.by_name
        self.live: Liveness = liveness(graph)
        self.item_of: dict[str, int] = {}
        self.options: list[tuple[Strategy, ...]] = []
        self.costs: list[Array] = []
        self.names: list[str] = []
        self.prices: dict[object, tuple[Array, Array, Array]] = {}
        self.edge_at: dict[tuple[int, int, object], int] = {}
        self.edges: list[tuple[int, int, Array, int]] = []
        self.usages: list[Usage] = []
        self.edge_usages: list[EdgeUsage] = []
        self.size_of: dict[object, Array] = {}

    def add_item(self, name: str, options: tuple[Strategy, ...], cost: Array) -> int:
        self.options.append(options)
        self.costs.append(cost)
        self.names.append(name)
        return len(self.options) - 1

    def gives(self, item: int, index: int) -> list[Layout]:
        return [strategy.gives[index] for strategy in self.options[item]]

    def between(
        self,
        type: TensorType,
        producer: int,
        index: int,
        takes_of: tuple[int, int],
        takes: list[Layout],
        by: Read | int,
    ) -> tuple[Array, Array, Array]:
        """Of the change from each option of the producer to each layout of the reader: seconds, bytes of the new
        tensor, and bytes of all that it makes, at most at a time.
        """
        key = (
            type,
            id(self.options[producer]),
            index,
            id(self.options[takes_of[0]]),
            takes_of[1],
            self.live.gone.get(by),
        )
        if key not in self.prices:
            gives = self.gives(producer, index)
            self.prices[key] = self.pricer.reshard(type, gives, takes), *self.made(type, gives, takes, by)
        return self.prices[key]

    def made(self, type: TensorType, gives: list[Layout], takes: list[Layout], by: Read | int) -> tuple[Array, Array]:
        beside, alone = self.pricer.reshard_rooms(type, gives, takes)
        if (gone := self.live.gone.get(by)) is not None:
            alone = alone - gone.of(self.pricer.nbytes(type, gives))[:, None]
        return self.pricer.reshard_bytes(type, gives, takes), np.maximum(beside, alone)

    def delivered(
        self, type: TensorType, producer: int, index: int, parameter: int, stored: list[Layout], by: int
    ) -> tuple[Array, Array, Array]:
        """`between`, of a gradient and its parameter."""
        key = (
            "delivered",
            type,
            id(self.options[producer]),
            index,
            id(self.options[parameter]),
            self.live.gone.get(by),
        )
        if key not in self.prices:
            gives = self.gives(producer, index)
            self.prices[key] = self.pricer.deliver(type, gives, stored), *self.made(type, gives, stored, by)
        return self.prices[key]

    def brought_once(
        self, told: tuple[Array, Array, Array], item: int, position: int, earlier: list[int]
    ) -> tuple[Array, Array, Array]:
        """Nothing more, where an option takes the value in one layout at `position` and at an earlier one (x * x)."""
        key = ("brought once", *map(id, told), id(self.options[item]), position, tuple(earlier))
        if key not in self.prices:
            again = [any(s.takes[position] == s.takes[place] for place in earlier) for s in self.options[item]]
            cost, nbytes, room = (np.where(again, 0.0, array) for array in told)
            self.prices[key] = cost, nbytes, room
        return self.prices[key]

    def without_reduction(
        self, cost: Array, producer: int, index: int, reader: tuple[int, int], takes: list[Layout]
    ) -> Array:
        """The same prices, but a partial sum must stay one: it is summed behind the reader, in another precision."""
        key = ("without reduction", id(cost), id(self.options[producer]), index, id(self.options[reader[0]]), reader[1])
        if key not in self.prices:
            lost = [
                [
                    any(isinstance(g, Partial) and not isinstance(t, Partial) for g, t in zip(give, take, strict=True))
                    for take in takes
                ]
                for give in self.gives(producer, index)
            ]
            self.prices[key] = np.where(np.array(lost), np.inf, cost), cost, cost
        return self.prices[key][0]

    def add_edge(self, src: int, dst: int, cost: Array) -> int:
        """One more use; uses of equal price between the same items are one edge, counted."""
        key = (src, dst, id(cost))
        if key not in self.edge_at:
            self.edge_at[key] = len(self.edges)
            self.edges.append((src, dst, cost, 0))
        number = self.edge_at[key]
        src, dst, cost, count = self.edges[number]
        self.edges[number] = (src, dst, cost, count + 1)
        return number

    def changed(self, edge: int, start: int, end: int, nbytes: Array, room: Array) -> None:
        """A layout change at instant `start`, whose new tensor is held until before `end`."""
        if room.any():
            self.edge_usages.append(EdgeUsage(edge, DEVICE, start, start + 1, room))
        if end > start + 1 and nbytes.any():
            self.edge_usages.append(EdgeUsage(edge, DEVICE, start + 1, end, nbytes))

    def held(self, item: int, start: int, end: int, nbytes: Array) -> None:
        if end > start and nbytes.any():
            self.usages.append(Usage(item, DEVICE, start, end, nbytes))

    def sizes(self, type: TensorType, item: int, what: object, layouts: Callable[[], list[Layout]]) -> Array:
        """Bytes of a tensor in the layout that each option has of it."""
        key = (type, id(self.options[item]), what)
        if key not in self.size_of:
            self.size_of[key] = self.pricer.nbytes(type, layouts())
        return self.size_of[key]


def assemble(
    graph: Graph,
    strategies: Mapping[str, tuple[Strategy, ...]],
    pricer: Pricer,
    *,
    memory: float | None,
    tied: bool = False,
    whole_outputs: bool = False,
    fixed: Mapping[str, Layout] | None = None,
) -> Assembled:
    """Build the problem. `memory`: bytes of one rank's device; `fixed`: layouts of parameters that are settled
    already.
    """
    work = _Assembly(graph, strategies, pricer, fixed or {})
    _add_nodes(work, classes_of(graph, tied=tied))
    _add_reads(work)
    _add_results(work, whole_outputs)
    _add_storages(work)
    edges = tuple(Edge(src, dst, cost * count) for src, dst, cost, count in work.edges)
    limits = {} if memory is None else {DEVICE: memory}
    problem = Problem(tuple(work.costs), edges, tuple(work.usages), tuple(work.edge_usages), limits, tuple(work.names))
    return Assembled(problem, work.item_of, tuple(work.options))


def _add_nodes(work: _Assembly, class_of: Mapping[str, str]) -> None:
    priced: dict[int, Array] = {}
    for node in work.graph.nodes:
        leader = class_of[node.name]
        options = work.strategies[node.name]
        if id(options) not in priced:
            priced[id(options)] = work.pricer.costs(options)
        cost = priced[id(options)]
        if node.op == "parameter":
            cost = cost + _update_costs(work, node)
        if leader == node.name:
            work.item_of[node.name] = work.add_item(node.name, options, cost.copy())
        else:
            item = work.item_of[node.name] = work.item_of[leader]
            work.costs[item] += cost
        if (layout := work.fixed.get(node.target)) is not None and node.op == "parameter":
            item = work.item_of[node.name]
            work.costs[item][[strategy.gives[0] != layout for strategy in options]] = np.inf


def _update_costs(work: _Assembly, node: Node) -> Array:
    """The optimizer's pass over the parameter, if it has a gradient."""
    (type,) = node.outputs
    assert type is not None
    if node.target not in work.live.update_at:
        return np.zeros(len(work.strategies[node.name]))
    layouts = [strategy.gives[0] for strategy in work.strategies[node.name]]
    return np.array(
        [
            work.pricer.seconds((work.pricer.update_step(work.pricer.local_bytes(type, layout), type.dtype),))
            for layout in layouts
        ]
    )


def _add_reads(work: _Assembly) -> None:
    for node in work.graph.nodes:
        item = work.item_of[node.name]
        types = operand_types(node, work.node_of)
        for position, (ref, type) in enumerate(zip(node.operands, types, strict=True)):
            read = node.name, position
            takes = [strategy.takes[position] for strategy in work.options[item]]
            producer = work.item_of[ref.name]
            cost, nbytes, room = work.between(type, producer, ref.index, (item, position), takes, read)
            if node.op == "autopar.to_reduce_dtype":
                cost = work.without_reduction(cost, producer, ref.index, (item, position), takes)
            if earlier := [place for place in range(position) if node.operands[place] == ref]:
                cost, nbytes, room = work.brought_once((cost, nbytes, room), item, position, earlier)
            edge = work.add_edge(producer, item, cost)
            work.changed(edge, work.live.read_at[read], work.live.new_until[read], nbytes, room)
            if (turn := work.live.turn_of.get(read)) is not None:
                sizes = work.sizes(type, item, position, lambda takes=takes: takes)
                work.held(item, turn.start, turn.end, turn.share.of(sizes))
        _add_temporaries(work, node)


def _add_temporaries(work: _Assembly, node: Node) -> None:
    """What the operator makes and drops while it runs."""
    item, at = work.item_of[node.name], work.live.at[node.name]
    types, mesh = operand_types(node, work.node_of), work.pricer.mesh
    if temporary_bytes(node, types):
        sizes = [
            temporary_bytes(node, [local_type(t, layout, mesh) for t, layout in zip(types, s.takes, strict=True)])
            for s in work.options[item]
        ]
        work.held(item, at, at + 1, np.array(sizes, dtype=np.float64))


def _add_results(work: _Assembly, whole_outputs: bool) -> None:
    mesh = work.pricer.mesh
    parameter_of = {node.target: node.name for node in work.graph.nodes if node.op == "parameter"}
    tangent_of = {node.target: node.name for node in work.graph.nodes if node.op == "tangent"}
    for place, result in enumerate(work.graph.results):
        if result.ref is None:
            continue
        type = _type(work, result.ref)
        producer = work.item_of[result.ref.name]
        at, until, turn = work.live.sent_at[place], work.live.sent_until[place], work.live.sent_turn.get(place)
        if result.kind == "gradient":
            parameter = work.item_of[parameter_of[result.target]]
            stored = [strategy.gives[0] for strategy in work.options[parameter]]
            cost, nbytes, room = work.delivered(type, producer, result.ref.index, parameter, stored, place)
            work.changed(work.add_edge(producer, parameter, cost), at, until, nbytes, room)
            if turn is not None:
                work.held(parameter, turn.start, turn.end, turn.share.of(work.pricer.nbytes(type, stored)))
            continue
        whole = result.kind == "buffer" or not type.shape or whole_outputs
        everywhere: Layout = (REPLICATE,) * len(mesh.sizes)
        layouts: list[Layout] = [everywhere] if whole else even_layouts(type, mesh)
        options = tuple(
            Strategy((NOTHING,) * len(mesh.sizes), (layout,), (layout,), "", (), 1, ()) for layout in layouts
        )
        name = output_name(result.target) if result.kind == "output" else f"buffer[{result.target}]"
        item = work.item_of[name] = work.add_item(name, options, np.zeros(len(options)))
        cost, nbytes, room = work.between(type, producer, result.ref.index, (item, 0), layouts, place)
        work.changed(work.add_edge(producer, item, cost), at, until, nbytes, room)
        if turn is not None:
            work.held(item, turn.start, turn.end, turn.share.of(work.pricer.nbytes(type, layouts)))
        if result.kind == "output" and result.target in tangent_of:
            tangent = work.item_of[tangent_of[result.target]]
            same = [[0.0 if give == layout else np.inf for layout in layouts] for give in work.gives(tangent, 0)]
            work.add_edge(tangent, item, np.array(same))


def _type(work: _Assembly, ref: Ref) -> TensorType:
    type = work.node_of[ref.name].outputs[ref.index]
    assert type is not None
    return type


def _add_storages(work: _Assembly) -> None:
    live, pricer = work.live, work.pricer
    for ref, (start, end) in live.made.items():
        item, index = work.item_of[ref.name], ref.index
        sizes = work.sizes(_type(work, ref), item, ref, lambda item=item, index=index: work.gives(item, index))
        work.held(item, start, end, sizes)
    for node in work.graph.nodes:
        if node.op != "parameter" or (at := live.update_at.get(node.target)) is None:
            continue
        item, ref = work.item_of[node.name], Ref(node.name)
        nbytes = work.sizes(_type(work, ref), item, ref, lambda item=item: work.gives(item, 0))
        work.held(
            item, 0, live.instants, np.array([pricer.state_bytes(int(size)) for size in nbytes], dtype=np.float64)
        )
        for start, end, times in temporaries(live, pricer, at):
            work.held(item, start, end, nbytes * times)


def temporaries(live: Liveness, pricer: Pricer, at: int) -> list[tuple[int, int, int]]:
    """(from instant, until before, times the parameter's bytes) of what the optimizer makes for the parameter that it
    updates at `at`.
    """
    made = pricer.temporaries
    if pricer.updates_together:
        return [(live.gathered_at + 1, live.instants, made.together)]
    return [(at, at + 1, made.own - made.left), (at, min(at + 2, live.instants), made.left)]
