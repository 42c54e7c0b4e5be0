"""Steps one behind the other: what it gives that the host updates its parameters beside the next forward.

A step that is simulated alone (`autopar.simulate.timeline`) ends when the host has updated the last parameter. With
`autopar.optim.Streamed(..., overlap=True)` the next step begins before: its forward waits for each parameter where it
fetches it, its backward for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.work import FETCH
from autopar.lower.program import OPTIMIZER, Copy, Launch, Update
from autopar.plan.plan import Plan
from autopar.price.pricer import Pricer
from autopar.simulate.timeline import events_of
from cost_models.simulator import Event, play
from cost_models.steps import HOST

STEPS = 3  # the first finds nothing to wait for; the others are alike, as each backward waits for all


def read_order(plan: Plan) -> tuple[str, ...]:
    """The parameters on the host, in the order in which the forward fetches them; then those that it does not."""
    parameter_of = {node.name: node.target for node in plan.graph.nodes if node.op == "parameter"}
    fetched = [parameter_of.get(ref.name, "") for node in plan.graph.nodes if node.op == FETCH for ref in node.operands]
    hosted = [name for name, where in plan.residence.items() if where == "host"]
    return tuple(dict.fromkeys([*filter(None, fetched), *hosted]))


def steady_s(plan: Plan, pricer: Pricer) -> float:
    """Seconds from one step's end to the next one's, with copies overlapped as `plan.prefetch` has them, and with
    the host's updates beside the next forward.

    Raises ValueError where nothing overlaps with compute.
    """
    if not pricer.hardware.overlaps:
        raise ValueError(
            f"profile {pricer.hardware.name} says that nothing overlaps with compute (overlaps = false), so neither "
            "does the host's update; plan.predicted_seconds is the step. Give the profile of a GPU"
        )
    once = _in_read_order(events_of(plan, pricer, plan.prefetch or 0), read_order(plan))
    timeline = play(_repeated(plan, once))
    return timeline.ends[-1] - timeline.ends[-1 - len(once)]


def _in_read_order(events: Sequence[Event], order: Sequence[str]) -> list[Event]:
    """The same events, the host's in the order in which it works where its thread overlaps the forward."""
    places = [place for place, event in enumerate(events) if event.stream == HOST]
    rank = {name: number for number, name in enumerate(order)}
    ordered = sorted((events[place] for place in places), key=lambda event: rank[_updated(event)])
    found = [*events]
    for place, event in zip(places, ordered, strict=True):
        found[place] = event
    return found


def _repeated(plan: Plan, once: Sequence[Event]) -> list[Event]:
    """Several steps of these events, whose ends do not wait for the host."""
    operand_of = {node.name: node.operands[0].name for node in plan.graph.nodes if node.op == FETCH}
    target_of = {node.name: node.target for node in plan.graph.nodes if node.op == "parameter"}
    updates = {_updated(event): place for place, event in enumerate(once) if event.stream == HOST}
    backward = next((place for place, event in enumerate(once) if event.phase == "backward"), len(once) - 1)
    found: list[Event] = []
    for step in range(STEPS):
        start = step * len(once)
        for place, event in enumerate(once):
            after = {start + other for other in event.after}
            if event.phase == OPTIMIZER:
                after -= {start + update for update in updates.values()}
            if step:
                before = start - len(once)
                match event.by:
                    case Launch(of=Copy(node)) if (name := target_of.get(operand_of.get(node, ""))) in updates:
                        after.add(before + updates[name])
                    case _:
                        pass
                if place == 0:
                    after.add(before + len(once) - 1)
                if place == backward:
                    after |= {before + update for update in updates.values()}
            found.append(replace(event, after=tuple(sorted(after)), holds=()))
    return found


def _updated(event: Event) -> str:
    """The parameter that the host updates."""
    assert isinstance(event.by, Launch) and isinstance(event.by.of, Update), event
    return event.by.of.parameter
