"""What a program of a pipeline runs: the plans of all stages, found by rank 0 and known to every rank."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from autopar.attach.agree import agreed, found_by_rank_zero, text_from
from autopar.attach.host_parameters import resident
from autopar.attach.pipe import Pipe
from autopar.decide.stages import in_stages
from autopar.emit import Emitted
from autopar.emit.halves import Halves, halved
from autopar.errors import NotCut
from autopar.ir.graph import Graph, batch_size
from autopar.ir.layout import Layout
from autopar.ir.outside import Rules
from autopar.pipeline import Action, Schedule, make_schedule, placed
from autopar.pipeline.generate import recipe_of
from autopar.pipeline.messages import projected
from autopar.plan import Plan
from autopar.plan.fit import OF_RANK_0, check, is_of, lies_as
from autopar.plan.store import dumps
from autopar.price.calls import Profile
from autopar.price.pricer import Pricer
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.rewrite.one_loss import why_not_played
from autopar.rewrite.stages import Stage, cut_in_stages, forward_order, parameters_read
from autopar.search import Question, Request, answer, ask
from autopar.search.cuts import cut_by_owner
from autopar.search.cutting import cut_again
from autopar.search.kept import keep_plan, kept_pipeline
from autopar.search.less_memory import does_not_fit, limits_of
from autopar.search.micro_batches import count_near
from autopar.search.orders import can_be_ordered
from autopar.search.pipeline import Pipeline
from autopar.search.pipelines import pipeline_of
from autopar.search.request import Held
from cost_models.hardware import Hardware

TRIES, SLACK = 5, 0.05  # of limits for a later step, and how much more each takes away than was too much
TIMES = (1, 2, 4, 8)  # of the number of stages: micro-batches that are tried where nobody says


@dataclass(frozen=True)
class Staged:
    """The stages of one program, each with its plan, and what every rank of the pipe does, in order."""

    stages: tuple[Stage, ...]
    plans: tuple[Plan, ...]
    schedule: Schedule
    whole: Plan
    ends: tuple[int, ...]
    pipeline: Pipeline | None = None  # of a step of training that was searched for
    more: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])  # owners of what came since

    @staticmethod
    def of(found: Pipeline) -> Staged:
        return Staged(found.stages, found.plans, found.schedule, found.whole, found.ends, found)

    def stages_at(self, place: int) -> list[int]:
        """Those that the ranks at a place along `pipe` have, in their order."""
        return [stage for stage, rank in enumerate(self.schedule.rank_of) if rank == place]

    def plan_at(self, place: int) -> Plan:
        """That of the whole model, with the residence of what this place holds."""
        held = {name for stage in self.stages_at(place) for name in self.plans[stage].parameters}
        return replace(self.whole, residence={name: at for name, at in self.whole.residence.items() if name in held})

    def residing(self, residence: Mapping[str, str]) -> Staged:
        """The same, with parameters where they are already."""
        return replace(self, plans=tuple(resident(one, residence) for one in self.plans))

    def halves(self, program: Emitted, stage: int) -> Halves | None:
        """The backward of a stage in two, where the schedule runs it so."""
        if program.backward is None or not self.schedule.splits_backward:
            return None
        return halved(program, self.stages[stage].gives_back)

    @property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> the stages that hold it."""
        found: dict[str, tuple[int, ...]] = {}
        for number, plan in enumerate(self.plans):
            for name in plan.parameters:
                found[name] = (*found.get(name, ()), number)
        return found | dict(self.more)

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> the places along `pipe` that hold it, in the order of their first stages with it."""
        place = self.schedule.rank_of
        return {name: tuple(dict.fromkeys(place[one] for one in stages)) for name, stages in self.owners.items()}


@dataclass(frozen=True)
class Asked:
    """What is planned for. `count`: micro-batches of a step of training; None: the search decides. `loosely`: nobody
    trains with this batch yet, so that it need not be cut into as many. `given`: what to run without searching;
    `matters`: how its outputs must leave, if it does.
    `kept`: the file of a cache where it is kept, by what was measured; `is_limited`: whether the user gave the memory.
    `profile`: times operators first.
    """

    hardware: Hardware
    optimizer: str
    request: Request
    schedule: str
    count: int | None
    rules: tuple[Rules, ...]
    stages_per_rank: int | None = None
    loosely: bool = False
    given: Pipeline | None = None
    matters: str | None = None
    kept: Callable[[str], Path] | None = None
    is_limited: bool = False
    profile: Profile | None = None


def staged(graph: Graph, pipe: Pipe, like: Staged | None, fixed: Mapping[str, Layout], asked: Asked) -> Staged:
    """The stages of a graph, the same on all ranks, which have to call it. `like`: those that the module trains with,
    which hold the parameters already, laid out as `fixed` says.
    """
    trains = any(result.kind == "gradient" for result in graph.results)
    if like is None and (given := asked.given) is not None:  # every rank has read it
        rounds = in_rounds_of_stages(graph, given.whole.graph.rounds.count)
        agreed(lambda: check(given.whole, rounds, pipe.inner, outputs=asked.matters), pipe.whole)
        return Staged.of(given)
    find = partial(_first, graph, pipe, asked) if like is None else partial(_later, graph, pipe, like, fixed, asked)
    found = found_by_rank_zero(find, pipe.whole)
    text = text_from(0, None if found is None else _told(found), pipe.whole)

    def receive() -> Staged:
        made = found or _read(text, pipe, asked, trains)
        rounds = in_rounds_of_stages(graph, made.whole.graph.rounds.count)
        check(made.whole, rounds, pipe.inner, origin=OF_RANK_0)
        return made

    return agreed(receive, pipe.whole)


def _first(graph: Graph, pipe: Pipe, asked: Asked) -> Staged:
    """Of the cache, or found now."""
    counts = _counts(graph, pipe, asked)

    def question(count: int) -> Question:
        return _ask(in_rounds_of_stages(graph, count), pipe, asked)

    measured = ""
    if asked.profile is not None:  # what was measured is part of the question, and measured once
        question = cache(question)
        measured = _measured(question, counts)
    kept = None if asked.kept is None else asked.kept(measured)
    if kept is not None:
        known = kept_pipeline(kept, graph, pipe.mesh, asked.hardware, asked.optimizer, asked.rules)
        fits = known is not None and known.peak_bytes <= (asked.request.memory or math.inf)
        if known is not None and fits and (asked.is_limited or known.whole.memory_limit is None):
            return Staged.of(known)  # of one in what was free then there may be a better one in what is free now
    found = _found(question, counts, pipe, asked)
    if kept is not None:
        keep_plan(found, kept)
    return Staged.of(found)


def _counts(graph: Graph, pipe: Pipe, asked: Asked) -> list[int]:
    """The numbers of micro-batches to try; a single one is the slowest, for models that cannot be cut into more."""
    if asked.loosely:
        if why_not_played(graph, 1) is not None:
            raise NotCut(
                "stages are cut for a step of training, and the first call, without gradients, gives no loss that one "
                "would begin with: call the model as in training first (under no_grad, too), or give compile such a "
                "call (example_inputs=, example_kwargs=)"
            )
        return [count_near(graph, asked.count or pipe.count)]
    if asked.count is not None:
        return [asked.count]
    batch = batch_size(graph)
    counts = [pipe.count * times for times in TIMES if batch % (pipe.count * times) == 0]
    if not counts:
        raise NotCut(
            f"a batch of {batch} has no multiple of {pipe.count} equal parts, as {pipe.count} stages want them; give "
            f"micro_batches= a number that divides {batch}"
        )
    return [*counts, *([1] if can_be_ordered(asked.schedule, pipe.count, 1, asked.stages_per_rank) else [])]


def _ask(rounds: Graph, pipe: Pipe, asked: Asked) -> Question:
    return ask(rounds, pipe.inner, asked.hardware, optimizer=asked.optimizer, profile=asked.profile)


def _measured(question: Callable[[int], Question], counts: Iterable[int]) -> str:
    """What was measured for steps in so many micro-batches, as far as there are such steps; a key for caches."""
    found: list[str] = []
    for count in counts:
        with suppress(NotCut):  # the search says why
            found.append(question(count).measured_digest)
    return " ".join(found)


def _found(question: Callable[[int], Question], counts: Sequence[int], pipe: Pipe, asked: Asked) -> Pipeline:
    found: list[Pipeline] = []
    refused: list[NotCut] = []
    for count in counts:
        if count == 1 and found:
            break
        try:
            found.append(
                pipeline_of(
                    question(count), pipe.mesh, asked.request, schedule=asked.schedule,
                    stages_per_rank=asked.stages_per_rank,
                )
            )  # fmt: skip
        except NotCut as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return min(found, key=lambda one: one.step_seconds)


def _later(graph: Graph, pipe: Pipe, like: Staged, fixed: Mapping[str, Layout], asked: Asked) -> Staged:
    """Of another call of the module: a step of another batch, or no step at all."""
    trains = any(result.kind == "gradient" for result in graph.results)
    count = count_near(graph, like.whole.graph.rounds.count) if trains else 1
    rounds = in_rounds_of_stages(graph, count)
    if trains and is_of(like.whole, rounds) and lies_as(like.whole, fixed):
        return like
    question = _ask(rounds, pipe, asked)
    pin = asked.request.pin if trains else {}  # nothing comes back in inference, and parameters live where they are
    wanted = replace(asked.request, pin=pin, fixed=fixed, memory=None, simulation=False)
    if trains:
        whole = _that_fits(like, asked, lambda held: answer(question, replace(wanted, held=held)))
    else:
        whole = answer(question, wanted)
    pricer = Pricer.on(pipe.inner, asked.hardware, asked.optimizer, whole.bucket_bytes, rounds.rounds)
    schedule = _schedule(like.schedule.name, pipe.count, like.schedule.stages_per_rank, count, trains)
    ends = like.ends if _forward(whole) == _forward(like.whole) else None
    try:
        cut = None if ends is None else in_stages(whole, ends, pricer, inputs_first=schedule.splits_backward)
    except NotCut:
        cut = None
    if cut is None:
        ends, _ = cut_by_owner(whole, like.owners, like.schedule.stages, pricer)
        cut = in_stages(whole, ends, pricer, inputs_first=schedule.splits_backward)
    stages, plans = zip(*cut, strict=True)
    assert ends is not None
    return Staged(stages, plans, schedule, whole, tuple(ends))


def _that_fits(like: Staged, asked: Asked, search: Callable[[tuple[Held, ...]], Plan]) -> Plan:
    """The plan of a step whose ranks hold no more than they may, as backward begins to begin with. Raises Infeasible.

    Where its forward is another one, what its stages hold is not known before they are cut, and is not looked at.
    """
    first, limit = like.pipeline, asked.request.memory
    if not asked.is_limited and asked.given is not None:  # nobody says more than who made it had
        limit = min(limit or math.inf, asked.given.whole.memory_limit or math.inf)
    if first is None or limit is None or limit == math.inf:
        return search(())
    ranks = zip(limits_of(first), first.memory, strict=True)
    held = tuple(replace(one, most=one.most + max(0.0, limit - rank.peak)) for one, rank in ranks)
    again: Pipeline | None = None
    for _ in range(TRIES):
        whole = search(held)
        if _forward(whole) != _forward(like.whole):
            return whole
        again = cut_again(first, whole, asked.hardware)
        if again is None or again.peak_bytes <= limit:
            return whole
        over = (max(0.0, rank.peak - limit) for rank in again.memory)
        held = tuple(replace(one, most=one.most - more * (1 + SLACK)) for one, more in zip(held, over, strict=True))
        if any(one.most <= 0 for one in held):
            break
    assert again is not None
    raise does_not_fit(again, limit, again.peak_bytes)


def _forward(whole: Plan) -> list[tuple[str, str, tuple[str, ...]]]:
    """What a plan's stages run forward, and the parameters that it reads: equal where the same ends may be meant."""
    read = parameters_read(whole.graph)
    order = forward_order(whole.graph)
    return [(node.op, node.module, tuple(read.get(node.name, ()))) for node in order]


