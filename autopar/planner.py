"""The plans of one compiled module: what each graph of it is to run, found by rank 0 or known already.

A module has a graph for every set of shapes that it is called with, in training and in evaluation. The first of them
in training decides where parameters live; the others take that as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar._version import __version__
from autopar.attach.agree import agreed, found_by_rank_zero, least_of, same_everywhere, text_from
from autopar.attach.pipe import Pipe
from autopar.attach.staging import Asked, Staged, staged
from autopar.attach.tensors import mesh_of
from autopar.calibrate.operators import profiler
from autopar.errors import Infeasible, NotCut
from autopar.ir.graph import Graph, gives_loss
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.outside import Rules
from autopar.lower import lower
from autopar.lower.program import MADE_BY_FIRST_UPDATE
from autopar.machine.device import device_type_of, has_expandable_segments
from autopar.plan import Plan
from autopar.plan.fit import OF_RANK_0, check, is_of, lies_as
from autopar.plan.renamed import names_of, renamed
from autopar.plan.store import dumps
from autopar.plan.tell import human
from autopar.price.calls import Profile
from autopar.rewrite.micro_batches import in_rounds
from autopar.search import Question, Request, answer, ask
from autopar.search.backends import with_backends
from autopar.search.kept import CUT, keep_plan, kept_plan, lasting, still_good
from autopar.search.memory_options import RESIDENCES, allowed, words_of
from autopar.search.meshes import best_mesh, meshes_of
from autopar.search.micro_batches import AUTO, GUESSED, best_plan, count_near, counts_of
from autopar.search.pins import obeyable
from autopar.search.pipeline import Pipeline
from autopar.search.reserved import LEFT, held_within, telling
from autopar.search.same import same_choices
from autopar.simulate.timeline import pricer_of
from cost_models.hardware import Hardware
from cost_models.reserve import Room, room_in
from cost_models.steps import DEVICE

Asking = Callable[[Graph, Mesh], Question]


@dataclass(frozen=True)
class Machine:
    """What there is to plan for. `usable`: bytes of a rank's device; `is_limited`: whether the user gave them.
    `profile`: seconds for which operators may be timed here first.
    """

    hardware: Hardware
    device_type: str
    usable: float
    is_limited: bool
    profile: float | None = None

    def room(self, usable: float, mesh: Mesh) -> Room:
        """What a plan's tensors get of so many bytes, after what kernels and collectives take for themselves."""
        return room_in(usable, self.hardware, mesh.sizes, expandable=has_expandable_segments())

    def profiler(self) -> Profile | None:
        """Of one search: all that it asks shares the seconds."""
        return None if self.profile is None else profiler(self.device_type, self.profile, self.hardware)


