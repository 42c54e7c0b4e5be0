"""Where memory can still bind: keep those instants only, and cut usages down to them.

At an instant where even the sum of all maxima is within the limit nothing can bind. Of the others an instant is
implied by its neighbour if every usage that covers the one covers the other, where there is no more room. Both kinds
are dropped; the solutions that fit stay exactly the same.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from solver.presolve.core import Core, Dead, Held, Span
from solver.problem import Array, EdgeUsage, Index, Usage
from solver.referee import FITS_REL_TOL

Mask = NDArray[np.bool_]


def lay_out(core: Core) -> None:
    """Fill points, room and components of a fresh core from the usages of limited resources."""
    problem = core.problem
    number = {resource: r for r, resource in enumerate(core.resources)}
    usages = [u for u in problem.usages if u.resource in number and u.start < u.end]
    edge_usages = [u for u in problem.edge_usages if u.resource in number and u.start < u.end]
    everyone: list[Usage | EdgeUsage] = [*usages, *edge_usages]
    spans: list[Span] = [(0, 0, 0)] * len(everyone)
    for r, resource in enumerate(core.resources):
        places = [place for place, usage in enumerate(everyone) if usage.resource == resource]
        # use only rises where a usage starts, so its maximum is at a start
        points = np.unique(np.array([everyone[place].start for place in places], dtype=np.intp))
        core.points[r] = points
        core.room[r] = np.full(len(points), problem.limits[resource] * (1 + FITS_REL_TOL / 2))
        firsts = np.searchsorted(points, [everyone[place].start for place in places]).tolist()
        lasts = np.searchsorted(points, [everyone[place].end for place in places]).tolist()
        for place, first, last in zip(places, firsts, lasts, strict=True):
            spans[place] = r, first, last
    for usage, span in zip(usages, spans, strict=False):
        core.hold(usage.item, {span: usage.nbytes})
    on_edge: dict[int, Held] = defaultdict(dict)
    sums: dict[tuple[int, int], Array] = {}  # repeated layers add up the same
    for usage, span in zip(edge_usages, spans[len(usages) :], strict=True):
        held = on_edge[usage.edge]
        if (old := held.get(span)) is None:
            held[span] = usage.nbytes
            continue
        if (key := (id(old), id(usage.nbytes))) not in sums:
            sums[key] = old + usage.nbytes
        held[span] = sums[key]
    for number_of, held in on_edge.items():
        edge = problem.edges[number_of]
        if edge.src == edge.dst:
            core.hold(edge.src, {span: np.diagonal(nbytes) for span, nbytes in held.items()})
        else:
            core.hold_on_edge(edge.src, edge.dst, held.items())


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
    on_items = [(span, nbytes) for held in core.components for span, nbytes in held.items()]
    on_edges = [(span, nbytes) for held in core.edge_components.values() for span, nbytes in held.items()]
    most = np.array([*_largest([nbytes for _, nbytes in on_items]), *(core.most(nbytes) for _, nbytes in on_edges)])
    ends = chain.from_iterable(span for span, _ in chain(on_items, on_edges))
    bounds: Index = np.fromiter(ends, dtype=np.intp).reshape(-1, 3)
    keeps: list[Mask] = []
    for r in range(len(core.resources)):
        here = bounds[:, 0] == r
        keeps.append(_binding(core, r, bounds[here, 1], bounds[here, 2], most[here]))
    if all(keep.all() for keep in keeps):
        return False
    core.fired["slack"] += 1
    before = [np.concatenate(([0], np.cumsum(keep))).tolist() for keep in keeps]  # kept points ahead of each position
    for r, keep in enumerate(keeps):
        core.points[r], core.room[r] = core.points[r][keep], core.room[r][keep]

    def moved(held: Held) -> list[tuple[Span, Array]]:
        return [((r, before[r][first], before[r][last]), nbytes) for (r, first, last), nbytes in held.items()]

    for item in core.items():
        found = moved(core.components[item])
        if not _is_whole(found):
            core.components[item] = {}
            for span, nbytes in found:
                core.hold(item, {span: nbytes})
            core.touch(item)
        else:
            core.components[item] = dict(found)
    for (u, v), held in list(core.edge_components.items()):
        found = moved(held)
        if not _is_whole(found):
            del core.edge_components[u, v]
            core.hold_on_edge(u, v, found)
            core.touch_edge(u, v)
        else:
            core.edge_components[u, v] = dict(found)
    return True


def _is_whole(held: list[tuple[Span, Array]]) -> bool:
    """Whether no span is empty, nor the same as another."""
    spans = {span for span, _ in held}
    return len(spans) == len(held) and all(first < last for _, first, last in spans)


def _largest(vectors: list[Array]) -> list[float]:
    """The largest entry of each."""
    if not vectors:
        return []
    starts = np.cumsum([0, *(len(vector) for vector in vectors[:-1])])
    return np.maximum.reduceat(np.concatenate(vectors), starts).tolist()


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


def _binding(core: Core, r: int, first: Index, last: Index, most: Array) -> Mask:
    """Which points of the resource to keep. `first`, `last`, `most`: of everything that is held of it, the span and the
    largest bytes.
    """
    size, room = len(core.points[r]), core.room[r]
    if not size:
        return np.ones(0, dtype=bool)
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
