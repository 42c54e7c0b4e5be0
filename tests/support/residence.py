"""Random plans with values that are run again, offloaded and fetched, and with parameters on the host."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autopar.assemble.problem import Assembled, assemble, output_name
from autopar.decide.decide import choose, refereed
from autopar.decide.picks import picked
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.work import FETCH, STORE
from autopar.plan import RESIDENCES, Plan
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, operand_types, propose, steps_of
from autopar.rewrite import narrowed, plain, widened
from cost_models.hardware import Hardware
from solver import Edge
from tests.support.check import worst_difference
from tests.support.families import Case
from tests.support.lockstep import run_all
from tests.support.machines import FAST
from tests.support.plans import random_picks


def random_modes(graph: Graph, rng: random.Random) -> dict[str, str]:
    """Forward node -> what becomes of it: half of what may be anything is saved."""
    modes: dict[str, str] = {}
    for again in widened(graph, offload=True).again.values():
        if again.modes:
            modes[again.origin] = rng.choice([*again.modes, *["save"] * (len(again.modes) - 2)])
    return modes


def random_residence(graph: Graph, rng: random.Random) -> dict[str, str]:
    names = [node.target for node in graph.nodes if node.op == "parameter"]
    drawn = {name: rng.choice(RESIDENCES) for name in names}
    return {name: where for name, where in drawn.items() if where != "device"}


def hosted(residence: Mapping[str, str]) -> list[str]:
    return [name for name, where in residence.items() if where == "host"]


def without_changes_on_the_host(graph: Graph, assembled: Assembled) -> Assembled:
    """What lies on the host is fetched as it lies there."""
    edges: list[Edge] = []
    for node in graph.nodes:
        if node.op == FETCH:
            src, dst = assembled.item_of[node.operands[0].name], assembled.item_of[node.name]
            given, taken = ([*assembled.options[item]] for item in (src, dst))
            cost = [[0.0 if one.gives[0] == other.takes[0] else np.inf for other in taken] for one in given]
            edges.append(Edge(src, dst, np.array(cost)))
    problem = assembled.problem
    return replace(assembled, problem=replace(problem, edges=(*problem.edges, *edges)))


class ResidenceSampler:
    """Draws plans of one traced graph on one mesh: first what is saved and where parameters live, then the layouts."""

    def __init__(self, graph: Graph, mesh: Mesh, hardware: Hardware = FAST, optimizer: str = "adamw") -> None:
        self.graph, self.mesh = graph, mesh
        self.pricer = Pricer.on(mesh, hardware, optimizer, rounds=graph.rounds)

    def draw(self, seed: int) -> Plan:
        rng = random.Random(seed)
        return self.plan(random_modes(self.graph, rng), random_residence(self.graph, rng), rng)

    def plan(self, modes: Mapping[str, str], residence: Mapping[str, str], rng: random.Random) -> Plan:
        graph = narrowed(self.graph, modes, hosted(residence))
        strategies, _ = propose(graph, self.mesh)
        assembled = without_changes_on_the_host(graph, assemble(graph, strategies, self.pricer, memory=None))
        choices, deliveries = choose(graph, picked(assembled, random_picks(assembled, rng)), self.pricer)
        return refereed(
            graph, choices, deliveries, self.pricer, objective=None, bound=0.0, memory=None, outputs="sharded",
            residence=residence,
        )  # fmt: skip

    def with_layouts_of(self, plan: Plan, modes: Mapping[str, str], residence: Mapping[str, str]) -> Plan:
        """Other modes and residences for a plan of the traced graph, at the same layouts of everything."""
        assert plan.graph is self.graph
        graph = narrowed(self.graph, modes, hosted(residence))
        node_of = graph.by_name

        def strategy(name: str) -> Strategy:
            choice = plan.choices[name]
            roles, body, axes = choice.roles, choice.body, choice.body_axes
            return Strategy(roles, choice.takes, choice.gives, body, axes, choice.body_size, choice.steps)

        outputs = {
            output_name(result.target): delivery.layout
            for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True)
            if result.kind == "output" and delivery is not None
        }
        found: dict[str, Strategy] = {}
        for node in graph.nodes:
            if node.op in (STORE, FETCH):
                (ref,) = node.operands
                layout, types = found[ref.name].gives[ref.index], operand_types(node, node_of)
                roles = ("",) * len(self.mesh.sizes)
                steps = steps_of(node, types, roles, (layout,), (layout,), "", (), self.mesh, 0.0, "elementwise")
                found[node.name] = Strategy(roles, (layout,), (layout,), "", (), 1, steps)
            else:
                found[node.name] = strategy(node.name if node.is_source else node.target or node.name)
        for name, layout in outputs.items():
            found[name] = Strategy((), (layout,), (layout,), "", (), 1, ())
        choices, deliveries = choose(graph, found.__getitem__, self.pricer)
        return refereed(
            graph, choices, deliveries, self.pricer, objective=None, bound=0.0, memory=None, outputs="sharded",
            residence=residence,
        )  # fmt: skip


def residence_difference(plan: Plan, case: Case) -> tuple[float, str]:
    """`difference`, of a plan whose graph was made from the case's."""
    traced = plain(plan.graph)
    wide = traced == case.wide_graph
    assert wide or traced == case.graph
    ran, _ = run_all(plan, case.values(plan.graph), case.seed)
    return worst_difference(ran, case.wide_reference if wide else case.reference)
