"""Where memory can still bind: keep those instants only, and cut usages down to them.

At an instant where even the sum of all maxima is within the limit nothing can bind. Of the others an instant is
implied by its neighbour if every usage that covers the one covers the other, where there is no more room. Both kinds
are dropped; the solutions that fit stay exactly the same.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from solver.presolve.core import Core, Dead, Index, Span
from solver.problem import Array, EdgeUsage, Usage
from solver.referee import FITS_REL_TOL


def lay_out(core: Core) -> None:
    """Fill points, room and components of a fresh core from the usages of limited resources."""
    problem = core.problem
    number = {resource: r for r, resource in enumerate(core.resources)}
    usages = [u for u in problem.usages if u.resource in number and u.start < u.end]
    edge_usages = [u for u in problem.edge_usages if u.resource in number and u.start < u.end]
    starts: list[set[int]] = [set() for _ in number]
    for usage in chain(usages, edge_usages):
        # use only rises where a usage starts, so its maximum is at a start
        starts[number[usage.resource]].add(usage.start)
    for r, resource in enumerate(core.resources):
        core.points[r] = np.array(sorted(starts[r]), dtype=np.intp)
        core.room[r] = np.full(len(starts[r]), problem.limits[resource] * (1 + FITS_REL_TOL / 2))
    for usage in usages:
        core.hold(usage.item, {_span(core, number[usage.resource], usage): usage.nbytes})
    for usage in edge_usages:
        edge, span = problem.edges[usage.edge], _span(core, number[usage.resource], usage)
        if edge.src == edge.dst:
            core.hold(edge.src, {span: np.diagonal(usage.nbytes)})
        else:
            core.hold_on_edge(edge.src, edge.dst, {span: usage.nbytes})


def _span(core: Core, r: int, usage: Usage | EdgeUsage) -> Span:
    first, last = np.searchsorted(core.points[r], (usage.start, usage.end))
    return r, int(first), int(last)


def check_room(core: Core) -> None:
    """Raise Dead if even the smallest options do not fit somewhere."""
    for r, resource in enumerate(core.resources):
        if len(core.room[r]) and (worst := int(core.room[r].argmin())) >= 0 and core.room[r][worst] < 0:
            limit = core.problem.limits[resource]
            raise Dead(
                f"the smallest options hold {limit - core.room[r][worst]:.0f} bytes of {resource} "
                f"at instant {core.points[r][worst]}, its limit is {limit:.0f}"
            )


def trim(core: Core) -> bool:
    """Drop the instants where nothing can bind; whether anything changed."""
    check_room(core)
    shift: dict[int, Index] = {}  # resource -> how many kept points lie before position k
    spans = [(span, nbytes) for item in core.items() for span, nbytes in core.components[item].items()]
    spans += [(span, nbytes) for held in core.edge_components.values() for span, nbytes in held.items()]
    for r in range(len(core.resources)):
        keep = _binding(core, r, [(span, nbytes) for span, nbytes in spans if span[0] == r])
        if not keep.all():
            shift[r] = np.concatenate(([0], np.cumsum(keep)))
            core.points[r], core.room[r] = core.points[r][keep], core.room[r][keep]
    if not shift:
        return False
    core.fired["slack"] += 1
    for item in core.items():
        held, core.components[item] = core.components[item], {}
        for span, nbytes in held.items():
            core.hold(item, {_shifted(span, shift): nbytes})
        if len(core.components[item]) != len(held):
            core.touch(item)
    for (u, v), held in list(core.edge_components.items()):
        moved = {_shifted(span, shift): nbytes for span, nbytes in held.items()}
        if len(moved) == len(held) and all(first < last for _, first, last in moved):
            core.edge_components[u, v] = moved
            continue
        del core.edge_components[u, v]
        for span, nbytes in held.items():
            core.hold_on_edge(u, v, {_shifted(span, shift): nbytes})
        core.touch_edge(u, v)
    return True


def _shifted(span: Span, shift: dict[int, Index]) -> Span:
    resource, first, last = span
    before = shift.get(resource)
    return span if before is None else (resource, int(before[first]), int(before[last]))


def drop_oversized(core: Core) -> bool:
    """Delete options that do not fit even when all others take their smallest; whether any was deleted."""
    check_room(core)
    changed = False
    for item in core.items():
        for (resource, first, last), nbytes in core.components[item].items():
            room = core.room[resource][first:last].min()
            if nbytes.max() > room:
                name, left = core.resources[resource], np.flatnonzero(nbytes <= room)
                core.fired["oversized"] += 1
                core.keep(item, left, f"each is too large for the limit of {name}")
                changed = True
                break  # its components are new now; the next round looks again
    return changed


def _binding(core: Core, r: int, spans: list[tuple[Span, Array]]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which points of the resource to keep."""
    size, room = len(core.points[r]), core.room[r]
    if not size:
        return np.ones(0, dtype=bool)
    first: Index = np.array([span[1] for span, _ in spans], dtype=np.intp)
    last: Index = np.array([span[2] for span, _ in spans], dtype=np.intp)
    most = np.array([nbytes.max() for _, nbytes in spans])
    change = np.bincount(first, most, size + 1) - np.bincount(last, most, size + 1)
    keep = np.cumsum(change)[:size] > room
    kept = np.flatnonzero(keep)
    if len(kept) > 1:
        before = np.concatenate(([0], np.cumsum(keep)))
        starts = np.bincount(before[first], minlength=len(kept) + 1)[1 : len(kept)] > 0
        ends = np.bincount(before[last], minlength=len(kept) + 1)[1 : len(kept)] > 0
        left, right = room[kept[:-1]], room[kept[1:]]
        implied = np.zeros(len(kept), dtype=bool)
        implied[:-1] = ~ends & (right <= left)  # all that covers k covers k + 1
        # all that covers k + 1 covers k; of two equal points the first is already gone
        implied[1:] |= ~starts & (left < right)
        keep[kept[implied]] = False
    return keep
