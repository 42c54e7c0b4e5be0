"""Random legal plans: any strategy for any node, as long as a layout change leads from each producer to each reader."""

from __future__ import annotations

import random

import numpy as np

from autopar.assemble import Assembled, assemble
from autopar.decide import choose, picked, refereed
from autopar.graph import Graph
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.price import Pricer
from autopar.strategy import propose
from cost_models.hardware import Hardware


def random_picks(assembled: Assembled, rng: random.Random) -> list[int]:
    """A random finite assignment: items in order, each consistent with those already settled."""
    problem = assembled.problem
    into: dict[int, list[tuple[int, np.ndarray]]] = {}
    for edge in problem.edges:
        into.setdefault(max(edge.src, edge.dst), []).append(
            (min(edge.src, edge.dst), np.isfinite(edge.cost) if edge.src < edge.dst else np.isfinite(edge.cost).T)
        )
    picks: list[int] = []
    for item, cost in enumerate(problem.costs):
        allowed = np.isfinite(cost)
        for other, finite in into.get(item, []):
            if other != item:
                allowed = allowed & finite[picks[other]]
        picks.append(rng.choice(np.flatnonzero(allowed).tolist()))
    return picks


def plan_of(graph: Graph, assembled: Assembled, picks: list[int], pricer: Pricer) -> Plan:
    choices, deliveries = choose(graph, picked(assembled, picks), pricer)
    return refereed(
        graph, choices, deliveries, pricer, objective=None, bound=0.0, memory=None, outputs="sharded"
    )


class PlanSampler:
    """Draws plans of one graph on one mesh."""

    def __init__(self, graph: Graph, mesh: Mesh, hardware: str = "cpu-gloo") -> None:
        self.graph = graph
        self.pricer = Pricer.on(mesh, Hardware.load(hardware), "adamw")
        self.strategies, self.without_rule = propose(graph, mesh)
        self.assembled = assemble(graph, self.strategies, self.pricer, memory=None)

    def draw(self, seed: int) -> Plan:
        return plan_of(self.graph, self.assembled, random_picks(self.assembled, random.Random(seed)), self.pricer)
