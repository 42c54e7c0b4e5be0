"""Gradients that a step's micro-batches add up, each as it is made, so that those of one are never there all at once.

Those that are partial sums are summed over ranks behind the last micro-batch. They lie in rows from the start, up to a
bucket's size each, so that nothing is copied for a row to be summed at once. A row is summed where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import TensorType
from autopar.ir.layout import Layout
from autopar.lower.listing import Listing
from autopar.lower.program import Alloc, Buffer, Free, Instruction, Kind, Launch, Local, Run, Send, Wait
from autopar.plan.plan import Plan
from autopar.plan.value import Decision
from autopar.price.pricer import added_up_bytes, adding_up, as_once
from autopar.price.reshard import Reshard, Work, travels_together
from cost_models.steps import Comm, Compute


@dataclass(frozen=True)
class Row:
    """Results of the graph, by their places, which are summed at once by these changes. `in_bucket`: they are priced by
    their share of a full one; else there is one alone.
    """

    places: tuple[int, ...]
    changes: tuple[Reshard, ...]
    nbytes: int
    in_bucket: bool

    @property
    def scatters(self) -> bool:
        """Whether each rank gets a piece of the sum: there is one gradient alone."""
        return scatter(self.changes)


def scatter(changes: Sequence[Reshard]) -> bool:
    """Whether layout changes of a sum leave each rank a piece of it."""
    return any(change.kind != "all_reduce" for change in changes)


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
    rows = rows_of(plan)
    for row in rows:
        if row.scatters:
            yield from _scattered(plan, listing, gradients, row)
    left = [(row, row.changes) for row in rows if not row.scatters]
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


def _scattered(
    plan: Decision | Plan, listing: Listing, gradients: dict[int, int], row: Row
) -> Iterator[Instruction]:  # fmt: skip
    """What reduces and scatters a gradient, whose sum over micro-batches is gone then."""
    (place,) = row.places
    of, owner = Send(row.places), f"gradient of {plan.graph.results[place].target}"
    for change in row.changes:
        for part in change.parts(plan.mesh.size(change.axis)):
            value = gradients[place]
            assert part.made is not None, change
            new = gradients[place] = listing.new(part.made, Kind.GRADIENT, owner)
            yield from map(Alloc, listing.values[new])
            steps = tuple(map(as_once, part.steps))
            if part.what is not None:
                yield Run(Local(part.what, of, part.dim, change), steps, (value,), (new,), part.share)
            else:
                (step,) = steps
                assert isinstance(step, Comm)
                yield Launch(listing.launches, step, of, (value,), (new,), change)
                yield Wait(listing.launches, of)
                listing.launches += 1
            yield from map(Free, listing.values[value])


class AddedUp:
    """Where gradients are added up: `stay`, buffers that are the gradients that a step leaves, and `go`, those of which
    something else is made behind the micro-batches. `nbytes`: of a rank's piece.
    """

    def __init__(self, plan: Decision | Plan, listing: Listing, nbytes: Callable[[TensorType, Layout], Any]) -> None:
        self.listing, self.so_far = listing, dict[int, int]()
        self.stay: list[Buffer] = []
        self.go: list[Buffer] = []
        self.steps: dict[int, Compute] = {}
        for place, (result, delivery) in enumerate(zip(plan.graph.results, plan.deliveries, strict=True)):
            if delivery is None or result.ref is None or not plan.graph.adds_up(result):
                continue
            type = plan.graph.type_of(result.ref)
            local = nbytes(type, delivery.layout)
            owner = f"gradient of {result.target} so far"
            buffer = Buffer(added_up_bytes(local, type.dtype), Kind.ADDED_UP, owner)
            (self.go if scatter(delivery.once) else self.stay).append(buffer)
            self.so_far[place], self.steps[place] = listing.given(buffer), adding_up(local, type.dtype)

    def add(self, place: int, value: int) -> int:
        """Add a gradient, by its place, to those before. Returns their sum; what is not added up, itself."""
        if (before := self.so_far.get(place)) is None:
            return value
        self.so_far[place] = self.listing.view(before)
        made, what = (self.so_far[place],), Local(Work.ADD_UP, Send((place,)))
        self.listing.do(Run(what, (self.steps[place],), (value, before), made), made)
        return self.so_far[place]
