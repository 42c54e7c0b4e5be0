# pyright: basic
"""Moves that change many items at once: a random tree of items gets its cheapest options, all others held fixed.

An induced tree around a random item (no edges but its own between its items) is solved exactly by dynamic programming,
given what all other items pick, as in "tree block coordinate descent" (Hamze and de Freitas, "From fields to trees",
2004; Sontag and Jaakkola 2009). Memory is priced; noise in the costs (an exponential variate times the temperature for
every option) makes it a random sample instead ("perturb and MAP", Papandreou and Yuille, 2011), and annealing lowers
the temperature. With `hard` a move counts only if everything still fits, however memory is priced.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
import numpy as np

from solver.backends.compiled import _KERNEL, _PART, Priced, price_in, unpriced, widest
from solver.backends.flat import Flat, Index
from solver.problem import Array

MOST_ITEMS = 200  # of a tree


@numba.njit(**_KERNEL)
def _random(state):
    """The next number above 0 and at most 1 (xorshift64*, Vigna 2016)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return (np.float64((x * np.uint64(2685821657736338717)) >> np.uint64(11)) + 1.0) / 9007199254740992.0


class _Tree(NamedTuple):
    """Arrays for one tree after the other: its `size` items k with the root first, each behind the one it hangs on."""

    item: Index
    up: Index  # link from item k to the one that it hangs on; -1: the root
    new: Index  # what item k is to pick
    begin: Index  # options of item k: begin[k] <= o < begin[k + 1] in the next two
    height: Array  # what an option costs with memory, noise and all below it
    plain: Array  # what an option costs with what lies outside the tree
    inside: Index  # of every item of the core: its number in the tree, or -1
    near: Index  # of every item of the core: how many links it has to the tree
    front: Index  # items that may come next
    touched: Index  # items that `near` counts


@numba.njit(**_KERNEL)
def _no_tree(items, most, widest):
    """Room for trees of up to `most` items with up to `widest` options, in a core of `items`."""
    return _Tree(
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most + 1, np.int64),
        np.empty(most * widest),
        np.empty(most * widest),
        np.full(items, -1),
        np.zeros(items, np.int64),
        np.empty(items + 1, np.int64),
        np.empty(items + 1, np.int64),
    )


@numba.njit(**_KERNEL)
def _shift(sign, size, tree, graph, spans, picks, use):
    """Add (take back: sign -1) to `use` what the change from `picks` to what the tree picks holds more."""
    first, other, _, of_item, links = graph
    item_spans, edge_spans, start, end, held, nbytes = spans
    item, new, inside = tree.item, tree.new, tree.inside
    for k in range(size):
        v = item[k]
        if new[k] == picks[v]:
            continue
        for s in range(item_spans[v], item_spans[v + 1]):
            more = sign * (nbytes[held[s] + new[k]] - nbytes[held[s] + picks[v]])
            if more != 0.0:
                for t in range(start[s], end[s]):
                    use[t] += more
        for position in range(of_item[v], of_item[v + 1]):
            link = links[position]
            e = link >> 1
            if edge_spans[e] == edge_spans[e + 1]:
                continue
            w = other[link]
            after = picks[w]
            if inside[w] >= 0 and new[inside[w]] != picks[w]:
                if w < v:
                    continue  # seen from there
                after = new[inside[w]]
            if link & 1:
                n = first[v + 1] - first[v]
                old, now = picks[w] * n + picks[v], after * n + new[k]
            else:
                n = first[w + 1] - first[w]
                old, now = picks[v] * n + picks[w], new[k] * n + after
            for s in range(edge_spans[e], edge_spans[e + 1]):
                more = sign * (nbytes[held[s] + now] - nbytes[held[s] + old])
                if more != 0.0:
                    for t in range(start[s], end[s]):
                        use[t] += more


@numba.njit(**_KERNEL)
def _fits(size, tree, graph, spans, room, picks, use):
    """Whether no position that a changed item or its edges hold is above its room."""
    _, _, _, of_item, links = graph
    item, new = tree.item, tree.new
    item_spans, edge_spans, start, end, held, nbytes = spans
    for k in range(size):
        v = item[k]
        if new[k] == picks[v]:
            continue
        for s in range(item_spans[v], item_spans[v + 1]):
            if nbytes[held[s] + new[k]] > nbytes[held[s] + picks[v]]:
                for t in range(start[s], end[s]):
                    if use[t] > room[t]:
                        return False
        for position in range(of_item[v], of_item[v + 1]):
            e = links[position] >> 1
            for s in range(edge_spans[e], edge_spans[e + 1]):
                for t in range(start[s], end[s]):
                    if use[t] > room[t]:
                        return False
    return True


@numba.njit(**_PART)
def _grow(root, wanted, state, graph, tree):
    """An induced tree from `root`: its items, and for each the link to the one it hangs on; (items, items touched)."""
    _, other, _, of_item, links = graph
    inside, near, front = tree.inside, tree.near, tree.front
    size, waiting, seen = 0, 1, 0
    front[0] = root
    while waiting > 0 and size < wanted:
        r = min(int(_random(state) * waiting), waiting - 1)
        v = front[r]
        waiting -= 1
        front[r] = front[waiting]
        if size > 0 and near[v] != 1:
            continue
        tree.up[size] = -1
        if size > 0:
            for position in range(of_item[v], of_item[v + 1]):
                if inside[other[links[position]]] >= 0:
                    tree.up[size] = links[position]
                    break
        inside[v] = size
        tree.item[size] = v
        size += 1
        for position in range(of_item[v], of_item[v + 1]):
            w = other[links[position]]
            if near[w] == 0:
                tree.touched[seen] = w
                seen += 1
            near[w] += 1
            if near[w] == 1 and inside[w] < 0:
                front[waiting] = w
                waiting += 1
    return size, seen