def _schedule(name: str, ranks: int, chunks: int, count: int, trains: bool) -> Schedule:
    """Of a later program, with stages where `name` puts them. Where its micro-batches do not go into the groups that
    this one runs, all forwards are in front of all backwards.
    """
    if trains:
        return make_schedule("looped-bfs" if recipe_of(name).grouped and count % ranks else name, ranks, count, chunks)
    rank_of, order = placed(name, ranks, chunks), list[Action]()
    for stage, rank in enumerate(rank_of):
        order.append(Action("F", stage, 0))
        if rank_of[stage + 1 : stage + 2] not in ((), (rank,)):
            order.append(Action("SA", stage, 0))
    return projected(name, 1, rank_of, order)


def _told(found: Staged) -> str:
    if found.pipeline is not None:
        return found.pipeline.dumps()
    return json.dumps(
        {
            "schedule": found.schedule.name,
            "stages_per_rank": found.schedule.stages_per_rank,
            "whole": dumps(found.whole),
            "plans": list(map(dumps, found.plans)),
            "ends": found.ends,
        }
    )


def _read(text: str, pipe: Pipe, asked: Asked, trains: bool) -> Staged:
    told = json.loads(text)
    if "plans" not in told:
        return Staged.of(Pipeline.loads(text, "rank 0", asked.rules))
    whole = Plan.loads(told["whole"], "rank 0", asked.rules)
    schedule = _schedule(told["schedule"], pipe.count, told["stages_per_rank"], whole.graph.rounds.count, trains)
    stages = cut_in_stages(whole.graph, told["ends"], inputs_first=schedule.splits_backward)
    plans = tuple(Plan.loads(one, "rank 0", asked.rules) for one in told["plans"])
    return Staged(stages, plans, schedule, whole, tuple(told["ends"]))
