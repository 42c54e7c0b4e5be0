"""Gradients that a step's micro-batches add up as partial sums, and that are summed over ranks behind the last one.

They lie in rows from the start, up to a bucket's size each, so that nothing is copied for a row to be summed at once.
A row is summed where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.lower.listing import Listing
from autopar.lower.program import Instruction, Launch, Send, Wait
from autopar.plan.plan import Plan
from autopar.plan.value import Decision
from autopar.price.reshard import Reshard, travels_together
from cost_models.steps import Comm


@dataclass(frozen=True)
class Row:
    """Results of the graph, by their places, which are summed at once by these changes. `in_bucket`: they are priced by
    their share of a full one; else there is one alone.
    """

    places: tuple[int, ...]
    changes: tuple[Reshard, ...]
    nbytes: int
    in_bucket: bool


def rows_of(plan: Decision | Plan) -> list[Row]:
    """In the order in which they are summed, which is the same on all ranks."""
    found: list[Row] = []
    filling: dict[tuple[tuple[str, ...], str], list[int]] = {}

    def flush(places: list[int]) -> None:
        locals = [_delivered(plan, place)[0].local.nbytes for place in places]
        found.append(Row(tuple(places), _delivered(plan, places[0]), sum(locals), True))

    for place, delivery in enumerate(plan.deliveries):
        if delivery is None or not delivery.once:
            continue
        local = delivery.once[0].local
        if not travels_together(delivery.once, plan.mesh, plan.bucket_bytes):
            found.append(Row((place,), delivery.once, local.nbytes, False))
            continue
        key = tuple(change.axis for change in delivery.once), local.dtype
        places = filling.setdefault(key, [])
        places.append(place)
        if sum(_delivered(plan, one)[0].local.nbytes for one in places) >= plan.bucket_bytes:
            flush(filling.pop(key))
    for places in filling.values():
        flush(places)
    return found


def _delivered(plan: Decision | Plan, place: int) -> tuple[Reshard, ...]:
    delivery = plan.deliveries[place]
    assert delivery is not None
    return delivery.once


def summed_once(
    plan: Decision | Plan, listing: Listing, gradients: dict[int, int], *, beside: bool
) -> Iterator[Instruction]:
    """What sums the rows. `gradients`: place -> the value in which it was added up, in the place of which the sum
    comes. `beside`: all rows are on their way at once.
    """
    left = [(row, row.changes) for row in rows_of(plan)]
    while left:
        waits: list[Wait] = []
        for row, (change, *_) in left:
            reads = tuple(gradients[place] for place in row.places)
            makes = tuple(map(listing.view, reads))
            gradients |= dict(zip(row.places, makes, strict=True))
            step = Comm(change.kind, change.axis, plan.mesh.size(change.axis), row.nbytes, once=True)
            of, number = Send(row.places), listing.launches
            listing.launches += 1
            yield Launch(number, step, of, reads, makes, change, in_place=True, in_bucket=row.in_bucket)
            waits.append(Wait(number, of))
            if not beside:
                yield waits.pop()
        yield from waits
        left = [(row, rest) for row, (_, *rest) in left if rest]
