"""A step in pipeline stages: where the model is cut, which schedule runs, what it takes and holds.

One plan is found for the whole model on the mesh of one stage, in micro-batches, and cut: a node's strategy does not
hang on the stage that it is in. What does is memory: a stage holds its own parameters, and what is saved of as many
micro-batches as are in flight there. Where some stage does not fit, the whole plan is found again with less room, until
all of them do.

Where it is cut is for `autopar.search.cutting`; under which schedules, with how many stages on each rank, for
`autopar.search.orders`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from autopar.errors import Infeasible, NoAnswerInTime
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.words import count_of
from autopar.pipeline import in_flight
from autopar.plan.renamed import names_of, renamed
from autopar.plan.tell import human
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.rewrite.micro_batches import NotCut
from autopar.search.context import Progress, Question, ask
from autopar.search.cutting import Cutting
from autopar.search.orders import PIPE, orders_of, ranks_of, within_stage
from autopar.search.pipeline import Pipeline
from autopar.search.request import DEFAULT, Request
from autopar.search.search import answer
from cost_models.hardware import Hardware
from cost_models.steps import DEVICE

TRIES, CLOSE = 8, 0.02  # of the room for the whole plan, and how near to the right one it ends
Saved = tuple[tuple[frozenset[str], float], ...]
LEAST_S = 1.0  # seconds for each search, however late it is


def find_pipeline(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    micro_batches: int,
    request: Request = DEFAULT,
    *,
    schedule: str = "auto",
    stages_per_rank: int | None = None,
    optimizer: str = "adamw",
    progress: Progress = lambda text: None,
) -> Pipeline:
    """The quickest pipeline of `graph`, a step of the whole batch, over the axis `pipe` of the mesh, which is its
    first one. `schedule`: one of `autopar.search.orders.SCHEDULES`, or auto for the quickest of them.
    `stages_per_rank`: how many stages each rank holds; None: what is quickest.

    Raises ValueError where the schedule cannot have so many stages or micro-batches, NotCut where the model cannot be
    cut into so many, Infeasible where no cut fits.
    """
    ranks_of(mesh)
    inner = within_stage(mesh)
    question = ask(in_rounds_of_stages(graph, micro_batches), inner, hardware, optimizer=optimizer, progress=progress)
    return pipeline_of(question, mesh, request, schedule=schedule, stages_per_rank=stages_per_rank, progress=progress)


def pipeline_of(
    question: Question,
    mesh: Mesh,
    request: Request = DEFAULT,
    *,
    schedule: str = "auto",
    stages_per_rank: int | None = None,
    moved: bool = True,
    named: bool = False,
    progress: Progress = lambda text: None,
) -> Pipeline:
    """`find_pipeline`, of a question already asked: of a step in micro-batches, on the mesh of one stage.

    `moved`: ends of stages are moved where that is quicker. `named`: the axes are called by what they do. The time
    limit is one of all searches together that a memory limit needs, as far as something fits by then.
    """
    limit, began = request.memory, time.perf_counter()
    orders = orders_of(schedule, ranks_of(mesh), question.graph.rounds.count, stages_per_rank)

    def whole_within(room: float | None, saved: Saved = ()) -> Cutting:
        left = max(LEAST_S, request.time_limit_s - (time.perf_counter() - began))
        asked = replace(request, memory=room, saved=saved, simulation=False, time_limit_s=left)
        whole = answer(question, asked, progress=progress)
        if not named:
            return Cutting.of(whole, mesh, question.pricer.hardware, orders, limit)
        whole = renamed(whole, names_of(whole))
        called = Mesh((PIPE, *whole.mesh.names[: len(mesh.names) - 1]), mesh.sizes)
        return Cutting.of(whole, called, question.pricer.hardware, orders, limit)

    def ended(cutting: Cutting, found: Pipeline) -> Pipeline:
        return cutting.best(orders, cutting.moved(found) if moved else found, moved=moved)

    cutting = whole_within(None)
    free = replace(cutting, limit=None)
    quickest = free.moved(free.first()) if moved else free.first()
    found = free.best(orders, quickest, moved=moved)
    told = f"{1e3 * found.step_seconds:.3f} ms a step, simulated, {found.schedule.name}"
    progress(f"{count_of(len(found.plans), 'stage')}: {told}")
    if limit is None or found.peak_bytes <= limit:
        return found
    fitting = [ended(cutting, cutting.first())]  # as the cut and the schedule alone make room
    if (less := _saving_less(quickest, limit, lambda saved: whole_within(None, saved), progress)) is not None:
        fitting.append(ended(*less))
    if fitting := [one for one in fitting if one.peak_bytes <= limit]:
        return min(fitting, key=lambda one: one.step_seconds)
    return ended(
        *_with_less_room(found, limit, whole_within, lambda: time.perf_counter() - began > request.time_limit_s)
    )


def _with_less_room(
    found: Pipeline, limit: float, whole_within: Callable[[float], Cutting], is_late: Callable[[], bool]
) -> tuple[Cutting, Pipeline]:
    """The quickest that fits of plans of the whole model with less room, by bisection. Raises Infeasible."""
    best: tuple[Cutting, Pipeline] | None = None
    needed, most, least = found.peak_bytes, float(found.whole.peak_bytes[DEVICE]), 0.0  # room of the whole plan
    for _ in range(TRIES):
        room = (least + most) / 2
        if most - least < CLOSE * most or (best is not None and is_late()):
            break
        try:
            cutting = whole_within(room)
            found = cutting.first()
        except Infeasible as error:  # the least of the whole plan is told: no need to look for it by halves
            least = max(room, error.at_least or 0.0)
            continue
        except (NoAnswerInTime, NotCut):  # it was cut with more room
            least = room
            continue
        needed = min(needed, found.peak_bytes)
        if found.peak_bytes > limit:
            most = min(room, float(found.whole.peak_bytes[DEVICE]))
            continue
        least = room
        if best is None or found.step_seconds < best[1].step_seconds:
            best = cutting, found
    if best is None:
        raise Infeasible(
            f"no pipeline on {count_of(found.schedule.ranks, 'rank')} over {found.schedule.micro_batches} "
            f"micro-batches fits in {human(limit)} per rank: the least that was found takes {human(needed)}; give more "
            "micro-batches, stages or devices, or more memory",
            enough=needed,
        )
    return best


def _saving_less(
    found: Pipeline, limit: float, whole_saving: Callable[[Saved], Cutting], progress: Progress
) -> tuple[Cutting, Pipeline] | None:
    """The pipeline with the same cut whose stages save so much less of each micro-batch in flight that they fit, or the
    smallest that is found, which another cut may make fit; None where there is none. What is held once is more where
    values are run again, so the first answer may be too large yet.
    """
    names = [
        frozenset(node.name for node in stage.graph.nodes if node.phase == "forward" and not node.is_source)
        for stage in found.stages
    ]
    # masks and positions are of the first that has them
    names = [own.difference(*names[:at]) for at, own in enumerate(names)]
    rooms, least = [*found.nbytes.saved], None
    for _ in range(TRIES):
        rank_of, of_rank = found.schedule.rank_of, in_flight(found.schedule).most_saved
        flying = [of_rank[rank] for rank in rank_of]
        over = [found.memory[rank].peak - limit for rank in rank_of]
        rooms = [
            room - more / count if more > 0 or count == 0 else room
            for room, more, count in zip(rooms, over, flying, strict=True)
        ]
        if min(rooms) <= 0:
            break
        try:
            cutting = whole_saving(tuple(zip(names, rooms, strict=True)))
        except (Infeasible, NoAnswerInTime):
            break
        cut = cutting.cuts.at([*found.ends])
        if cut is None:
            break
        found = cutting.pipeline(*cut)
        progress(f"saving less: {found.step_seconds * 1e3:.3f} ms a step, {human(found.peak_bytes)}")
        if least is None or found.peak_bytes < least[1].peak_bytes:
            least = cutting, found
        if found.peak_bytes <= limit:
            break
    return least
