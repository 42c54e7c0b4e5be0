"""A step in pipeline stages: where the model is cut, which schedule runs, what it takes and holds.

One plan is found for the whole model on the mesh of one stage, in micro-batches, and cut: a node's strategy does not
hang on the stage that it is in. What does is memory: a stage holds its own parameters, and what is saved of as many
micro-batches as are in flight there. Where some stage does not fit, the whole plan is found again with less room, until
all of them do. Where that ends in far slower steps, or nowhere, a plan in which backward runs all layers again is cut.

Where it is cut is for `autopar.search.cutting`; under which schedules, with how many stages on each rank, for
`autopar.search.orders`.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from autopar.errors import Infeasible, NoAnswerInTime, NotCut
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.words import count_of
from autopar.plan.renamed import names_of, renamed
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.search.context import Progress, Question, ask
from autopar.search.cutting import Cutting
from autopar.search.less_memory import Clock, does_not_fit, running_all_again, saving_less, with_less_room
from autopar.search.orders import PIPE, orders_of, ranks_of, within_stage
from autopar.search.pipeline import Pipeline
from autopar.search.request import DEFAULT, Request
from autopar.search.search import answer
from cost_models.hardware import Hardware

FAR = 1.5  # times what a step takes where memory is no limit: more is worth another try, however late it is


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
    question: Question, mesh: Mesh, request: Request = DEFAULT, *, schedule: str = "auto",
    stages_per_rank: int | None = None, moved: bool = True, named: bool = False,
    progress: Progress = lambda text: None,
) -> Pipeline:  # fmt: skip
    """`find_pipeline`, of a question already asked: of a step in micro-batches, on the mesh of one stage.

    `moved`: ends of stages are moved where that is quicker. `named`: the axes are called by what they do. The time
    limit is one of all searches together that a memory limit needs, as far as something fits by then, in seconds in
    which they compute (`less_memory.Clock`).
    """
    limit, clock = request.memory, Clock(request.time_limit_s)
    orders = orders_of(schedule, ranks_of(mesh), question.graph.rounds.count, stages_per_rank)
    unlimited = replace(request, memory=None, simulation=False)

    def whole_of(asked: Request) -> Cutting:
        with clock.running():
            whole = answer(question, replace(asked, time_limit_s=clock.left_s), progress=progress)
        if not named:
            return Cutting.of(whole, mesh, question.pricer.hardware, orders, limit)
        whole = renamed(whole, names_of(whole))
        called = Mesh((PIPE, *whole.mesh.names[: len(mesh.names) - 1]), mesh.sizes)
        return Cutting.of(whole, called, question.pricer.hardware, orders, limit)

    def ended(cutting: Cutting, found: Pipeline) -> Pipeline:
        return cutting.best(orders, cutting.moved(found) if moved else found, moved=moved)

    cutting = whole_of(unlimited)
    free = replace(cutting, limit=None)
    quickest = free.moved(free.first()) if moved else free.first()
    found = free.best(orders, quickest, moved=moved)
    progress(_told(found))
    if limit is None or found.peak_bytes <= limit:
        return found

    seen: list[float] = [found.peak_bytes]  # per rank, of pipelines that may not fit

    def saving(asked: Request, start: Pipeline) -> list[Pipeline]:
        near = saving_less(start, limit, lambda held: whole_of(replace(asked, held=held)), clock, progress)
        made = [] if near is None else [ended(*near)]
        seen.extend(one.peak_bytes for one in made)
        return _fitting(limit, *made)

    fitting = _fitting(limit, ended(cutting, cutting.first()))  # as the cut and the schedule alone make room
    roomy = cutting.for_what_stays(quickest) if moved else quickest
    for start in [roomy] if roomy.ends == quickest.ends else [roomy, quickest]:
        fitting += saving(unlimited, start)
        if clock.is_late and any(one.step_seconds < FAR * found.step_seconds for one in fitting):
            break
    try:
        fitting = fitting or [
            ended(*with_less_room(quickest, limit, lambda room: whole_of(replace(unlimited, memory=room)), clock))
        ]
    except Infeasible as error:
        seen.append(error.enough or seen[0])
    by_hand = running_all_again(question, unlimited)
    if by_hand is not None and all(one.step_seconds > FAR * found.step_seconds for one in fitting):
        progress("little was saved by choosing: all layers are run again in backward, as people do by hand")
        with contextlib.suppress(NoAnswerInTime, NotCut, Infeasible):
            by_hand = replace(by_hand, tied=True)  # repeated layers have little to differ by then
            cutting = whole_of(by_hand)
            start = cutting.first()  # under the first order, as all that less is saved of
            fitting += _fitting(limit, ended(cutting, start)) or saving(by_hand, start)
    if not fitting:
        raise does_not_fit(quickest, limit, min(seen))
    return min(fitting, key=lambda one: one.step_seconds)


def _fitting(limit: float, *found: Pipeline) -> list[Pipeline]:
    """Those that fit."""
    return [one for one in found if one.peak_bytes <= limit]


def _told(found: Pipeline) -> str:
    told = f"{count_of(len(found.plans), 'stage')}: {1e3 * found.step_seconds:.3f} ms a step"
    return f"{told}, simulated, {found.schedule.name}"
