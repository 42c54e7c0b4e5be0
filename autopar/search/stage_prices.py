"""What one stage of a pipeline takes and holds, from the program of its own plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.layout import local_type
from autopar.lower import lower
from autopar.lower.halves import HELD_THROUGHOUT, first_half, held_between
from autopar.lower.memory import changes, peaks, resident_bytes
from autopar.lower.program import Instruction, Loop, Program
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.rewrite.stages import Stage
from autopar.simulate.events import events
from cost_models.simulator import COMPUTE, Timeline, play
from cost_models.steps import DEVICE


@dataclass(frozen=True)
class StagePrice:
    """Seconds of one micro-batch, of its backward in all and of the part that the stage before waits for, and of the
    updates; bytes of a device: always, per micro-batch in flight, and per one whose backward has run half. `sent`: over
    the cut behind the stage, one way.
    """

    forward: float
    backward: float
    inputs: float
    update: float
    fixed: float
    saved: float
    pending: float
    sent: float


def price_of(stage: Stage, plan: Plan, pricer: Pricer) -> StagePrice:
    """Of a stage with its plan. Its timeline is simulated as the plan runs by itself."""
    program, rounds = lower(plan, plan.prefetch, pricer), plan.graph.rounds.count
    timeline = play(events(program, plan.graph, pricer, told=False))
    spent = defaultdict[str, float](float)
    for phase, begin, end in timeline.phases:
        spent[phase] += end - begin
    resident = resident_bytes(program).get(DEVICE, 0)
    saved = sum(
        sign * buffer.nbytes
        for phase, buffer, sign in changes(program)
        if phase == "forward" and buffer.tier == DEVICE and buffer.kind not in HELD_THROUGHOUT
    )
    received = sum(
        local_type(node.outputs[0], plan.choices[node.name].gives[0], plan.mesh).nbytes
        for node in plan.graph.nodes
        if node.op == "input" and node.target in stage.receives and node.outputs[0] is not None
    )
    update = timeline.seconds - spent["forward"] - spent["backward"]
    fixed = peaks(program)[DEVICE] - saved - received
    half = first_half(program, plan.graph, stage.gives_back)
    return StagePrice(
        spent["forward"] / rounds,
        spent["backward"] / rounds,
        _seconds_of_first(program, timeline, half) / rounds,
        update,
        max(fixed, resident - received),
        saved + received,
        held_between(program, plan.graph, half, stage.gives_back, {*stage.receives}),
        _sent_bytes(stage, plan),
    )


def _seconds_of_first(program: Program, timeline: Timeline, half: int) -> float:
    """Until the device has computed the first so many instructions of backward."""
    own = {id(inner) for one in program.instructions.get("backward", ())[:half] for inner in _flat(one)}
    begins = min((begin for phase, begin, _ in timeline.phases if phase == "backward"), default=0.0)
    ends = (
        end
        for event, end in zip(timeline.events, timeline.ends, strict=True)
        if id(event.by) in own and event.stream == COMPUTE
    )
    return max(ends, default=begins) - begins


def _flat(one: Instruction) -> Iterator[Instruction]:
    yield one
    if isinstance(one, Loop):
        for inner in one.body:
            yield from _flat(inner)


def _sent_bytes(stage: Stage, plan: Plan) -> float:
    """That a device sends over the cut behind a stage, one way."""
    layout = {
        result.target: delivery.layout
        for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True)
        if result.kind == "output" and delivery is not None
    }
    refs = {result.target: result.ref for result in plan.graph.results if result.kind == "output"}
    found = 0
    for channel in stage.sends:
        ref = refs[channel]
        assert ref is not None
        found += local_type(plan.graph.type_of(ref), layout[channel], plan.mesh).nbytes
    return float(found)
