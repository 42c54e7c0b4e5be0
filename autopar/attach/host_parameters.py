"""resident: a plan of a traced graph, with parameters on the host, each of which it fetches as it lies there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.work import FETCH
from autopar.plan import Choice, Plan
from autopar.propose.strategies import moved
from autopar.rewrite.apply_choices import narrowed


def resident(plan: Plan, residence: Mapping[str, str]) -> Plan:
    """The same plan, with parameters where `residence` says; the plan itself where that is everywhere the device.

    Its predictions stay those of the plan.
    """
    here = {node.target for node in plan.graph.nodes if node.op == "parameter"}
    residence = {name: where for name, where in residence.items() if name in here}
    if not residence:
        return plan
    graph = narrowed(plan.graph, {}, [name for name, where in residence.items() if where == "host"])
    choices = dict(plan.choices)
    for node in graph.nodes:
        if node.op == FETCH and node.name not in choices:
            (ref,) = node.operands
            way = moved(node, choices[ref.name].gives[ref.index], plan.mesh)
            choices[node.name] = Choice(way.roles, way.takes, way.gives, "", (), 1, way.steps, ((),))
    return replace(plan, graph=graph, choices=choices, residence=residence)