@numba.njit(**_PART)
def _weigh(size, tree, graph, unpriced, priced, temperature, state, picks):
    """What every option of the tree costs, all else as picked, with and without memory; and what its picks cost now."""
    first, other, _, of_item, links = graph
    item, up, _, begin, height, plain, inside, _, _, _ = tree
    cost, pairs, at = unpriced
    priced_cost, priced_pairs, priced_at = priced
    here, before = 0, 0.0
    for k in range(size):
        v = item[k]
        n = first[v + 1] - first[v]
        begin[k] = here
        for i in range(n):
            plain[here + i] = cost[first[v] + i]
            height[here + i] = priced_cost[first[v] + i]
        for position in range(of_item[v], of_item[v + 1]):
            link = links[position]
            w = other[link]
            if inside[w] < 0:
                p, q = at[link ^ 1] + picks[w] * n, priced_at[link ^ 1] + picks[w] * n
                for i in range(n):
                    plain[here + i] += pairs[p + i]
                    height[here + i] += priced_pairs[q + i]
        before += plain[here + picks[v]]
        if k > 0:
            before += pairs[at[up[k] ^ 1] + picks[other[up[k]]] * n + picks[v]]
        if temperature > 0:
            for i in range(n):
                height[here + i] -= temperature * math.log(_random(state))
        here += n
    begin[size] = here
    return before


@numba.njit(**_KERNEL)
def _rise(size, tree, other, priced):
    """Add to each option what the cheapest options of all below it cost, from the leaves up."""
    _, up, _, begin, height, _, inside, _, _, _ = tree
    _, pairs, at = priced
    for k in range(size - 1, 0, -1):
        n = begin[k + 1] - begin[k]
        above = inside[other[up[k]]]
        q = at[up[k] ^ 1]
        for j in range(begin[above + 1] - begin[above]):
            least = np.inf
            for i in range(n):
                least = min(least, height[begin[k] + i] + pairs[q + j * n + i])
            height[begin[above] + j] += least


@numba.njit(**_PART)
def _choose(size, tree, other, unpriced, priced, picks):
    """Let every item of the tree pick its cheapest option, root first; what they cost, and if any is another one."""
    item, up, new, begin, height, plain, inside, _, _, _ = tree
    _, pairs, at = unpriced
    _, priced_pairs, priced_at = priced
    after, changed = 0.0, False
    for k in range(size):
        n = begin[k + 1] - begin[k]
        p = at[up[k] ^ 1] + new[inside[other[up[k]]]] * n if k > 0 else 0
        q = priced_at[up[k] ^ 1] + new[inside[other[up[k]]]] * n if k > 0 else 0
        best, least = 0, np.inf
        for i in range(n):
            value = height[begin[k] + i] + (priced_pairs[q + i] if k > 0 else 0.0)
            if value < least:
                best, least = i, value
        new[k] = best
        after += plain[begin[k] + best] + (pairs[p + best] if k > 0 else 0.0)
        changed |= best != picks[item[k]]
    return after, changed


@numba.njit(**_KERNEL)
def _moves(seed, count, most, temperature, hard, graph, unpriced, priced, spans, room, use, picks):
    """`count` tree moves; changes `picks` and `use`."""
    first, other, _, _, _ = graph
    items = len(first) - 1
    state = np.empty(1, np.uint64)
    state[0] = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    for _ in range(4):
        _random(state)
    tree = _no_tree(items, most, widest(first))
    for _ in range(count):
        root = min(int(_random(state) * items), items - 1)
        wanted = min(most, int(math.exp(_random(state) * math.log(most))) + 1)
        if first[root + 1] - first[root] < 2:
            continue
        size, seen = _grow(root, wanted, state, graph, tree)
        before = _weigh(size, tree, graph, unpriced, priced, temperature, state, picks)
        _rise(size, tree, other, priced)
        after, changed = _choose(size, tree, other, unpriced, priced, picks)
        worse = -temperature * math.log(_random(state)) if temperature > 0 else 0.0
        if changed and after < np.inf and (not hard or after <= before + worse):
            _shift(1.0, size, tree, graph, spans, picks, use)
            if not hard or _fits(size, tree, graph, spans, room, picks, use):
                for k in range(size):
                    picks[tree.item[k]] = tree.new[k]
            else:
                _shift(-1.0, size, tree, graph, spans, picks, use)
        for k in range(size):
            tree.inside[tree.item[k]] = -1
        for k in range(seen):
            tree.near[tree.touched[k]] = 0


class Forest:
    """Tree moves over one core. Holds no picks: several searches may use it, each in a thread of its own."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self._graph = flat.graph
        self._unpriced = (flat.cost, flat.pairs, flat.at)
        self.moves = max(20, math.ceil(8 * flat.items / MOST_ITEMS))  # a round changes every item about twice

    def priced(self, price: Array) -> Priced:
        """Costs of all options and pairs with memory at these prices."""
        found = unpriced(self.flat)
        price_in(self.flat, price, found)
        return found

    def round(self, picks: Index, use: Array, priced: Priced, seed: int, temperature: float, hard: bool) -> None:
        """Some moves from `picks`, which hold `use`; both are changed in place."""
        costs = self._unpriced, tuple(priced)
        memory = self.flat.spans, self.flat.room
        _moves(seed, self.moves, MOST_ITEMS, temperature, hard, self._graph, *costs, *memory, use, picks)
