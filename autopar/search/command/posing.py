"""A model that was traced once, and the questions about it: on one mesh or another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import setitem
from typing import TypeVar

from autopar.assemble.problem import Assembled
from autopar.ir.batch_norm import parts_of
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.machine.device import device_type_of, has_expandable_segments, tf32_set
from autopar.plan import Plan
from autopar.plan.renamed import names_of, renamed
from autopar.search.command.arguments import Asked, or_bad
from autopar.search.command.traced import traced
from autopar.search.context import Progress, Question, ask
from autopar.search.meshes import Row, best_mesh
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
    """What was asked, of a model that was `captured`. `seconds`: of each part of the work, which goes on."""

    asked: Asked
    captured: Captured
    optimizer: str
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    _graphs: dict[tuple[str, int], Graph] = field(default_factory=dict[tuple[str, int], Graph])

    def graph(self, statistics: str, mesh: Mesh) -> Graph:
        """The graph with batch norms of those statistics, which hang on the number of ranks."""
        key = statistics, parts_of(statistics, mesh)
        if key not in self._graphs:
            self._graphs[key] = graph_of(self.captured, self.asked.precision, parts=key[1])
        return self._graphs[key]

    def question(self, mesh: Mesh, statistics: str | None = None) -> Question:
        """`statistics`: of batch norms; None: those that were asked for."""
        asked = self.asked
        graph = self.graph(asked.batch_norm if statistics is None else statistics, mesh)
        progress = self.progress if len(asked.meshes) == 1 else _silent

        def propose() -> Question:
            return ask(graph, mesh, asked.hardware, optimizer=self.optimizer, profile=asked.profile, progress=progress)

        return timed(self.seconds, "propose", propose)

    def room(self, mesh: Mesh) -> Room:
        """What plans may do with the memory of a device."""
        return room_in(self.asked.memory, self.asked.hardware, mesh.sizes, expandable=has_expandable_segments())


def posed(asked: Asked, optimizer: str, captured: Captured | None, progress: Progress) -> Posing:
    """The model, built and traced for the devices that are planned for; `captured`: if it was before."""
    hardware, seconds = asked.hardware, dict[str, float]()
    device_type = device_type_of(hardware)
    if captured is None:
        captured = timed(seconds, "trace", lambda: traced(asked.model, asked.precision, device_type, progress))
    if device_type == "cuda":
        hardware = hardware.allowing(tf32_set() if asked.tf32 is None else asked.tf32)
    posing = Posing(replace(asked, hardware=hardware), captured, optimizer, progress, seconds)
    graph = posing.graph(asked.batch_norm, asked.meshes[0])
    progress(f"traced {len(graph.nodes):,} operators, forward and backward")
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


def answered(posing: Posing, request: Request, progress: Progress, stop: Stop) -> Answered:
    """The best plan on the mesh that was asked for; or on the best of several, its axes called by what they do."""
    meshes = posing.asked.meshes
    problems: dict[tuple[int, ...], Assembled] = {}
    simulated: list[Plan] = []

    def held(question: Question, request: Request) -> Plan:
        mesh, told = question.pricer.mesh, progress if len(meshes) == 1 else _silent
        room = posing.room(mesh)
        or_bad(lambda: settled(question, pinned(request.pin, question.graph).splits))

        def find(most: float) -> Plan:
            limited = replace(request, memory=most)
            as_posed = partial(setitem, problems, mesh.sizes)
            return answer(
                question, limited, progress=told, stop=stop, as_posed=as_posed, as_played=simulated.append
            )  # fmt: skip

        with telling(room):
            return held_within(room, find, question.pricer)

    def search() -> tuple[Row, ...]:
        return best_mesh(meshes, posing.question, held, request, progress=progress, stop=stop)

    rows = timed(posing.seconds, "search", search)
    first, *others = rows if len(meshes) == 1 else map(_named, rows)
    assert first.plan is not None
    mesh = first.plan.mesh
    among = (first, *others) if others else ()
    there = tuple(renamed(plan, mesh.names) for plan in simulated if plan.mesh.sizes == mesh.sizes)
    return Answered(first.plan, posing.question(mesh), posing.room(mesh), problems[mesh.sizes], there, among)


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
