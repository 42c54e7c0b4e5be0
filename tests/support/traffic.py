"""What a plan says it sends, part by part."""

from __future__ import annotations

from typing import Any

from autopar.plan import Plan, read_once
from cost_models.steps import Comm, received_bytes


def comms(plan: Plan, phase: str) -> list[Comm]:
    """The plan's collectives in the nodes of one phase and the results that leave it."""
    found: list[Any] = []
    for node in plan.graph.nodes:
        if node.phase == phase:
            choice = plan.choices[node.name]
            changes = [change for read in read_once(node, choice).values() for change in read]
            found += [step for change in changes for step in change.steps(plan.mesh.size(change.axis))]
            found += choice.steps
    for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
        if delivery is not None and (result.kind == "gradient") == (phase == "backward"):
            found += [s for change in delivery.changes for s in change.steps(plan.mesh.size(change.axis))]
    return [step for step in found if isinstance(step, Comm) and step.ranks > 1]


def received(found: list[Comm]) -> int:
    return sum(received_bytes(comm) for comm in found)
