"""The exact reductions that look at one item or one edge. Each returns whether it did something.

B: keeps every feasible solution. O: keeps at least one cheapest solution.

    arcs          B  an option whose pairs with one neighbour are all forbidden goes
    contract      B  an item determined by a neighbour (one allowed option for each of its options) melts into it
    separable     B  a matrix that is a row term plus a column term becomes item costs
    single        B  an item with one option is folded into its neighbours
    leaf          O  a neutral item with at most one neighbour takes the best answer to each of its options
    aligned       O  so does an item with memory if the best answer is also the smallest
    path          O  a neutral item between two neighbours becomes an edge between them

Neutral: no use of memory that can still bind depends on the item's pick. Then changing its pick alone leaves memory as
it is, which is why the best answer may be taken.
"""

from __future__ import annotations

import numpy as np

from solver.presolve.core import Core, each
from solver.problem import Array, Index

# Degree-2 elimination in pieces above this many (option, option, option) triples, to bound memory.
MAX_TRIPLES = 1_000_000


def forbidden(core: Core, item: int) -> bool:
    """Delete options of infinite cost."""
    finite = core.costs[item] < np.inf
    if finite.all():
        return False
    core.fired["forbidden"] += 1
    core.keep(item, np.flatnonzero(finite), "each one is forbidden or has only forbidden pairs")
    return True


def single(core: Core, item: int) -> bool:
    """Fold an item with one option into its neighbours."""
    if len(core.costs[item]) != 1:
        return False
    core.fired["single"] += 1
    for other, cost in list(core.neighbours[item].items()):
        core.costs[other] = core.costs[other] + cost[0]
        core.hold(other, each(core.edge_usages(item, other), lambda nbytes: nbytes[0]))
        core.touch(other)
    core.constant += float(core.costs[item][0])
    core.settle(item, (), np.zeros((), np.intp))
    return True


def leaf(core: Core, item: int) -> bool:
    """Degree 0 or 1, neutral."""
    if len(core.neighbours[item]) > 1 or not core.is_neutral(item):
        return False
    core.fired["leaf"] += 1
    if not core.neighbours[item]:
        best = core.costs[item].argmin()
        core.constant += float(core.costs[item][best])
        core.settle(item, (), np.array(best, np.intp))
        return True
    ((other, cost),) = core.neighbours[item].items()
    total = cost + core.costs[item][:, None]
    core.costs[other] = core.costs[other] + total.min(0)
    core.settle(item, (other,), total.argmin(0))
    return True


def aligned(core: Core, item: int) -> bool:
    """Degree 0 or 1, with memory, where the cheapest answer is also the smallest in every component."""
    if len(core.neighbours[item]) > 1 or not core.components[item] or not _edges_hold_nothing(core, item):
        return False
    components, cost = core.components[item], core.costs[item]
    total = cost[:, None] + next(iter(core.neighbours[item].values())) if core.neighbours[item] else cost[:, None]
    # among the cheapest answers the one that holds least in sum; if any is smallest everywhere, it is
    weight = np.sum(list(components.values()), axis=0)[:, None]
    best = np.where(total == total.min(0), weight, np.inf).argmin(0)
    for nbytes in components.values():
        least = np.where(total < np.inf, nbytes[:, None], np.inf).min(0)
        if (nbytes[best] > least).any():
            return False
    core.fired["aligned"] += 1
    if core.neighbours[item]:
        _merge_into(core, item, next(iter(core.neighbours[item])), best)
    else:
        core.keep(item, best, "")
    return True


