"""Plans to simulate, and one of many nodes: a plan repeated, as if the model stood several times side by side."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from autopar.decide.decide import refereed
from autopar.ir.graph import Graph, Node, Ref, map_refs
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from cost_models.hardware import Hardware
from cost_models.simulator import Event
from tests.support.check import mesh_of
from tests.support.families import FAMILIES, family
from tests.support.plans import PlanSampler

H100 = Hardware.load("h100-sxm")
SMALL, LARGE = ("mlp", "block", "cnn"), tuple(sorted(set(FAMILIES) - {"mlp", "block", "cnn"}))
CASES = [(name, sizes, seed) for name in SMALL for sizes in ((2,), (2, 2)) for seed in range(8)]
CASES += [(name, (2, 2), 1) for name in LARGE]


@cache
def sampler(name: str, sizes: tuple[int, ...]) -> PlanSampler:
    return PlanSampler(family(name).graph, mesh_of(*sizes), H100)


@cache
def drawn(name: str, sizes: tuple[int, ...], seed: int) -> tuple[Plan, Pricer]:
    return sampler(name, sizes).draw(seed), sampler(name, sizes).pricer


@cache
def best(name: str, sizes: tuple[int, ...]) -> tuple[Plan, Pricer]:
    return sampler(name, sizes).best(), sampler(name, sizes).pricer


def called(event: Event) -> tuple[str, str]:
    """Name and axis of a collective."""
    about = dict(event.about)
    return str(about["collective"]), str(about["axis"])


def repeated(plan: Plan, pricer: Pricer, times: int) -> Plan:
    """`times` copies of the plan, all forwards before all backwards."""
    names = [f"copy {number} " for number in range(times)]
    forward = [_copy(node, name) for name in names for node in plan.graph.nodes if node.phase == "forward"]
    backward = [_copy(node, name) for name in names for node in plan.graph.nodes if node.phase == "backward"]
    results = tuple(
        replace(result, target=name + result.target, ref=result.ref and _moved(result.ref, name))
        for name in names
        for result in plan.graph.results
    )
    choices = {name + node.name: plan.choices[node.name] for name in names for node in plan.graph.nodes}
    graph = Graph((*forward, *backward), results)
    return refereed(
        graph, choices, plan.deliveries * times, pricer, objective=None, bound=0.0, memory=None, outputs="sharded"
    )


def _moved(ref: Ref, name: str) -> Ref:
    return Ref(name + ref.name, ref.index)


def _copy(node: Node, name: str) -> Node:
    args, kwargs = map_refs((node.args, node.kwargs), lambda ref: _moved(ref, name))
    return replace(node, name=name + node.name, target=name + node.target, args=args, kwargs=kwargs)
