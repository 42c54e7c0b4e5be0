"""A step in pipeline stages: where the model is cut, which schedule runs, what it takes and holds.

One plan is found for the whole model on the mesh of one stage, in micro-batches, and cut: a node's strategy does not
hang on the stage that it is in. What does is memory: a stage holds its own parameters, and what is saved of as many
micro-batches as are in flight there. Where some stage does not fit, the whole plan is found again with less room, until
all of them do.

Cuts are those of least step time under 1F1B by `solver.cut_pipeline`, among the places where little crosses; the
schedules are then played with the seconds of each stage's own timeline.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from autopar.errors import Infeasible
from autopar.ir.graph import Graph
from autopar.ir.layout import local_type
from autopar.ir.mesh import Mesh
from autopar.lower import lower
from autopar.lower.memory import changes, peaks, resident_bytes
from autopar.pipeline import Durations, Played, RankMemory, Schedule, StageBytes, make_schedule, memory, play
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.rewrite.micro_batches import in_rounds
from autopar.rewrite.stages import Stage
from autopar.search.context import Progress, ask
from autopar.search.cuts import Send, best_cut
from autopar.search.request import DEFAULT, Request
from autopar.search.search import answer
from autopar.simulate.timeline import timeline_of
from cost_models.hardware import Hardware
from cost_models.steps import DEVICE, Comm

PIPE = "pipe"  # the axis of stages
SCHEDULES = ("1f1b", "gpipe")  # in the order of preference
TRIES, CLOSE = 8, 0.02  # of the room for the whole plan, and how near to the right one it ends


@dataclass(frozen=True)
class Pipeline:
    """A step in stages.

    stages, plans   of each stage: its graph with what crosses its cuts, and how it runs on the mesh of one stage
    ends            behind how many forward operators of the whole plan's graph each stage but the last one ends
    schedule        what every rank of `pipe` does, in order; `played`: when, for one micro-batch of `durations`
    memory          bytes of a device of each rank of `pipe`, along its list
    step_seconds    of the schedule, with the updates behind it; simulated
    whole           the plan that was cut
    """

    mesh: Mesh
    stages: tuple[Stage, ...]
    plans: tuple[Plan, ...]
    ends: tuple[int, ...]
    schedule: Schedule
    durations: Durations
    played: Played
    memory: tuple[RankMemory, ...]
    step_seconds: float
    whole: Plan

    @property
    def peak_bytes(self) -> int:
        """Of the device that holds the most."""
        return round(max(rank.peak for rank in self.memory))

    @property
    def bubble(self) -> float:
        """The share of the schedule in which the mean rank computes nothing."""
        return sum(self.played.idle) / len(self.played.idle) / self.played.makespan


def find_pipeline(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    micro_batches: int,
    request: Request = DEFAULT,
    *,
    schedule: str = "auto",
    optimizer: str = "adamw",
    progress: Progress = lambda text: None,
) -> Pipeline:
    """The quickest pipeline of `graph`, a step of the whole batch, over the axis `pipe` of the mesh, which is its first
    one. Raises NotCut where the model cannot be cut into so many micro-batches or stages, Infeasible where no cut fits.
    """
    count, inner = stages_of(mesh), within_stage(mesh)
    question = ask(in_rounds(graph, micro_batches), inner, hardware, optimizer=optimizer, progress=progress)
    limit = request.memory

    def within(room: float | None) -> Pipeline:
        whole = answer(question, replace(request, memory=room, simulation=False), progress=progress)
        return _of_plan(whole, mesh, hardware, schedule, count, question.pricer)

    found = within(None)
    if limit is None or found.peak_bytes <= limit:
        return found
    best: Pipeline | None = None
    needed, most, least = found.peak_bytes, float(found.whole.peak_bytes[DEVICE]), 0.0  # room of the whole plan
    for _ in range(TRIES):
        room = (least + most) / 2
        if most - least < CLOSE * most:
            break
        try:
            found = within(room)
        except Infeasible:
            least = room
            continue
        needed = min(needed, found.peak_bytes)
        if found.peak_bytes > limit:
            most = min(room, float(found.whole.peak_bytes[DEVICE]))
            continue
        least = room
        if best is None or found.step_seconds < best.step_seconds:
            best = found
    if best is None:
        raise Infeasible(
            f"no pipeline of {count} stages over {micro_batches} micro-batches fits in {limit:.0f} bytes of each "
            f"device: the least that was found takes {needed:.0f}; give more micro-batches, stages or devices"
        )
    return best


def stages_of(mesh: Mesh) -> int:
    """Ranks along the axis of stages. Raises ValueError where that is not the first."""
    if mesh.names[0] != PIPE:
        raise ValueError(f"{mesh}: stages lie farthest apart, so that {PIPE} is the first axis of a mesh")
    return mesh.sizes[0]


def within_stage(mesh: Mesh) -> Mesh:
    """The mesh of one stage."""
    return Mesh(mesh.names[1:], mesh.sizes[1:]) if len(mesh.names) > 1 else Mesh(("data",), (1,))


# --- one plan, cut ---------------------------------------------------------------------------------------------------


def _of_plan(whole: Plan, mesh: Mesh, hardware: Hardware, schedule: str, count: int, pricer: Pricer) -> Pipeline:
    send = _sending(mesh, hardware)
    pricer = Pricer.on(pricer.mesh, hardware, whole.optimizer, whole.bucket_bytes, whole.graph.rounds.count)
    ends, cut = best_cut(whole, count, pricer, send)
    stages, plans = tuple(stage for stage, _ in cut), tuple(plan for _, plan in cut)
    timed = [_timed(plan, pricer) for plan in plans]
    crossing = [_crossing_bytes(stage, plan) for stage, plan in cut[:-1]]
    durations = Durations(
        tuple(one.forward for one in timed), tuple(one.backward / 2 for one in timed),
        tuple(one.backward / 2 for one in timed), tuple(map(send, crossing)),
    )  # fmt: skip
    nbytes = StageBytes(
        tuple(one.fixed for one in timed), tuple(one.saved for one in timed), (0.0,) * count, tuple(crossing)
    )
    updates = max(one.update for one in timed)
    found: list[Pipeline] = []
    for name in SCHEDULES if schedule == "auto" else (schedule,):
        lists = make_schedule(name, count, whole.graph.rounds.count)
        played = play(lists, durations)
        held = memory(lists, nbytes)
        found.append(
            Pipeline(mesh, stages, plans, tuple(ends), lists, durations, played, held, played.makespan + updates, whole)
        )
    return min(found, key=lambda one: (one.step_seconds * (1 - 1e-9), one.peak_bytes))


@dataclass(frozen=True)
class _Timed:
    """Seconds of one micro-batch, and of the updates; bytes of a device: always, and per micro-batch in flight."""

    forward: float
    backward: float
    update: float
    fixed: float
    saved: float


def _timed(plan: Plan, pricer: Pricer) -> _Timed:
    timeline, rounds = timeline_of(plan, pricer, plan.prefetch), plan.graph.rounds.count
    spent = defaultdict[str, float](float)
    for phase, begin, end in timeline.phases:
        spent[phase] += end - begin
    program = lower(plan, plan.prefetch, pricer)
    resident = resident_bytes(program).get(DEVICE, 0)
    saved = sum(
        sign * buffer.nbytes for phase, buffer, sign in changes(program) if phase == "forward" and buffer.tier == DEVICE
    )
    received = sum(
        local_type(node.outputs[0], plan.choices[node.name].gives[0], plan.mesh).nbytes
        for node in plan.graph.nodes
        if node.op == "input" and node.target.startswith("%") and node.outputs[0] is not None
    )
    update = timeline.seconds - spent["forward"] - spent["backward"]
    fixed = peaks(program)[DEVICE] - saved - received
    return _Timed(
        spent["forward"] / rounds, spent["backward"] / rounds, update, max(fixed, resident - received), saved + received
    )


def _crossing_bytes(stage: Stage, plan: Plan) -> float:
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


def _sending(mesh: Mesh, hardware: Hardware) -> Send:
    pricer = Pricer.on(mesh, hardware, "none")

    def send(nbytes: float) -> float:
        return pricer.seconds((Comm("shift", PIPE, mesh.sizes[0], round(nbytes)),))

    return send
