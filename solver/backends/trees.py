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

import numba
import numpy as np

from solver.backends.compiled import _KERNEL, Priced, price_in, unpriced
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


@numba.njit(**_KERNEL)
def _shift(sign, tree, size, new, inside, picks, first, other, of_item, links, spans, use):
    """Add (take back: sign -1) to `use` what the change from `picks` to `new` holds more."""
    item_spans, edge_spans, start, end, held, nbytes = spans
    for k in range(size):
        v = tree[k]
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
def _fits(tree, size, new, picks, other, of_item, links, spans, use, room):
    """Whether no position that a changed item or its edges hold is above its room."""
    item_spans, edge_spans, start, end, held, nbytes = spans
    for k in range(size):
        v = tree[k]
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


@numba.njit(**_KERNEL)
def _grow(root, wanted, state, other, of_item, links, inside, near, front, tree, up, touched):
    """An induced tree from `root`: its items, and for each the link to the one it hangs on; (items, items touched)."""
    size, waiting, seen = 0, 1, 0
    front[0] = root
    while waiting > 0 and size < wanted:
        r = min(int(_random(state) * waiting), waiting - 1)
        v = front[r]
        waiting -= 1
        front[r] = front[waiting]
        if size > 0 and near[v] != 1:
            continue
        up[size] = -1
        if size > 0:
            for position in range(of_item[v], of_item[v + 1]):
                if inside[other[links[position]]] >= 0:
                    up[size] = links[position]
                    break
        inside[v] = size
        tree[size] = v
        size += 1
        for position in range(of_item[v], of_item[v + 1]):
            w = other[links[position]]
            if near[w] == 0:
                touched[seen] = w
                seen += 1
            near[w] += 1
            if near[w] == 1 and inside[w] < 0:
                front[waiting] = w
                waiting += 1
    return size, seen


@numba.njit(**_KERNEL)
def _moves(seed, count, most, temperature, hard, graph, costs, priced, priced_at, spans, room, use, picks):
    """`count` tree moves; changes `picks` and `use`. `costs` and `priced` have memory priced in."""
    first, cost, pairs, at, other, of_item, links = graph
    items = len(first) - 1
    state = np.empty(1, np.uint64)
    state[0] = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    for _ in range(4):
        _random(state)
    widest = 0
    for u in range(items):
        widest = max(widest, first[u + 1] - first[u])
    inside = np.full(items, -1)
    near = np.zeros(items, np.int64)
    front, touched = np.empty(items + 1, np.int64), np.empty(items + 1, np.int64)
    tree, up, new = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    begin = np.empty(most + 1, np.int64)
    height = np.empty(most * widest)  # what an option costs with memory, noise and all below it
    plain = np.empty(most * widest)  # what an option costs with what lies outside the tree
    for _ in range(count):
        root = min(int(_random(state) * items), items - 1)
        wanted = min(most, int(math.exp(_random(state) * math.log(most))) + 1)
        if first[root + 1] - first[root] < 2:
            continue
        size, seen = _grow(root, wanted, state, other, of_item, links, inside, near, front, tree, up, touched)
        here, before = 0, 0.0
        for k in range(size):
            v = tree[k]
            n = first[v + 1] - first[v]
            begin[k] = here
            for i in range(n):
                plain[here + i] = cost[first[v] + i]
                height[here + i] = costs[first[v] + i]
            for position in range(of_item[v], of_item[v + 1]):
                link = links[position]
                w = other[link]
                if inside[w] < 0:
                    p, q = at[link ^ 1] + picks[w] * n, priced_at[link ^ 1] + picks[w] * n
                    for i in range(n):
                        plain[here + i] += pairs[p + i]
                        height[here + i] += priced[q + i]
            before += plain[here + picks[v]]
            if k > 0:
                before += pairs[at[up[k] ^ 1] + picks[other[up[k]]] * n + picks[v]]
            if temperature > 0:
                for i in range(n):
                    height[here + i] -= temperature * math.log(_random(state))
            here += n
        begin[size] = here
        for k in range(size - 1, 0, -1):
            n = begin[k + 1] - begin[k]
            above = inside[other[up[k]]]
            q = priced_at[up[k] ^ 1]
            for j in range(begin[above + 1] - begin[above]):
                least = np.inf
                for i in range(n):
                    least = min(least, height[begin[k] + i] + priced[q + j * n + i])
                height[begin[above] + j] += least
        after, changed = 0.0, False
        for k in range(size):
            n = begin[k + 1] - begin[k]
            p = at[up[k] ^ 1] + new[inside[other[up[k]]]] * n if k > 0 else 0
            q = priced_at[up[k] ^ 1] + new[inside[other[up[k]]]] * n if k > 0 else 0
            best, least = 0, np.inf
            for i in range(n):
                value = height[begin[k] + i] + (priced[q + i] if k > 0 else 0.0)
                if value < least:
                    best, least = i, value
            new[k] = best
            after += plain[begin[k] + best] + (pairs[p + best] if k > 0 else 0.0)
            changed |= best != picks[tree[k]]
        worse = -temperature * math.log(_random(state)) if temperature > 0 else 0.0
        if changed and after < np.inf and (not hard or after <= before + worse):
            _shift(1.0, tree, size, new, inside, picks, first, other, of_item, links, spans, use)
            if not hard or _fits(tree, size, new, picks, other, of_item, links, spans, use, room):
                for k in range(size):
                    picks[tree[k]] = new[k]
            else:
                _shift(-1.0, tree, size, new, inside, picks, first, other, of_item, links, spans, use)
        for k in range(size):
            inside[tree[k]] = -1
        for k in range(seen):
            near[touched[k]] = 0


class Forest:
    """Tree moves over one core. Holds no picks: several searches may use it, each in a thread of its own."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        f = flat
        self._graph = (f.first, f.cost, f.pairs, f.at, f.other, f.of_item, f.links)
        self.moves = max(20, math.ceil(8 * f.items / MOST_ITEMS))  # a round changes every item about twice

    def priced(self, price: Array) -> Priced:
        """Costs of all options and pairs with memory at these prices."""
        found = unpriced(self.flat)
        price_in(self.flat, price, found)
        return found

    def round(self, picks: Index, use: Array, priced: Priced, seed: int, temperature: float, hard: bool) -> None:
        """Some moves from `picks`, which hold `use`; both are changed in place."""
        f = self.flat
        _moves(seed, self.moves, MOST_ITEMS, temperature, hard, self._graph, *priced, f.spans, f.room, use, picks)
