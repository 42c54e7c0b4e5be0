"""What one stage of a pipeline takes and holds, from the program of its own plan, and what the stages of a rank do
together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import input_type
from autopar.ir.layout import Layout, local_type
from autopar.lower import lower
from autopar.lower.halves import first_half, held_between
from autopar.lower.memory import changes, outputs_before
from autopar.lower.program import Instruction, Kind, Loop, Program, Run, Update
from autopar.pipeline import StageBytes
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.rewrite.stages import Stage
from autopar.search.stage_bytes import Crossing, Footprint
from autopar.simulate.events import events
from cost_models.simulator import COMPUTE, Timeline, play
from cost_models.steps import DEVICE


@dataclass(frozen=True)
class StagePrice:
    """Seconds of one micro-batch, of its backward in all and of the part that the stage before waits for, and of the
    updates; bytes of a device: always, per micro-batch in flight, and per one whose backward has run half, and how they
    grow. `sent`: over the cut behind the stage; `returned`: gradients over the one before it; `shared`: of what is
    sent, what is saved too; `arguments`: gradients of those. `tied`: of a parameter that others hold, too, (seconds
    of its update, bytes of it and of its states), which a rank with several of them has once.
    """

    forward: float
    backward: float
    inputs: float
    update: float
    fixed: float
    saved: float
    pending: float
    grows: Footprint
    sent: float
    returned: float
    shared: float
    outputs: float
    arguments: float
    tied: Mapping[str, tuple[float, float]]


def price_of(stage: Stage, plan: Plan, pricer: Pricer) -> StagePrice:
    """Of a stage with its plan. Its timeline is simulated as the plan runs by itself."""
    program, rounds = lower(plan, plan.prefetch, pricer), plan.graph.rounds.count
    timeline = play(events(program, plan.graph, pricer, told=False))
    spent = defaultdict[str, float](float)
    for phase, begin, end in timeline.phases:
        spent[phase] += end - begin
    update = timeline.seconds - spent["forward"] - spent["backward"]
    half = first_half(program, plan.graph, stage.gives_back)
    sent, returned = _sent_bytes(stage.sends, "output", plan), _sent_bytes(stage.gives_back, "gradient", plan)
    crossing = Crossing.of(program, plan.graph, stage)
    held = Footprint.of(program, half, sent + (returned if rounds == 1 else 0.0))
    return StagePrice(
        spent["forward"] / rounds,
        spent["backward"] / rounds,
        _seconds_of_first(program, timeline, half) / rounds,
        update,
        held.always - crossing.inputs,
        held.after_forward - crossing.only_sent + crossing.kept,
        held_between(program, plan.graph, half, stage.gives_back, {*stage.receives}),
        held,
        sent,
        returned,
        crossing.shared,
        outputs_before(program),
        _argument_bytes(plan),
        {name: _once(name, program, timeline) for name in stage.tied},
    )


ONCE = (Kind.PARAMETER, Kind.CAST, Kind.STATES)


def _once(name: str, program: Program, timeline: Timeline) -> tuple[float, float]:
    """Seconds of the updates of a parameter, and bytes of it, of its cast and of its states; not of its gradient."""
    owners = {f"parameter {name}", f"parameter {name} as it is read", f"optimizer states of {name}"}
    buffers = [*program.resident, *(buffer for _, buffer, sign in changes(program) if sign > 0)]
    held = sum(one.nbytes for one in buffers if one.kind in ONCE and one.owner in owners and one.tier == DEVICE)
    spent = sum(
        end - start
        for event, start, end in zip(timeline.events, timeline.starts, timeline.ends, strict=True)
        if isinstance(event.by, Run) and event.by.what == Update(name)
    )
    return spent, float(held)


def together(
    priced: Sequence[StagePrice], rank_of: Sequence[int], call: float, whole: bool = True
) -> tuple[StageBytes, float]:
    """(bytes of stages, seconds of the updates of the rank that takes the longest), each stage on that rank. `call`:
    bytes of what the step is given, which every rank has. `whole`: backward is not run in two.
    """
    fixed, spent = [one.fixed for one in priced], [0.0] * (max(rank_of) + 1)
    for rank in {*rank_of}:
        fixed[rank_of.index(rank)] += call
    known: set[tuple[int, str]] = set()
    for stage, (one, rank) in enumerate(zip(priced, rank_of, strict=True)):
        spent[rank] += one.update
        for name, (seconds, nbytes) in one.tied.items():
            if (rank, name) in known:
                spent[rank] -= seconds
                fixed[stage] -= nbytes
            known.add((rank, name))
    nbytes = StageBytes(
        tuple(fixed), tuple(one.saved for one in priced), tuple(one.pending for one in priced),
        tuple(one.sent for one in priced[:-1]), tuple(one.returned for one in priced[1:]),
        tuple(one.shared for one in priced[:-1]),
        tuple(one.grows.forward for one in priced), tuple(one.grows.backward(whole) for one in priced),
        tuple(one.grows.weight for one in priced), tuple(one.grows.update for one in priced),
        tuple(one.outputs for one in priced), tuple(one.arguments for one in priced),
    )  # fmt: skip
    return nbytes, max(spent)


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


def _sent_bytes(channels: Sequence[str], kind: str, plan: Plan) -> float:
    """That a device sends to another stage: results of a kind, for one micro-batch."""
    found = 0
    for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
        if result.kind == kind and result.target in channels:
            assert result.ref is not None and delivery is not None
            found += local_type(plan.graph.type_of(result.ref), delivery.layout, plan.mesh).nbytes
    return float(found)


def _argument_bytes(plan: Plan) -> float:
    """Of gradients of what a step is given, for all micro-batches."""
    layouts = (
        (input_type(plan.graph, node), plan.choices[node.name].gives[0]) for node in plan.graph.inputs_with_gradient
    )
    return float(sum(local_type(type, layout, plan.mesh).nbytes for type, layout in layouts))


def call_bytes(whole: Plan) -> float:
    """Of a device, of what a step is given: of a tensor that is read at once and in micro-batches, once."""
    rounds, found = whole.graph.rounds, dict[tuple[str, Layout], int]()
    for node in whole.graph.nodes:
        if node.op == "input" and node.outputs[0] is not None:
            layout = whole.choices[node.name].gives[0]
            nbytes = local_type(node.outputs[0], layout, whole.mesh).nbytes * rounds.held(node.name)
            found[node.target, layout] = max(found.get((node.target, layout), 0), nbytes)
    return float(sum(found.values()))
