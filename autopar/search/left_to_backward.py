"""Limits of what ranks of a pipeline hold as backward begins, as more resources of a problem.

A rank holds its parameters once, and what forward leaves to backward as often as micro-batches are in flight there. So
what is short is not how much is held at the worst instant of one micro-batch of the whole model: the nodes of each rank
get a limit of their own, in which what lies between forward and backward counts so many times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.assemble.builder import DEVICE
from autopar.assemble.facts import GraphFacts
from autopar.ir.graph import Graph
from autopar.search.request import Held
from solver import EdgeUsage, Problem, Usage

Array = NDArray[np.float64]
IN_BACKWARD = " in backward"  # behind the name of a value, of the item that says how it comes back


def together(limits: Sequence[Held]) -> tuple[Held, ...]:
    """One for all, for a problem in which an item stands for nodes of several of them."""
    whole = Held(
        frozenset[str]().union(*(one.values for one in limits)),
        frozenset[str]().union(*(one.parameters for one in limits)),
        sum(one.times for one in limits) / len(limits),
        sum(one.most for one in limits),
    )
    return (whole,)


def holding_no_more(problem: Problem, graph: Graph, facts: GraphFacts, limits: Sequence[Held]) -> Problem:
    """The same problem, in which the device holds no more of the nodes of each limit, as backward begins."""
    live = facts.live
    backward = (live.at[node.name] for node in graph.nodes if node.phase == "backward" and not node.is_source)
    at = min(backward, default=live.instants)
    group = {name: number for number, one in enumerate(limits) for name in one.values}
    owners = defaultdict[str, list[int]](list)  # a parameter may be on several ranks
    for number, one in enumerate(limits):
        for name in one.parameters:
            owners[name].append(number)
    known: dict[tuple[int, float], Array] = {}  # shared by those that share their bytes: the problem may hold millions

    def held(one: Usage | EdgeUsage) -> bool:
        return one.resource == DEVICE and one.start <= at < one.end

    def lasts(one: Usage | EdgeUsage) -> bool:
        return one.start == 0 and one.end >= live.instants

    def often(one: Usage | EdgeUsage, number: int) -> Array:
        """What is held throughout the step, as outputs of all micro-batches are, is there once."""
        nbytes, times = one.nbytes, 1.0 if lasts(one) else limits[number].times
        if (id(nbytes), times) not in known:
            known[id(nbytes), times] = times * nbytes
        return known[id(nbytes), times]

    def of_items() -> Iterator[Usage]:
        for one in filter(held, problem.usages):
            name = problem.names[one.item]
            for number in owners.get(name, ()):
                yield Usage(one.item, _called(number), at, at + 1, one.nbytes)
            number = group.get(name.removesuffix(IN_BACKWARD))
            if number is not None:
                yield Usage(one.item, _called(number), at, at + 1, often(one, number))

    def of_edges() -> Iterator[EdgeUsage]:
        for one in filter(held, problem.edge_usages):
            edge = problem.edges[one.edge]
            ends = (problem.names[end].removesuffix(IN_BACKWARD) for end in (edge.dst, edge.src))
            number = next((group[name] for name in ends if name in group), None)
            if number is not None:
                yield EdgeUsage(one.edge, _called(number), at, at + 1, often(one, number))

    return replace(
        problem,
        usages=(*problem.usages, *of_items()),
        edge_usages=(*problem.edge_usages, *of_edges()),
        limits={**problem.limits, **{_called(number): one.most for number, one in enumerate(limits)}},
    )


def _called(number: int) -> str:
    return f"left to backward {number}"
