"""What a transfer does, part by part: layout changes, the way through a bucket, copies between device and host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.ir.graph import TensorType
from autopar.ir.layout import local_type
from autopar.lower.program import Copy, Read, Send, Transfer
from autopar.plan.plan import Plan
from autopar.plan.value import Decision
from autopar.price.reshard import Part, Reshard, Work
from cost_models.steps import DEVICE, HOST, Comm, Compute, Move, Step


def changes_of(plan: Decision | Plan, transfer: Transfer) -> tuple[Reshard, ...]:
    """The layout changes that a transfer makes, one behind the other; of a row, those of its first gradient."""
    match transfer:
        case Read(reader, position):
            return plan.choices[reader].reads[position]
        case Send((first, *_)):
            delivery = plan.deliveries[first]
            return () if delivery is None else delivery.changes
        case Copy():
            return ()
        case Send():
            raise ValueError("nothing is sent")


def copies_of(plan: Decision | Plan, transfer: Transfer) -> int:
    """How many copies between device and host a transfer makes, behind its layout changes."""
    match transfer:
        case Copy():
            return 1
        case Send((place, *_)):  # a row leaves as a whole
            return int(leaves(plan, place))
        case _:
            return 0


def leaves(plan: Decision | Plan, place: int) -> bool:
    """Whether that result of the graph is a gradient that leaves for the host."""
    result = plan.graph.results[place]
    return result.kind == "gradient" and plan.residence.get(result.target) == "host"


def in_a_bucket(plan: Decision | Plan, places: Sequence[int]) -> Iterator[tuple[Part, Reshard | None]]:
    """Gradients are put in one row, summed there, and taken apart; one alone is priced as if it was."""
    deliveries = [delivery for place in places if (delivery := plan.deliveries[place]) is not None]
    local = [delivery.changes[0].local for delivery in deliveries]
    copies = tuple(Compute("reorder", 0.0, 2.0 * one.nbytes, one.dtype, 1, "elementwise") for one in local)
    nbytes, is_row = sum(one.nbytes for one in local), len(local) > 1
    yield (Part(Work.FLATTEN, copies, made=nbytes) if is_row else Part(Work.NOTHING, copies)), None
    for change in deliveries[0].changes:
        if (ranks := plan.mesh.size(change.axis)) > 1:
            step = Comm(change.kind, change.axis, ranks, nbytes)
            of = TensorType((0,), change.local.dtype) if is_row else change.local
            yield Part(None, (step,), made=None if is_row else nbytes), replace(change, local=of)
    if is_row:
        yield Part(Work.UNFLATTEN), None


def leaving(plan: Decision | Plan, places: Sequence[int]) -> Iterator[tuple[Part, Reshard | None]]:
    """Results are copied to the host, each by itself."""
    steps: list[Step] = []
    for place in places:
        ref, delivery = plan.graph.results[place].ref, plan.deliveries[place]
        assert ref is not None and delivery is not None
        nbytes = local_type(plan.graph.type_of(ref), delivery.layout, plan.mesh).nbytes
        steps.append(Move(DEVICE, HOST, nbytes))
    yield Part(None, tuple(steps)), None