@dataclass(frozen=True)
class Planner:
    """Called with a graph, the plan that the module trains with (None for the first) and the layouts of parameters that
    are settled, it gives a plan for the graph, the same on every rank.

    `micro_batches`: of a step of training, "auto" where the search decides; later calls, with other batches, have as
    many, or as few more as divide the batch.
    `request`: what the user asked for, without what hangs on the graph. `settings`: what must be the same on all ranks.
    `given`: a plan to run without searching. `cache`: a folder of plans. `is_open`: the first plan decides the mesh; of
    `device_mesh` counts how many devices it has. `rules`: of users' packages.
    """

    device_mesh: DeviceMesh
    machine: Machine
    request: Request
    optimizer: str
    outputs: str
    inputs: str
    settings: Mapping[str, object]
    given: Plan | Pipeline | None = None
    cache: str | Path | None = None
    is_open: bool = False
    rules: tuple[Rules, ...] = ()
    micro_batches: int | str = 1
    schedule: str = AUTO
    stages_per_rank: int | None = None

    def __call__(self, graph: Graph, like: Plan | None, fixed: Mapping[str, Layout], *, loosely: bool = False) -> Plan:
        """`loosely`: nobody trains with this batch yet, so that it need not be cut into as many as were asked for."""
        mesh = self._mesh(like)
        if like is None:
            same_everywhere(self.settings, self.device_mesh)
            if isinstance(given := self.given, Plan):
                wanted = _outputs_that_matter(self.outputs, graph)
                count = given.graph.rounds.count
                agreed(
                    lambda: check(given, in_rounds(graph, count), mesh or given.mesh, outputs=wanted), self.device_mesh
                )
                return given
        is_training = any(result.kind == "gradient" for result in graph.results)
        usable = least_of(self.machine.usable, self.device_mesh)
        pin = self.request.pin if is_training else {}  # in inference, parameters live where training has them
        request = replace(self.request, pin=pin, fixed=fixed, outputs=self._brought(graph))
        if is_training and like is not None:  # so do they, and states of optimizers, in later programs of training
            request = replace(request, pin={**pin, **words_of(like.residence)}, allow=self._allowed_later())
        limit = min(usable, self._given_room())
        count = self._count(graph, like, loosely) if is_training else 1
        asking = partial(
            ask, hardware=self.machine.hardware, optimizer=self.optimizer, profile=self.machine.profiler()
        )  # fmt: skip

        def find(count: int) -> Plan:
            return self._find(in_rounds(graph, count), mesh, like, request, limit, asking)

        def search() -> Plan:
            if not is_training:
                return self._inference(graph, mesh, like, request, limit, asking)
            if count == AUTO:
                return best_plan(graph, find)
            return _guessed(graph, find, int(count)) if loosely else find(int(count))

        plan = _on_rank_zero(search, graph, mesh, self.device_mesh, self.rules)
        if self.machine.device_type == "cuda" and "host" in plan.residence.values():
            _see_to_the_host(plan)
        return plan

    def _inference(
        self, graph: Graph, mesh: Mesh | None, like: Plan | None, request: Request, limit: float, asking: Asking
    ) -> Plan:
        """Beside the states of optimizers, which stay where they are. Where nobody said how much memory there is, or
        parameters come from the host, it is not limited.
        """
        is_limited = self.machine.is_limited or self._given_room() < math.inf
        if like is None or not is_limited or "host" in like.residence.values():
            return self._find(graph, mesh, like, request, None, asking)
        states = states_of(like, self.machine.hardware)
        try:
            return self._find(graph, mesh, like, request, limit - states, asking)
        except Infeasible as error:
            told = (
                f"{error} It is a call without gradients: {human(states)} of {human(limit)} are states of the optimizer"
            )
            raise Infeasible(f"{told}, which stay meanwhile.", error.at_least, error.enough) from None

    def in_stages(
        self, graph: Graph, pipe: Pipe, like: Staged | None, fixed: Mapping[str, Layout], *, loosely: bool = False
    ) -> Staged:
        """The plans of all stages of a pipeline."""
        if like is None:
            same_everywhere(self.settings, pipe.whole)
        usable = least_of(self.machine.usable, pipe.whole)
        count = self.micro_batches if isinstance(self.micro_batches, int) else None
        request = replace(
            self.request, outputs=self._brought(graph), memory=self.machine.room(usable, pipe.mesh).tensors
        )
        given = self.given if isinstance(self.given, Pipeline) else None
        asked = Asked(
            self.machine.hardware, self.optimizer, request, self.schedule, count, self.rules,
            self.stages_per_rank, loosely, given,
            _outputs_that_matter(self.outputs, graph), self._kept_stages(graph, pipe, request, count, loosely),
            self.machine.is_limited, self.machine.profiler(),
        )  # fmt: skip
        return staged(graph, pipe, like, fixed, asked)

    def _kept_stages(
        self, graph: Graph, pipe: Pipe, request: Request, count: int | None, loosely: bool
    ) -> Callable[[str], Path] | None:
        """Where a pipeline is kept, by what was measured for it."""
        if self.cache is None:
            return None
        folder = Path(self.cache)
        told = (
            self.machine.hardware.digest,
            self.optimizer,
            self.schedule,
            str(self.stages_per_rank),
            str(count),
            str(loosely),
        )
        asked = request if self.machine.is_limited else replace(request, memory=None)
        limit = str(request.time_limit_s)
        grid = str(pipe.mesh)
        return lambda measured: folder / f"{_digest(graph, grid, asked, (*told, limit, measured))}.pipeline.json"

    def _given_room(self) -> float:
        """Bytes of a device in which the given plan was found: where nobody says more, later programs have no more."""
        given = self.given
        if self.machine.is_limited or not isinstance(given, Plan) or given.memory_limit is None:
            return math.inf
        return given.memory_limit + float(given.search.get(LEFT, 0.0))

    def _allowed_later(self) -> tuple[str, ...]:
        """What may be done for want of memory in programs behind the first."""
        words = allowed(self.request.allow)
        if words is None:
            on_cpu = device_type_of(self.machine.hardware) == "cpu"
            words = ("recompute",) if on_cpu else ("recompute", "offload-activations")
        return tuple(word for word in words if word not in RESIDENCES)

    def _count(self, graph: Graph, like: Plan | None, loosely: bool) -> int | str:
        """Micro-batches of a step of training: behind the first plan as many as it has, as far as the batch lets."""
        wanted = self.micro_batches
        if like is not None and (wanted == AUTO or self.given is not None):
            wanted = like.graph.rounds.count
        return count_near(graph, wanted) if isinstance(wanted, int) and (loosely or like is not None) else wanted

    def _mesh(self, like: Plan | None) -> Mesh | None:
        """The mesh of the next plan; None: it decides that."""
        there = mesh_of(self.device_mesh)
        if not self.is_open:
            return there
        return like.mesh if like is not None else there if there.ranks == 1 else None

    def _brought(self, graph: Graph) -> str:
        """How outputs leave the program."""
        if self.outputs == "loss":
            return "loss" if any(result.kind == "gradient" for result in graph.results) else "sharded"
        if self.outputs == "auto" and self.inputs == "global":
            return "sharded" if gives_loss(graph) else "global"
        return "global" if self.outputs == "global" else "sharded"

    def _find(
        self, graph: Graph, mesh: Mesh | None, like: Plan | None, request: Request, usable: float | None, asking: Asking
    ) -> Plan:
        """On rank 0: the plan so far where it is of this graph, that of the cache, or one that is found now. `usable`:
        bytes of a device; inference: None.
        """
        machine, limit_s = self.machine.hardware, request.time_limit_s
        known = like if like is not None and lies_as(like, request.fixed) else None  # else parameters changed places
        if known is not None and known.mesh == mesh and is_of(known, graph):
            return known
        where = mesh_of(self.device_mesh) if mesh is None else mesh
        timed = None if self.machine.profile is None else asking(graph, where)
        tensors = None if usable is None else self.machine.room(usable, where).tensors
        kept = None
        if self.cache is not None:
            memory = tensors if self.machine.is_limited else None
            told = machine.digest, self.optimizer, "" if timed is None else timed.measured_digest
            grid = f"{where.ranks} devices" if mesh is None else str(mesh)
            kept = Path(self.cache) / f"{_digest(graph, grid, replace(request, memory=memory), told)}.plan.json"
            found = kept_plan(kept, graph, where.ranks if mesh is None else mesh, machine, self.optimizer, self.rules)
            fits = found is not None and (tensors is None or still_good(found, tensors))
            if found is not None and lasting(found, limit_s) and fits:
                return found
        began = time.monotonic()
        if known is not None and (same := same_choices(known, graph, tensors, machine, request.outputs)) is not None:
            found = same
        elif mesh is None:
            found = self._on_best_mesh(graph, where.ranks, request, usable, asking)
        else:
            question = timed or asking(graph, mesh)
            if like is not None and request.pin:
                pin, unmet = obeyable(request.pin, question)
                request = replace(request, pin=pin)
                _tell_unmet(unmet)
                kept = None if unmet else kept
            found = self._searched(question, request, usable)
        if time.monotonic() - began >= limit_s:
            found = replace(found, search={**found.search, CUT: limit_s})
        if kept is not None:
            keep_plan(found, kept)
        return found

    def _on_best_mesh(self, graph: Graph, devices: int, request: Request, usable: float | None, asking: Asking) -> Plan:
        """The plan of the best mesh, whose axes are called by what they do."""

        def held(question: Question, request: Request) -> Plan:
            return self._searched(question, request, usable)

        meshes = meshes_of(devices, self.machine.hardware)
        best, *_ = best_mesh(meshes, partial(asking, graph), held, request)
        assert best.plan is not None
        return renamed(best.plan, names_of(best.plan))

    def _searched(self, question: Question, request: Request, usable: float | None) -> Plan:
        if usable is None:
            return answer(question, request)
        room = self.machine.room(usable, question.pricer.mesh)
        with telling(room):
            asked = replace(request, buckets_for=room.tensors)
            plan = held_within(room, lambda held: answer(question, replace(asked, memory=held)), question.pricer)
        return with_backends(plan, question.pricer)


