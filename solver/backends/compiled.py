# pyright: basic
"""The inner loops over a core's pairs, compiled by numba; the arrays are those of flat.py.

The functions at the end take them from a `Flat`.

Measured on the contest's K, M and S: 3 to 8 ms per sweep over 1 to 3 million pairs, 300 to 500 ms with numpy per item.
Minima may be vectorised; sums keep their order, so that every machine gets the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from solver.backends.flat import Flat, Index
from solver.problem import Array

_KERNEL = {"cache": True, "nogil": True, "error_model": "numpy", "fastmath": {"nnan", "nsz"}}
# A part of a kernel, called once per item or edge: numba puts it where it is called. As a call of its own it would cost
# a tenth to a half of a sweep, as none of what the kernel has in registers goes along.
_PART = {**_KERNEL, "inline": "always"}


class Priced(NamedTuple):
    """Costs of all options and pairs with memory at some prices; those of link l lie in `pairs` from at[l] on."""

    costs: Array
    pairs: Array
    at: Index


@numba.njit(**_KERNEL)
def widest(first):
    """The most options that an item has."""
    most = 0
    for u in range(len(first) - 1):
        most = max(most, first[u + 1] - first[u])
    return most


@numba.njit(**_KERNEL)
def sweep(forth, graph, priced, weight, messages, picks):
    """One pass of TRW-S in (reverse) order of items: changes `messages` and `picks`, returns the bound."""
    first, other, message, of_item, links = graph
    _, pairs, at = priced
    items = len(first) - 1
    most = widest(first)
    total = np.empty(most)
    choice = np.empty(most)
    bound = 0.0
    for k in range(items):
        u = k if forth else items - 1 - k
        n = first[u + 1] - first[u]
        _collect(u, forth, graph, priced, messages, picks, total, choice)
        best = 0
        least = total[0]
        for i in range(1, n):
            least = min(least, total[i])
            if choice[i] < choice[best]:
                best = i
        picks[u] = best
        bound += least
        for i in range(n):
            total[i] = (total[i] - least) * weight[u]
        for position in range(of_item[u], of_item[u + 1]):
            link = links[position]
            v = other[link]
            if (v > u) == forth:
                size = first[v + 1] - first[v]
                bound += _send(total, n, pairs, at[link], size, messages, message[link], message[link ^ 1])
    return bound


@numba.njit(**_PART)
def _collect(u, forth, graph, priced, messages, picks, total, choice):
    """What each option of `u` costs: by all messages (`total`), and given the picks made so far (`choice`)."""
    first, other, message, of_item, links = graph
    cost, pairs, at = priced
    a = first[u]
    n = first[u + 1] - a
    for i in range(n):
        total[i] = cost[a + i]
        choice[i] = cost[a + i]
    for position in range(of_item[u], of_item[u + 1]):
        link = links[position]
        v = other[link]
        m = message[link]
        if (v > u) == forth:
            for i in range(n):
                total[i] += messages[m + i]
                choice[i] += messages[m + i]
        else:
            p = at[link ^ 1] + picks[v] * n
            for i in range(n):
                total[i] += messages[m + i]
                choice[i] += pairs[p + i]


@numba.njit(**_PART)
def _send(total, n, pairs, p, size, messages, m, o):
    """Change the message that begins at `o`, given the one at `m` that came back; its least, which is taken out of it.

    The sender's `n` options have this share in `total`, the pairs of both begin at `p`, `size` of them to an option.
    """
    for j in range(size):
        messages[o + j] = np.inf
    for i in range(n):
        offset = total[i] - messages[m + i]
        row = p + i * size
        for j in range(size):
            messages[o + j] = min(messages[o + j], pairs[row + j] + offset)
    least = messages[o]
    for j in range(1, size):
        least = min(least, messages[o + j])
    for j in range(size):
        messages[o + j] -= least
    return least


@numba.njit(**_KERNEL)
def reduced(forth, graph, priced, weight, messages):
    """By how much picks with each option exceed the bound of the sweep just made, at least."""
    first, other, message, of_item, links = graph
    cost, pairs, at = priced
    items = len(first) - 1
    found = np.empty(first[items])
    most = widest(first)
    total = np.empty(most)
    rows = np.empty(most)
    for u in range(items):
        a = first[u]
        n = first[u + 1] - a
        ahead = 0
        for i in range(n):
            total[i] = cost[a + i]
        for position in range(of_item[u], of_item[u + 1]):
            link = links[position]
            m = message[link]
            if (other[link] > u) == forth:
                ahead += 1
            for i in range(n):
                total[i] += messages[m + i]
        least = total[0]
        for i in range(1, n):
            least = min(least, total[i])
        for i in range(n):
            total[i] -= least
            found[a + i] = total[i] * (1 - weight[u] * ahead)
        for position in range(of_item[u], of_item[u + 1]):
            link = links[position]
            v = other[link]
            if (v > u) != forth:
                continue
            size = first[v + 1] - first[v]
            o = message[link ^ 1]
            least = np.inf
            for i in range(n):
                row = at[link] + i * size
                smallest = np.inf
                for j in range(size):
                    smallest = min(smallest, pairs[row + j] - messages[o + j])
                rows[i] = smallest + total[i] * weight[u] - messages[message[link] + i]
                least = min(least, rows[i])
            for i in range(n):
                found[a + i] += rows[i] - least
    return found


@numba.njit(**_KERNEL)
def _cost_of(picks, first, cost, pairs, at, own, other):
    total = 0.0
    for u in range(len(first) - 1):
        total += cost[first[u] + picks[u]]
    for link in range(0, len(own), 2):
        v = other[link]
        total += pairs[at[link] + picks[own[link]] * (first[v + 1] - first[v]) + picks[v]]
    return total


@numba.njit(**_KERNEL)
def _use_of(picks, first, own, other, spans, size):
    item_spans, edge_spans, start, end, held, nbytes = spans
    change = np.zeros(size + 1)
    for u in range(len(first) - 1):
        for s in range(item_spans[u], item_spans[u + 1]):
            amount = nbytes[held[s] + picks[u]]
            change[start[s]] += amount
            change[end[s]] -= amount
    for e in range(len(edge_spans) - 1):
        v = other[2 * e]
        pair = picks[own[2 * e]] * (first[v + 1] - first[v]) + picks[v]
        for s in range(edge_spans[e], edge_spans[e + 1]):
            amount = nbytes[held[s] + pair]
            change[start[s]] += amount
            change[end[s]] -= amount
    return np.cumsum(change)[:size]


@numba.njit(**_KERNEL)
def _price_in(price, first, plain, own, other, spans, priced_at, into):
    cost, _, at = plain
    costs, _, where = into
    _, edge_spans, start, end, _, _ = spans
    rising = np.zeros(len(price) + 1)
    for k in range(len(price)):
        rising[k + 1] = rising[k] + price[k]
    _price_options(rising, first, cost, spans, costs)
    for e in range(len(edge_spans) - 1):
        if edge_spans[e] == edge_spans[e + 1]:
            continue
        where[2 * e], where[2 * e + 1] = at[2 * e], at[2 * e + 1]
        most = 0.0
        for s in range(edge_spans[e], edge_spans[e + 1]):
            most = max(most, rising[end[s]] - rising[start[s]])
        if most <= 0:
            continue
        where[2 * e], where[2 * e + 1] = priced_at[2 * e], priced_at[2 * e + 1]
        u, v = own[2 * e], other[2 * e]
        _price_pairs(e, first[u + 1] - first[u], first[v + 1] - first[v], rising, plain, spans, into)


@numba.njit(**_PART)
def _price_options(rising, first, cost, spans, costs):
    """Options with what they hold at prices that add up to `rising`, from the first position on."""
    item_spans, _, start, end, held, nbytes = spans
    for k in range(len(cost)):
        costs[k] = cost[k]
    for u in range(len(first) - 1):
        n = first[u + 1] - first[u]
        for s in range(item_spans[u], item_spans[u + 1]):
            rate = rising[end[s]] - rising[start[s]]
            if rate > 0:
                for i in range(n):
                    costs[first[u] + i] += rate * nbytes[held[s] + i]


@numba.njit(**_PART)
def _price_pairs(e, n, m, rising, plain, spans, into):
    """The n x m pairs of an edge with what they hold, seen from both ends."""
    _, edge_spans, start, end, held, nbytes = spans
    _, pairs, at = plain
    _, priced, where = into
    here, there, back = at[2 * e], where[2 * e], where[2 * e + 1]
    for k in range(n * m):
        priced[there + k] = pairs[here + k]
    for s in range(edge_spans[e], edge_spans[e + 1]):
        rate = rising[end[s]] - rising[start[s]]
        if rate > 0:
            for k in range(n * m):
                priced[there + k] += rate * nbytes[held[s] + k]
    for i in range(n):
        for j in range(m):
            priced[back + j * n + i] = priced[there + i * m + j]


def cost_of(flat: Flat, picks: Index) -> float:
    """What the picks cost, memory for nothing; inf if one is forbidden."""
    return float(_cost_of(picks, flat.first, flat.cost, flat.pairs, flat.at, flat.own, flat.other))


def use_of(flat: Flat, picks: Index) -> Array:
    """Bytes above the certain ones at every position."""
    return _use_of(picks, flat.first, flat.own, flat.other, flat.spans, len(flat.room))


def unpriced(flat: Flat) -> Priced:
    """Where memory costs nothing."""
    pairs = np.empty(flat.priced)
    pairs[: len(flat.pairs)] = flat.pairs
    return Priced(flat.cost.copy(), pairs, flat.at.copy())


def price_in(flat: Flat, price: Array, into: Priced) -> None:
    """Let `into` tell cost + price x bytes of every option and pair, with one price per position."""
    plain = flat.cost, flat.pairs, flat.at
    _price_in(price, flat.first, plain, flat.own, flat.other, flat.spans, flat.priced_at, tuple(into))
