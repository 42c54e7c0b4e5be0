"""Plans that a test wants: random legal ones, and the best one among those where some choices are forced."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from autopar.assemble.problem import Assembled, assemble
from autopar.decide.decide import choose, decide, refereed
from autopar.decide.picks import picked
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, propose
from autopar.search.policies import by_hand
from cost_models.hardware import Hardware
from solver import Solution, solve
from tests.support.machines import FAST

Wish = Callable[[Strategy], bool]


def random_picks(assembled: Assembled, rng: random.Random) -> list[int]:
    """A random finite assignment: items in turn, each consistent with those already settled. How forward values come
    back is settled last, and readers before what they read, which then may not be dropped.
    """
    problem = assembled.problem
    modes = {back.item for back in assembled.modes.values()}
    order = [item for item in range(len(problem.costs)) if item not in modes]
    order += sorted((item for item in modes if item is not None), reverse=True)
    apart = [item for item in assembled.residences if any(one.stored for one in assembled.options[item])]
    turn = {item: place for place, item in enumerate(order)}
    into: dict[int, list[tuple[int, np.ndarray]]] = {}
    for edge in problem.edges:
        finite = np.isfinite(edge.cost)
        if turn[edge.src] < turn[edge.dst]:
            into.setdefault(edge.dst, []).append((edge.src, finite))
        else:
            into.setdefault(edge.src, []).append((edge.dst, finite.T))
    picks = [0] * len(order)
    for item in order:
        allowed = np.isfinite(problem.costs[item])
        for other, finite in into.get(item, []):
            if other != item:
                allowed = allowed & finite[picks[other]]
        if item in apart:
            allowed = allowed & [not one.stored for one in assembled.options[item]]
        picks[item] = rng.choice(np.flatnonzero(allowed).tolist())
    for item in apart:
        picks[item] = _stored_anyhow(assembled, picks, item, rng)
    return picks


def _stored_anyhow(assembled: Assembled, picks: list[int], item: int, rng: random.Random) -> int:
    """An option of a parameter in which it is read as it is, and stored in as many pieces or in more."""
    options, problem = assembled.options[item], assembled.problem
    allowed = np.isfinite(problem.costs[item]) & [one.gives == options[picks[item]].gives for one in options]
    for edge in problem.edges:
        if edge.dst == item:
            allowed = allowed & np.isfinite(edge.cost[picks[edge.src]])
        elif edge.src == item:
            allowed = allowed & np.isfinite(edge.cost[:, picks[edge.dst]])
    return rng.choice(np.flatnonzero(allowed).tolist())


def plan_of(graph: Graph, assembled: Assembled, picks: list[int], pricer: Pricer) -> Plan:
    choices, deliveries = choose(graph, picked(assembled, picks), pricer)
    return refereed(graph, choices, deliveries, pricer, objective=None, bound=0.0, memory=None, outputs="sharded")


class PlanSampler:
    """Draws plans of one graph on one mesh, and solves for the best with wishes granted."""

    def __init__(
        self, graph: Graph, mesh: Mesh, hardware: Hardware = FAST, optimizer: str = "adamw", *, loops: bool = True
    ) -> None:
        """`loops`: patterns are drawn, too."""
        self.graph = graph
        self.pricer = Pricer.on(mesh, hardware, optimizer, rounds=graph.rounds)
        strategies, self.without_rule = propose(graph, mesh)
        self.strategies = strategies if loops else by_hand(strategies)
        self.assembled = assemble(graph, self.strategies, self.pricer, memory=None)

    def draw(self, seed: int) -> Plan:
        return plan_of(self.graph, self.assembled, random_picks(self.assembled, random.Random(seed)), self.pricer)

    def solve(self, wishes: Mapping[str, Wish] | None = None) -> Solution:
        """The cheapest picks in which every item (node or output) named by `wishes` takes an option that pleases."""
        costs = list(self.assembled.problem.costs)
        for name, wish in (wishes or {}).items():
            item = self.assembled.item_of[name]
            pleases = np.array([wish(option) for option in self.assembled.options[item]])
            assert pleases.any(), f"no option of {name} is as the test wants it"
            costs[item] = np.where(pleases, costs[item], np.inf)
        return solve(replace(self.assembled.problem, costs=tuple(costs)))

    def best(self, wishes: Mapping[str, Wish] | None = None) -> Plan:
        """The plan of `solve`, refereed."""
        solution = self.solve(wishes)
        assert solution.picks is not None, "the wishes contradict each other"
        return decide(
            self.graph, self.assembled, solution.picks, self.pricer,
            objective=solution.cost, bound=solution.bound, memory=None, outputs="sharded", notes=(), search={},
        )  # fmt: skip

    def looping(self, pattern: str) -> Plan:
        """The best plan in which every operator that has this pattern runs it; there is one."""
        having = [name for name, ways in self.strategies.items() if any(one.body == pattern for one in ways)]
        assert having, f"no operator has {pattern}"
        return self.best(dict.fromkeys(having, lambda one: one.body == pattern))


def gives(*layouts: Layout) -> Wish:
    """The strategy's first results are laid out so."""
    return lambda strategy: strategy.gives[: len(layouts)] == layouts


def takes(*layouts: Layout) -> Wish:
    return lambda strategy: strategy.takes[: len(layouts)] == layouts


def roles(*wanted: str) -> Wish:
    return lambda strategy: strategy.roles == wanted