def _tell_unmet(refusals: Sequence[str]) -> None:
    if refusals:
        warnings.warn(
            "a later call of the module, with other shapes or other parameters that train than the first, goes without "
            f"pins that nothing in it can obey: {'; '.join(refusals)}",
            stacklevel=2,
        )


def _digest(graph: Graph, grid: str, request: Request, machine: tuple[str, ...]) -> str:
    """Hash of everything that the answer depends on; a search that was cut is known by its plan."""
    asked = (
        request.memory,
        request.allow,
        [*request.pin.items()],
        request.outputs,
        sorted(request.fixed.items(), key=str),
        request.policy,
        request.tied,
        request.simulation,
    )
    told = repr((graph.digest, grid, machine, asked, __version__))
    return hashlib.sha256(told.encode()).hexdigest()[:24]


def _on_rank_zero(
    find: Callable[[], Plan], graph: Graph, mesh: Mesh | None, device_mesh: DeviceMesh, rules: tuple[Rules, ...]
) -> Plan:
    """Rank 0 finds the plan, the others receive it and check it against their graph; an error anywhere reaches all."""
    if dist.get_world_size() == 1:
        return find()
    found = found_by_rank_zero(find, device_mesh)
    text = text_from(0, None if found is None else dumps(found), device_mesh)

    def receive() -> Plan:
        plan = found or Plan.loads(text, "rank 0", rules)
        check(plan, in_rounds(graph, plan.graph.rounds.count), mesh or plan.mesh, origin=OF_RANK_0)
        return plan

    return agreed(receive, device_mesh)