def path(core: Core, item: int) -> bool:
    """Degree 2, neutral: the neighbours get a joint matrix, unless it would be larger than what it replaces."""
    if len(core.neighbours[item]) != 2 or not core.is_neutral(item):
        return False
    (u, to_u), (v, to_v) = sorted(core.neighbours[item].items(), key=lambda pair: pair[0])
    joined = v in core.neighbours[u]
    if not joined and to_u.shape[1] * to_v.shape[1] > core.facts(to_u).pairs + core.facts(to_v).pairs:
        return False
    core.fired["path"] += 1
    cost, table = _joint(to_u + core.costs[item][:, None], to_v)
    core.settle(item, (u, v), table)
    core.add_edge(u, v, cost)
    return True


def _joint(to_u: Array, to_v: Array) -> tuple[Array, Index]:
    """min over i of to_u[i, a] + to_v[i, b], and the first i that gives it."""
    if to_u.shape[0] * to_u.shape[1] * to_v.shape[1] <= MAX_TRIPLES:
        total = to_u[:, :, None] + to_v[:, None, :]
        table = total.argmin(0)
        return np.take_along_axis(total, table[None], 0)[0], table
    best = to_u[0][:, None] + to_v[0]
    table = np.zeros(best.shape, np.intp)
    for i in range(1, len(to_u)):
        total = to_u[i][:, None] + to_v[i]
        better = total < best
        best[better], table[better] = total[better], i
    return best, table


def _edges_hold_nothing(core: Core, item: int) -> bool:
    return not core.edge_components or not any(core.edge_usages(item, other) for other in core.neighbours[item])


def arcs(core: Core, u: int, v: int) -> bool:
    """Delete options that the edge leaves without any allowed partner."""
    facts = core.facts(core.neighbours[u][v])
    if facts.consistent:
        return False
    changed = False
    for item, other, pairs in ((u, v, facts.rows), (v, u, facts.columns)):
        if not pairs.all():
            core.fired["arcs"] += 1
            cause = f"{core.problem.name(other)} forbids every option of it that is left"
            core.keep(item, np.flatnonzero(pairs), cause)
            changed = True
    return changed


def separable(core: Core, u: int, v: int) -> bool:
    """Fold a matrix that is an outer sum into the costs of its ends."""
    facts = core.facts(core.neighbours[u][v])
    if facts.row_term is None or facts.column_term is None or core.edge_usages(u, v):
        return False
    core.fired["separable"] += 1
    core.costs[u] = core.costs[u] + facts.row_term
    core.costs[v] = core.costs[v] + facts.column_term
    core.drop_edge(u, v)
    return True


def contract(core: Core, u: int, v: int) -> bool:
    """Melt one end into the other if the other's pick determines its own; the one with less to move."""
    facts = core.facts(core.neighbours[u][v])
    ways: list[tuple[int, int, int, Index]] = []
    if facts.row_of is not None:
        ways.append((len(core.neighbours[u]) + len(core.components[u]), u, v, facts.row_of))
    if facts.column_of is not None:
        ways.append((len(core.neighbours[v]) + len(core.components[v]), v, u, facts.column_of))
    if not ways:
        return False
    core.fired["contract"] += 1
    _, item, into, table = min(ways, key=lambda way: way[:2])
    _merge_into(core, item, into, table)
    return True


def _merge_into(core: Core, item: int, into: int, table: Index) -> None:
    """`item` picks table[pick of `into`]: move its cost, memory and other edges there."""
    own = np.arange(len(table))
    core.costs[into] = core.costs[into] + core.costs[item][table] + core.neighbours[item][into][table, own]
    moved = [{span: nbytes[table] for span, nbytes in core.components[item].items()}]
    moved.append(each(core.edge_usages(item, into), lambda nbytes: nbytes[table, own]))
    others = [(other, cost, core.edge_usages(item, other)) for other, cost in core.neighbours[item].items()]
    core.settle(item, (into,), table)
    for held in moved:
        core.hold(into, held)
    for other, cost, held in others:
        if other == into:
            continue
        core.add_edge(into, other, core.taken(cost, table))
        if held:
            core.hold_on_edge(into, other, each(held, lambda nbytes: core.taken(nbytes, table)).items())
    core.touch(into)
