"""Limits of what forward leaves to backward, as more resources of a problem.

A stage of a pipeline holds what it saves as often as micro-batches are in flight, and everything else once. So what is
short there is not how much is held at the worst instant of one micro-batch, but how much lies between its forward and
its backward: that gets a limit of its own, for the values of each stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.assemble.builder import DEVICE
from autopar.assemble.facts import GraphFacts
from autopar.ir.graph import Graph
from solver import EdgeUsage, Problem, Usage

IN_BACKWARD = " in backward"  # behind the name of a value, of the item that says how it comes back
Saved = Sequence[tuple[frozenset[str], float]]


def leaving_no_more(problem: Problem, graph: Graph, facts: GraphFacts, saved: Saved) -> Problem:
    """The same problem, in which values of these names that are held as backward begins take no more than so many
    bytes of the device together. What is held throughout the step is none of them.
    """
    live = facts.live
    backward = (live.at[node.name] for node in graph.nodes if node.phase == "backward" and not node.is_source)
    at = min(backward, default=live.instants)
    group = {name: number for number, (names, _) in enumerate(saved) for name in names}

    def resource(name: str) -> str | None:
        number = group.get(name.removesuffix(IN_BACKWARD))
        return None if number is None else f"left to backward {number}"

    def held(one: Usage | EdgeUsage) -> bool:
        always = one.start == 0 and one.end >= live.instants
        return one.resource == DEVICE and one.start <= at < one.end and not always

    def of_items() -> Iterator[Usage]:
        for one in filter(held, problem.usages):
            if (what := resource(problem.names[one.item])) is not None:
                yield Usage(one.item, what, at, at + 1, one.nbytes)

    def of_edges() -> Iterator[EdgeUsage]:
        for one in filter(held, problem.edge_usages):
            edge = problem.edges[one.edge]
            what = resource(problem.names[edge.dst]) or resource(problem.names[edge.src])
            if what is not None:
                yield EdgeUsage(one.edge, what, at, at + 1, one.nbytes)

    limits = {f"left to backward {number}": most for number, (_, most) in enumerate(saved)}
    return replace(
        problem,
        usages=(*problem.usages, *of_items()),
        edge_usages=(*problem.edge_usages, *of_edges()),
        limits={**problem.limits, **limits},
    )
