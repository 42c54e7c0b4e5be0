"""A model that was traced once, and the questions about it: on one mesh or another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autopar.assemble.facts import GraphFacts
from autopar.assemble.problem import Assembled
from autopar.ir.batch_norm import parts_of
from autopar.ir.mesh import Mesh
from autopar.ir.words import count_of
from autopar.machine.device import device_type_of, has_expandable_segments, tf32_set
from autopar.plan import Plan
from autopar.plan.renamed import names_of, renamed
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.rewrite.micro_batches import in_rounds
from autopar.search.backends import with_backends
from autopar.search.command.arguments import Asked, or_bad
from autopar.search.command.traced import traced
from autopar.search.context import Progress, Question, ask
from autopar.search.meshes import SAME, Row, best_mesh, first_look
from autopar.search.micro_batches import AUTO, best_count
from autopar.search.pins import pinned
from autopar.search.problems import Stop
from autopar.search.request import Request
from autopar.search.reserved import held_within, telling
from autopar.search.search import answer
from autopar.search.splits import needs_no_axis, settled
from autopar.trace import Captured, graph_of
from cost_models.reserve import Room, room_in

T = TypeVar("T")


def _silent(text: str) -> None:
    """Of many meshes it would be too much."""


@dataclass(frozen=True)
class Posing:
    """What was asked, of a model that was `captured`. `seconds`: of each part of the work, which goes on. `in_stages`:
    the step runs in pipeline stages.
    """

    asked: Asked
    captured: Captured
    optimizer: str
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    in_stages: bool = False
    _graphs: dict[tuple[str, int], GraphFacts] = field(default_factory=dict[tuple[str, int], GraphFacts])

    def graph(self, statistics: str, mesh: Mesh) -> GraphFacts:
        """The graph with batch norms of those statistics, which hang on the number of ranks, and what hangs on it."""
        key = statistics, parts_of(statistics, mesh)
        if key not in self._graphs:
            made = graph_of(self.captured, self.asked.precision, parts=key[1], rules=self.asked.rules)
            count = self.asked.micro_batches
            cut = in_rounds_of_stages if self.in_stages else in_rounds
            made = made if isinstance(count, str) else or_bad(lambda: cut(made, count))
            self._graphs[key] = GraphFacts(made)
        return self._graphs[key]

    def question(self, mesh: Mesh, statistics: str | None = None) -> Question:
        """`statistics`: of batch norms; None: those that were asked for."""
        asked = self.asked
        facts = self.graph(asked.batch_norm if statistics is None else statistics, mesh)
        progress = self.progress if len(asked.meshes) == 1 else _silent

        def propose() -> Question:
            return ask(
                facts.graph, mesh, asked.hardware, optimizer=self.optimizer, profile=asked.profile, facts=facts,
                progress=progress,
            )  # fmt: skip

        return timed(self.seconds, "propose", propose)

    def room(self, mesh: Mesh) -> Room:
        """What plans may do with the memory of a device."""
        return room_in(self.asked.memory, self.asked.hardware, mesh.sizes, expandable=has_expandable_segments())

    def of(self, micro_batches: int, *, in_stages: bool = False) -> Posing:
        """The same, of a step in so many micro-batches; or of one in pipeline stages."""
        if micro_batches == self.asked.micro_batches and in_stages == self.in_stages:
            return self
        asked = replace(self.asked, micro_batches=micro_batches)
        return replace(self, asked=asked, in_stages=in_stages, _graphs={})


def posed(asked: Asked, optimizer: str, captured: Captured | None, progress: Progress) -> Posing:
    """The model, built and traced for the devices that are planned for; `captured`: if it was before."""
    hardware, seconds = asked.hardware, dict[str, float]()
    device_type = device_type_of(hardware)
    if captured is None:
        captured = timed(
            seconds,
            "trace",
            lambda: traced(asked.model, asked.precision, device_type, progress, loss_alone=asked.loss_alone),
        )
    if device_type == "cuda":
        hardware = hardware.allowing(tf32_set() if asked.tf32 is None else asked.tf32)
    posing = Posing(replace(asked, hardware=hardware), captured, optimizer, progress, seconds)
    graph = posing.graph(asked.batch_norm, asked.meshes[0]).graph
    progress(f"traced {count_of(len(graph.nodes), 'operator')}, forward and backward")
    or_bad(lambda: pinned(asked.pin, graph))
    if len(asked.meshes) > 1:
        or_bad(lambda: needs_no_axis(asked.pin))
    return posing


@dataclass(frozen=True)
class Answered:
    """The plan; the question on its mesh, the problem whose bound it carries, the plans `simulated` there, and
    the meshes it was found among.
    """

    plan: Plan
    question: Question
    room: Room
    problem: Assembled
    simulated: tuple[Plan, ...] = ()
    meshes: tuple[Row, ...] = ()


@dataclass(frozen=True)
class _Found:
    """A plan, the problem whose bound it carries, and all that were simulated."""

    plan: Plan
    problem: Assembled
    simulated: tuple[Plan, ...]


def in_best_rounds(posing: Posing, request: Request, progress: Progress, stop: Stop) -> tuple[Posing, Answered]:
    """`answered`, of as many micro-batches as were asked for, or are best, and the posing that has so many."""
    if posing.asked.micro_batches != AUTO:
        return posing, answered(posing, request, progress, stop)
    whole = posing.graph(posing.asked.batch_norm, posing.asked.meshes[0]).graph

    def find(count: int) -> tuple[Posing, Answered]:
        progress(f"a step in {count_of(count, 'micro-batch', 'micro-batches')}")
        in_rounds(whole, count)  # says so where it cannot be
        return posing.of(count), answered(posing.of(count), request, progress, stop)

    return best_count(whole, find, lambda found: found[1].plan.predicted_seconds, stop)


def answered(posing: Posing, request: Request, progress: Progress, stop: Stop) -> Answered:
    """The best plan on the mesh that was asked for; or on the best of several, its axes called by what they do."""
    meshes = posing.asked.meshes
    told = progress if len(meshes) == 1 else _silent
    best: dict[tuple[int, ...], _Found] = {}  # of as many meshes, all of them together are gigabytes

    def held(question: Question, asked: Request) -> Plan:
        or_bad(lambda: settled(question, pinned(asked.pin, question.graph).splits))
        found = _found(posing, question, asked, told, stop)
        if asked == request:  # no first look
            least = min(one.plan.predicted_seconds for one in [*best.values(), found])
            best[question.pricer.mesh.sizes] = found
            for sizes in [sizes for sizes, one in best.items() if one.plan.predicted_seconds > least * (1 + SAME)]:
                del best[sizes]
        return found.plan

    def search() -> tuple[Row, ...]:
        return best_mesh(meshes, posing.question, held, request, progress=progress, stop=stop)

    rows = timed(posing.seconds, "search", search)
    first, *others = rows if len(meshes) == 1 else map(_named, rows)
    assert first.plan is not None
    mesh = first.plan.mesh
    found = best.get(mesh.sizes)
    if found is None:  # the time was up after its first look
        found = _found(posing, posing.question(rows[0].mesh), first_look(request), told, stop)
    among = (first, *others) if others else ()
    there = tuple(renamed(plan, mesh.names) for plan in found.simulated)
    question = posing.question(mesh)
    plan = with_backends(first.plan, question.pricer)
    return Answered(plan, question, posing.room(mesh), found.problem, there, among)


def _found(posing: Posing, question: Question, request: Request, progress: Progress, stop: Stop) -> _Found:
    """The best plan in the memory that there is."""
    room = posing.room(question.pricer.mesh)
    problems: list[Assembled] = []
    simulated: list[Plan] = []

    def find(most: float) -> Plan:
        limited, posed = replace(request, memory=most, buckets_for=room.tensors), list[Assembled]()
        plan = answer(
            question, limited, progress=progress, stop=stop, as_posed=posed.append, as_played=simulated.append
        )  # fmt: skip
        problems[:] = posed[-1:]  # where there is no plan in less memory, the one before stays, and its problem
        return plan

    with telling(room):
        plan = held_within(room, find, question.pricer)
    return _Found(plan, problems[-1], tuple(simulated))


def _named(row: Row) -> Row:
    """Its axes are called by what they do."""
    if row.plan is None:
        return row
    plan = renamed(row.plan, names_of(row.plan))
    return replace(row, plan=plan, mesh=plan.mesh)


def timed(seconds: dict[str, float], part: str, work: Callable[[], T]) -> T:
    """What the work gives; its seconds are added to that part."""
    began = time.perf_counter()
    done = work()
    seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began
    return done
