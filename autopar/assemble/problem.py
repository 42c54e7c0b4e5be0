"""assemble: the strategies and prices of a graph become a `solver.Problem`, which knows nothing of graphs.

items    one per class of nodes (options: its strategies), one per output of the model (options: its layouts), and one
         per forward value that comes back in backward (options: how; `autopar.assemble.activations`)
edges    producer -> consumer: the price of the layout change between them, for each use of the value;
         gradient -> parameter: the price of bringing the gradient into the parameter's layout
usages   bytes of each storage over the instants it lives, as `liveness` shares them out between its maker and
         its last readers; of each layout change's new tensor, and the copies on the way; gradients, optimizer states
         and what the optimizer makes while it steps with their parameter

A parameter's options are its layouts on the device, then those on the host, and so on: see
`autopar.assemble.parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.assemble.activations import Modes, add_modes, add_rereads, add_saved, rereads
from autopar.assemble.builder import DEVICE, HOST, Array, Assembly, Sizes
from autopar.assemble.facts import GraphFacts
from autopar.assemble.liveness import Share
from autopar.assemble.parameters import (
    add_gradient,
    add_parameter,
    resident_options,
    settle_residences,
    temporaries,
    update_costs,
)
from autopar.ir.graph import HELD, Graph, Ref
from autopar.ir.layout import REPLICATE, Layout
from autopar.price.overlap_discounts import Shares, costs_of
from autopar.price.pricer import Pricer
from autopar.propose.repeated_blocks import classes_of
from autopar.propose.strategies import NOTHING, Strategy, even_layouts
from autopar.rewrite import Again
from autopar.rewrite.expose_choices import looked_at
from solver import Edge, Problem

__all__ = ["DEVICE", "HOST", "Assembled", "assemble", "output_name", "temporaries"]


@dataclass(frozen=True)
class Assembled:
    """The problem, and what its items mean: `item_of[node or output name]`, `options[item]`.

    `modes`: forward value -> the item that says how it comes back, and its options (mode, strategy if it runs again).
    `rereads`: of a value that may be dropped, those that read it when they are run again. `residences[item]`: where the
    parameter of each option resides.
    """

    problem: Problem
    item_of: Mapping[str, int]
    options: tuple[tuple[Strategy, ...], ...]
    modes: Modes
    rereads: Mapping[str, tuple[str, ...]]
    residences: Mapping[int, tuple[str, ...]]


def output_name(index: str) -> str:
    return f"output[{index}]"


def assemble(
    graph: Graph,
    strategies: Mapping[str, tuple[Strategy, ...]],
    pricer: Pricer,
    *,
    memory: float | None,
    tied: bool = False,
    whole_outputs: bool = False,
    fixed: Mapping[str, Layout] | None = None,
    again: Mapping[str, Again] | None = None,
    residences: Sequence[str] = ("device",),
    host_memory: float | None = None,
    residence_of: Mapping[str, Sequence[str]] | None = None,
    shares: Shares | None = None,
    facts: GraphFacts | None = None,
    sizes: Sizes | None = None,
) -> Assembled:
    """Build the problem. `memory`: bytes of one rank's device; `fixed`: layouts of parameters that are settled
    already. `again`: the nodes of a widened graph that are forward values (`autopar.rewrite`). `residences`: where
    parameters may reside; `host_memory`: bytes of the host's that a rank may take; `residence_of`: where each
    parameter may reside (default: anywhere). `shares`: of their prices, what transfers cost that run beside compute
    (`autopar.price.overlap_discounts`); items, options and memory are the same without, so picks mean the same.
    `facts`: of this graph and `again`, where they are known; `sizes`: what problems of the same strategies on the same
    mesh have in common.
    """
    facts, sizes = facts or GraphFacts(graph, again), sizes or Sizes()
    work = Assembly(graph, strategies, pricer, fixed or {}, again or {}, residences, shares or {}, facts, sizes)
    _add_nodes(work, facts.classes if tied else classes_of(graph, tied=False, without=work.again))
    settle_residences(work, residence_of or {})
    modes = add_modes(work)
    _add_reads(work)
    _add_results(work, whole_outputs)
    _add_storages(work)
    edges = tuple(Edge(src, dst, work.times(cost, count)) for src, dst, cost, count in work.edges)
    limits = {} if memory is None else {DEVICE: memory}
    if host_memory is not None:
        limits[HOST] = host_memory
    problem = Problem(tuple(work.costs), edges, tuple(work.usages), tuple(work.edge_usages), limits, tuple(work.names))
    where = {
        work.item_of[node.name]: tuple(r for r in work.residences for _ in work.strategies[node.name])
        for node in graph.nodes
        if node.op == "parameter"
    }
    return Assembled(problem, work.item_of, tuple(work.options), modes, rereads(work), where)


def _add_nodes(work: Assembly, class_of: Mapping[str, str]) -> None:
    priced: dict[int, Array] = {}
    for node in work.graph.nodes:
        if (again := work.again.get(node.name)) is not None:
            work.item_of[node.name] = work.item_of[again.origin]
            continue
        leader = class_of[node.name]
        options = work.strategies[node.name]
        if node.op == "parameter":
            options = resident_options(work, options)
        if id(options) not in priced:
            priced[id(options)] = costs_of(work.pricer, work.shares, options)
        cost = priced[id(options)]
        if node.op == "parameter":
            cost = cost + update_costs(work, node)
        if leader == node.name:
            work.item_of[node.name] = work.add_item(node.name, options, cost.copy())
        else:
            item = work.item_of[node.name] = work.item_of[leader]
            work.costs[item] += cost
        if (layout := work.fixed.get(node.target)) is not None and node.op == "parameter":
            item = work.item_of[node.name]
            work.costs[item][[strategy.lies != layout for strategy in options]] = np.inf


def _add_reads(work: Assembly) -> None:
    for node in work.graph.nodes:
        if node.name in work.mode_of:
            add_rereads(work, node)
            continue
        item, at = work.item_of[node.name], work.live.at[node.name]
        for position, ref in enumerate(node.operands):
            read = node.name, position
            cost, nbytes, room = work.read(node, position, item)
            edge = work.add_edge(work.item_of[ref.name], item, cost)
            work.changed(edge, at, work.live.new_until[read], nbytes, room)
            if (turn := work.live.turn_of.get(read)) is not None:
                work.taken_over(read, edge, item, turn, work.type(ref), work.taken_sizes(node, position, item), nbytes)
        work.held(item, at, at + 1, work.temporaries(node, item))


def _add_results(work: Assembly, whole_outputs: bool) -> None:
    mesh = work.pricer.mesh
    source_of = {node.target: node.name for node in work.graph.nodes if node.op in HELD}
    tangent_of = {node.target: node.name for node in work.graph.nodes if node.op == "tangent"}
    for place, result in enumerate(work.graph.results):
        if result.ref is None:
            continue
        type = work.type(result.ref)
        producer = work.item_of[result.ref.name]
        at, until, turn = work.live.at[result.ref.name], work.live.sent_until[place], work.live.sent_turn.get(place)
        if result.kind == "gradient":
            add_gradient(work, work.node_of[source_of[result.target]], place)
            continue
        whole = result.kind == "buffer" or not type.shape or whole_outputs
        everywhere: Layout = (REPLICATE,) * len(mesh.sizes)
        layouts: list[Layout] = [everywhere] if whole else even_layouts(type, mesh)
        options = tuple(
            Strategy((NOTHING,) * len(mesh.sizes), (layout,), (layout,), "", (), 1, ()) for layout in layouts
        )
        name = output_name(result.target) if result.kind == "output" else f"buffer[{result.target}]"
        item = work.item_of[name] = work.add_item(name, options, np.zeros(len(options)))
        cost, nbytes, room = work.between(result.ref, (item, 0), lambda layouts=layouts: layouts, place)
        edge = work.add_edge(producer, item, cost)
        work.changed(edge, at, until, nbytes, room)
        if turn is not None:
            work.taken_over(place, edge, item, turn, type, work.pricer.nbytes(type, layouts), nbytes)
        times = work.graph.rounds.times(place)
        if times > 1:  # of all rounds, beside that of this one
            work.held(item, 0, work.live.instants, times * work.pricer.nbytes(type, layouts))
        if place in work.graph.held_outputs:
            _hold_before(work, item, result.ref, max(1, times) * work.pricer.nbytes(type, layouts))
        if result.kind == "output" and result.target in tangent_of:
            tangent = work.item_of[tangent_of[result.target]]
            same = [[0.0 if give == layout else np.inf for layout in layouts] for give in work.gives(tangent, 0)]
            work.add_edge(tangent, item, np.array(same))


def _hold_before(work: Assembly, item: int, ref: Ref, nbytes: Array) -> None:
    """An output that a training loop still holds when it calls the next step, with the storage at which it looks."""
    seen = work.type(ref).nbytes
    below = sum(work.type(storage).nbytes for storage in looked_at(ref, work.node_of))
    until = work.live.forward_ends if work.graph.rounds.count == 1 else work.live.gathered_at + 1
    work.held(item, 0, until, Share(max(below, seen), seen).of(nbytes))


def _add_storages(work: Assembly) -> None:
    for ref, (start, end) in work.live.made.items():
        node, item, index = work.node_of[ref.name], work.item_of[ref.name], ref.index
        if node.op == "parameter":
            add_parameter(work, node)
        elif ref.name in work.mode_of:
            add_saved(work, node, index)
        else:
            given = "given", index
            sizes = work.sizes(work.type(ref), item, given, lambda item=item, index=index: work.gives(item, index))
            work.held(item, start, end, work.graph.rounds.held(ref.name) * sizes)
    whatever = np.full(len(work.costs[0]), float(work.pricer.mesh.coordinate_bytes))  # is picked, of any item
    work.held(0, 0, work.live.instants, whatever)
