"""Plans that hold on CUDA's caching allocator: a limit is of what it reserves, and of what lies beside it.

A search counts what tensors hold, and leaves room for the rest (`cost_models.reserve`). What it finds is simulated with
the allocator's rules. Where that reserves more than there is, the next search gets that much less.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

from autopar.assemble.problem import DEVICE
from autopar.errors import Infeasible, NoAnswerInTime
from autopar.ir.attention import ATTENTION_BACKWARD
from autopar.ir.layout import local_type
from autopar.lower.program import Operator, Run
from autopar.plan import Plan
from autopar.plan.tell import human
from autopar.price.pricer import Pricer
from autopar.simulate.timeline import events_of
from cost_models.caching_allocator import reserved_by
from cost_models.reserve import Room, outside_bytes, peers_of, workspaces
from cost_models.simulator import COMPUTE, Event, Hold

TRIES = 3
RESERVED, LEFT = "reserved_bytes", "reserve_bytes"  # among the facts of a search
WHAT = "workspaces of kernels, buffers of collectives and gaps of the allocator"


def reserved_bytes(plan: Plan, pricer: Pricer, *, expandable: bool = False) -> int:
    """Bytes of one rank's device that three steps of the plan take: what the allocator reserves, and what collectives
    take beside it.
    """
    priced = replace(pricer, bucket_bytes=plan.bucket_bytes)
    events = events_of(plan, priced, plan.prefetch)
    events = [_with_kernel(event, plan) for event in events]
    inside = reserved_by(events, expandable=expandable, beside={DEVICE: workspaces(pricer.hardware)})[DEVICE]
    sizes = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    peers = peers_of([*plan.comm_bytes], sizes)
    joined = len(plan.groups()) - len(plan.mesh.names)
    return inside + int(outside_bytes(pricer.hardware, plan.mesh.sizes, peers, joined))


def _with_kernel(event: Event, plan: Plan) -> Event:
    """The same event, with what its kernel takes and gives back by itself.

    Attention sums the gradient of its queries in float32 and keeps a number of each row (flash_api.cpp: dq_accum,
    softmax_d). Of what others take, sums and indices of a row or column, the gaps are many times the size.
    """
    match event.by:
        case Run(Operator(name)) if event.stream == COMPUTE and plan.graph.by_name[name].op == ATTENTION_BACKWARD:
            node = plan.graph.by_name[name]
        case _:
            return event
    (type, *_), (layout, *_) = node.outputs, plan.choices[node.name].gives
    if type is None:
        return event
    queries = local_type(type, layout, plan.mesh)
    nbytes = 4 * (queries.numel + queries.numel // max(1, queries.shape[-1]))
    return replace(event, holds=(*event.holds, Hold(f"{node.op} itself", nbytes, DEVICE)))


def held_within(room: Room, find: Callable[[float], Plan], pricer: Pricer) -> Plan:
    """The plan that `find` gives for as many bytes of tensors as leave the rest its room. Raises what `find` does."""
    if not pricer.hardware.reserve:
        return find(room.tensors)
    found, tensors = None, room.tensors
    for _ in range(TRIES):
        try:
            plan = told(find(tensors), room, pricer)
        except (Infeasible, NoAnswerInTime):
            if found is None:
                raise
            break
        over = int(plan.search[RESERVED]) - room.limit
        if over <= 0:
            return plan
        if found is None or int(plan.search[RESERVED]) < int(found.search[RESERVED]):  # less room may leave more gaps
            found = plan
        tensors -= over
        if tensors <= 0:
            break
    assert found is not None
    return replace(
        found,
        notes=(
            *found.notes,
            f"simulated with the allocator's rules it reserves {human(int(found.search[RESERVED]))}, with buffers of "
            f"collectives and gaps between values, more than the {human(room.limit)} that it may; the allocator then "
            "gives memory back, which takes time (expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF leaves fewer "
            "gaps)",
        ),
    )


def told(plan: Plan, room: Room, pricer: Pricer) -> Plan:
    """The plan, which says what is reserved for it."""
    if not pricer.hardware.reserve or RESERVED in plan.search:
        return plan
    reserved = reserved_bytes(plan, pricer, expandable=room.expandable)
    note = (
        f"{human(room.left)} of the {human(room.limit)} of the device that may be taken are left for {WHAT}; with "
        f"those this plan reserves {human(reserved)} (predicted)"
    )
    facts = {**plan.search, RESERVED: reserved, LEFT: int(room.left)}
    limit = None if plan.memory_limit is None else room.tensors  # what was asked for, whatever a later try was given
    others = tuple(one for one in plan.notes if WHAT not in one)  # a plan that took another's place has its notes
    return replace(plan, search=facts, notes=(*others, note), memory_limit=limit)


@contextmanager
def telling(room: Room) -> Generator[None]:
    """Where nothing fits, it is said how much of the limit is no plan's."""
    try:
        if room.tensors <= 0:
            before = human(room.taken(0.0))
            told = (
                f"no plan fits in {human(room.limit)} per rank: {before} are taken before a tensor is held, for "
                f"{WHAT}; give more than that"
            )
            raise Infeasible(told, at_least=room.taken(0.0))
        yield
    except Infeasible as error:
        if not room.left or room.tensors <= 0:
            raise
        ends = [None if nbytes is None else room.taken(nbytes) for nbytes in (error.at_least, error.enough)]
        needs = [human(nbytes) for nbytes in reversed(ends) if nbytes is not None]
        told = f"{error} Of the {human(room.limit)}, {human(room.left)} are left for {WHAT}"
        told += f"; with those, about {needs[0]} is needed." if needs else "."
        raise Infeasible(told, *ends) from None


def check_fits(peak: int, room: Room, memory: object) -> None:
    """Raises ValueError for a plan whose tensors, `peak` bytes, need more than the user allows."""
    needs = room.taken(peak)
    if needs > room.limit * (1 + 1e-9):
        beside = f", {human(needs - peak)} of it for {WHAT}" if room.left else ""
        raise ValueError(
            f"the plan needs {human(needs)} of each rank's device{beside}, and memory={memory!r} allows "
            f"{human(room.limit)}; give more, or search for a plan within it (--memory)"
        )