def _guessed(graph: Graph, find: Callable[[int], Plan], count: int) -> Plan:
    """Of a step that nobody takes yet, of the batch of a call without gradients: in as few more micro-batches as there
    is a plan for. Raises what the first did.
    """
    try:
        return find(count)
    except Infeasible as error:
        first = error
    for more in (one for one in counts_of(graph) if one > count):
        with contextlib.suppress(Infeasible, NotCut):
            found = find(more)
            return replace(found, search={**found.search, GUESSED: more})
    raise Infeasible(
        f"{first} The call has no gradients and was planned as a step of training with its batch: call the module "
        "with a batch that it trains with first, or give compile one (example_inputs=, example_kwargs=).",
        first.at_least, first.enough,
    )  # fmt: skip


def states_of(plan: Plan, hardware: Hardware) -> int:
    """Bytes of a device that optimizers keep from step to step."""
    pricer = pricer_of(plan, hardware)
    held = lower(plan, plan.prefetch, pricer).resident
    return sum(int(one.nbytes) for one in held if one.kind in MADE_BY_FIRST_UPDATE and one.tier == DEVICE)


def _see_to_the_host(plan: Plan) -> None:
    """Parameters on the host beside GPUs: their gradients meet over gloo. Raises ValueError where the process group has
    none.
    """
    count = sum(where == "host" for where in plan.residence.values())
    backends = dist.get_backend_config()
    if "cpu:" not in backends:
        raise ValueError(
            f"{count} parameters of this plan lie on the host, and the process group has {backends} alone; start it "
            "with backend='cpu:gloo,cuda:nccl', as autopar.init_mesh does, or leave 'offload-parameters' out of allow="
        )


def _outputs_that_matter(outputs: str, graph: Graph) -> str | None:
    """A plan that leaves outputs in pieces cannot give whole ones; a plan that makes them whole can give either. One
    that leaves them out is another one.
    """
    if outputs == "loss":
        return outputs
    in_pieces = any(r.kind == "output" and r.ref is not None and graph.type_of(r.ref).shape for r in graph.results)
    return outputs if outputs == "global" and in_pieces else None
