"""assemble: the strategies and prices of a graph become a `solver.Problem`, which knows nothing of graphs.

items    one per class of nodes (options: its strategies) and one per output of the model (options: its layouts)
edges    producer -> consumer: the price of the layout change between them, for each use of the value;
         gradient -> parameter: the price of bringing the gradient into the parameter's layout
usages   bytes of each storage over the instants it lives; bytes of each layout change's new tensor
         over the instants its reader holds it; gradients and optimizer states with their parameter
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.classes import classes_of
from autopar.graph import Graph, Node, Ref, TensorType
from autopar.layout import REPLICATE, Layout, Partial
from autopar.liveness import Liveness, holds_storage, liveness
from autopar.price import Pricer
from autopar.strategy import NOTHING, Strategy, even_layouts, operand_types
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
        self.prices: dict[object, tuple[Array, Array]] = {}
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
        self, type: TensorType, producer: int, index: int, takes_of: tuple[int, int], takes: list[Layout]
    ) -> tuple[Array, Array]:
        """Seconds and bytes of the change from each option of the producer to each layout of the reader."""
        key = (type, id(self.options[producer]), index, id(self.options[takes_of[0]]), takes_of[1])
        if key not in self.prices:
            gives = self.gives(producer, index)
            self.prices[key] = self.pricer.reshard(type, gives, takes), self.pricer.reshard_bytes(type, gives, takes)
        return self.prices[key]

    def delivered(
        self, type: TensorType, producer: int, index: int, parameter: int, stored: list[Layout]
    ) -> tuple[Array, Array]:
        """`between`, of a gradient and its parameter."""
        key = ("delivered", type, id(self.options[producer]), index, id(self.options[parameter]))
        if key not in self.prices:
            gives = self.gives(producer, index)
            self.prices[key] = self.pricer.deliver(type, gives, stored), self.pricer.reshard_bytes(type, gives, stored)
        return self.prices[key]

    def brought_once(
        self, cost: Array, nbytes: Array, item: int, position: int, earlier: list[int]
    ) -> tuple[Array, Array]:
        """Nothing more, where an option takes the value in one layout at `position` and at an earlier one (x * x)."""
        key = ("brought once", id(cost), id(nbytes), id(self.options[item]), position, tuple(earlier))
        if key not in self.prices:
            again = [any(s.takes[position] == s.takes[place] for place in earlier) for s in self.options[item]]
            self.prices[key] = np.where(again, 0.0, cost), np.where(again, 0.0, nbytes)
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
            self.prices[key] = np.where(np.array(lost), np.inf, cost), cost
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

    def held(self, edge: int, start: int, end: int, nbytes: Array) -> None:
        if nbytes.any():
            self.edge_usages.append(EdgeUsage(edge, DEVICE, start, end, nbytes))


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
    if node.target not in work.live.grad_at:
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
        at = work.live.at[node.name]
        until = at + 1 if holds_storage(node.op) else work.live.end_of[node.name]
        for position, (ref, type) in enumerate(zip(node.operands, types, strict=True)):
            takes = [strategy.takes[position] for strategy in work.options[item]]
            producer = work.item_of[ref.name]
            cost, nbytes = work.between(type, producer, ref.index, (item, position), takes)
            if node.op == "autopar.to_reduce_dtype":
                cost = work.without_reduction(cost, producer, ref.index, (item, position), takes)
            if earlier := [place for place in range(position) if node.operands[place] == ref]:
                cost, nbytes = work.brought_once(cost, nbytes, item, position, earlier)
            edge = work.add_edge(producer, item, cost)
            work.held(edge, at, until, nbytes)


def _add_results(work: _Assembly, whole_outputs: bool) -> None:
    mesh = work.pricer.mesh
    parameter_of = {node.target: node.name for node in work.graph.nodes if node.op == "parameter"}
    tangent_of = {node.target: node.name for node in work.graph.nodes if node.op == "tangent"}
    for result in work.graph.results:
        if result.ref is None:
            continue
        type = _type(work, result.ref)
        producer = work.item_of[result.ref.name]
        end = work.live.instants
        at = work.live.at[result.ref.name]
        if result.kind == "gradient":
            parameter = work.item_of[parameter_of[result.target]]
            stored = [strategy.gives[0] for strategy in work.options[parameter]]
            cost, nbytes = work.delivered(type, producer, result.ref.index, parameter, stored)
            edge = work.add_edge(producer, parameter, cost)
            work.held(edge, at, at + 1, nbytes)
            continue
        whole = result.kind == "buffer" or not type.shape or whole_outputs
        everywhere: Layout = (REPLICATE,) * len(mesh.sizes)
        layouts: list[Layout] = [everywhere] if whole else even_layouts(type, mesh)
        options = tuple(
            Strategy((NOTHING,) * len(mesh.sizes), (layout,), (layout,), "", (), 1, ()) for layout in layouts
        )
        name = output_name(result.target) if result.kind == "output" else f"buffer[{result.target}]"
        item = work.item_of[name] = work.add_item(name, options, np.zeros(len(options)))
        cost, nbytes = work.between(type, producer, result.ref.index, (item, 0), layouts)
        work.held(work.add_edge(producer, item, cost), at, end, nbytes)
        if result.kind == "output" and result.target in tangent_of:
            tangent = work.item_of[tangent_of[result.target]]
            same = [[0.0 if give == layout else np.inf for layout in layouts] for give in work.gives(tangent, 0)]
            work.add_edge(tangent, item, np.array(same))


def _type(work: _Assembly, ref: Ref) -> TensorType:
    type = work.node_of[ref.name].outputs[ref.index]
    assert type is not None
    return type


def _add_storages(work: _Assembly) -> None:
    for node in work.graph.nodes:
        if not holds_storage(node.op):
            continue
        item = work.item_of[node.name]
        options = work.options[item]
        key = (id(options), node.outputs)
        if key not in work.size_of:
            sizes = np.zeros(len(options))
            for index, type in enumerate(node.outputs):
                if type is not None:
                    sizes += work.pricer.nbytes(type, work.gives(item, index))
            work.size_of[key] = sizes
        nbytes = work.size_of[key]
        start, end = (
            (0 if node.is_source and node.op != "tangent" else work.live.at[node.name]),
            work.live.end_of[node.name],
        )
        if nbytes.any():
            work.usages.append(Usage(item, DEVICE, start, end, nbytes))
        if node.op == "parameter" and (grad_at := work.live.grad_at.get(node.target)) is not None:
            states = np.array([work.pricer.state_bytes(int(size)) for size in nbytes], dtype=np.float64)
            if states.any():
                work.usages.append(Usage(item, DEVICE, 0, work.live.instants, states))
            work.usages.append(Usage(item, DEVICE, grad_at + 1, work.live.instants, nbytes))
