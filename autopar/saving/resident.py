"""resident: a plan of a traced graph, with parameters on the host, each of which it fetches as it lies there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.plan import Choice, Plan
from autopar.saving.narrow import narrowed
from autopar.strategy import NOTHING, operand_types, steps_of
from autopar.work import FETCH


def resident(plan: Plan, residence: Mapping[str, str]) -> Plan:
    """The same plan, with parameters where `residence` says; the plan itself where that is everywhere the device.

    Its predictions stay those of the plan.
    """
    here = {node.target for node in plan.graph.nodes if node.op == "parameter"}
    residence = {name: where for name, where in residence.items() if name in here}
    graph = narrowed(plan.graph, {}, [name for name, where in residence.items() if where == "host"])
    if not residence:
        return plan
    node_of, choices = graph.by_name, dict(plan.choices)
    for node in graph.nodes:
        if node.op == FETCH and node.name not in choices:
            (ref,) = node.operands
            layout = choices[ref.name].gives[ref.index]
            roles = (NOTHING,) * len(plan.mesh.names)
            types = operand_types(node, node_of)
            steps = steps_of(node, types, roles, (layout,), (layout,), "", (), plan.mesh, 0.0, "elementwise")
            choices[node.name] = Choice(roles, (layout,), (layout,), "", (), 1, steps, ((),))
    return replace(plan, graph=graph, choices=choices, residence=residence)
