"""Belady's count against two yardsticks that share nothing with it: all caches tried, and a linear program."""

import random
from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import linprog

from autopar.search.elixir import move_count

CASES = 500


def random_trace(seed):
    draw = random.Random(seed)
    blocks, chunks = draw.randint(1, 4), draw.randint(1, 6)
    steps = [draw.sample(range(chunks), draw.randint(1, min(blocks, chunks, 3))) for _ in range(draw.randint(1, 10))]
    return steps, blocks


def fewest_loads(steps, blocks):
    """Every set of chunks that may stay is tried at every step: the least number of loads that reaches each set."""
    loads_of = {frozenset(): 0}
    for step in map(frozenset, steps):
        after = {}
        for cached, loads in loads_of.items():
            others = sorted(cached - step)
            for kept in range(min(len(others), blocks - len(step)) + 1):
                for stay in combinations(others, kept):
                    now = step | set(stay)
                    after[now] = min(after.get(now, 10**9), loads + len(step - cached))
        loads_of = after
    return min(loads_of.values())


def intervals_lp(steps, blocks):
    """(loads, x): x = 1 for each pause between two uses of a chunk during which it stays, saving one load.

    At every step, pauses that span it have the blocks that its own chunks leave. Each pause covers consecutive steps,
    so the matrix is totally unimodular and a vertex is integral.
    """
    pauses, last = [], {}
    for number, step in enumerate(steps):
        pauses += [(last[chunk], number) for chunk in step if chunk in last]
        last |= dict.fromkeys(step, number)
    uses = sum(map(len, steps))
    if not pauses:
        return uses, np.zeros(0)
    spans = [[float(start < number < end) for start, end in pauses] for number in range(len(steps))]
    free = [blocks - len(step) for step in steps]
    found = linprog([-1.0] * len(pauses), A_ub=spans, b_ub=free, bounds=(0, 1), method="highs-ds")
    return uses + found.fun, found.x


def test_the_original_unit_case():
    assert move_count([[0], [1, 2], [3], [3], [1, 2], [0]], 2) == 12


def test_moves_are_twice_the_fewest_loads():
    for seed in range(CASES):
        steps, blocks = random_trace(seed)
        assert move_count(steps, blocks) == 2 * fewest_loads(steps, blocks), (steps, blocks)


def test_moves_are_twice_the_optimum_of_an_integral_linear_program():
    for seed in range(CASES):
        steps, blocks = random_trace(seed)
        loads, kept = intervals_lp(steps, blocks)
        assert move_count(steps, blocks) == pytest.approx(2 * loads, abs=1e-6), (steps, blocks)
        assert np.allclose(kept, np.round(kept), atol=1e-6), (steps, blocks)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 7])
def test_a_chain_of_layers_moves_what_blocks_do_not_hold(layers, recompute):
    down = [[layer] for layer in reversed(range(layers)) for _ in range(1 + recompute)]
    for blocks in range(1, layers + 1):
        assert move_count([[layer] for layer in range(layers)] + down, blocks) == 2 * (2 * layers - blocks)


def test_with_a_block_for_each_every_chunk_moves_twice():
    assert move_count([[0, 1], [2], [0], [2, 1]], 3) == 6


def test_nothing_used_is_nothing_moved():
    assert move_count([], 0) == move_count([[], []], 0) == 0


def test_a_chunk_named_twice_in_a_step_counts_once():
    assert move_count([[0, 0], [1], [0]], 1) == 6


def test_a_step_too_wide_is_refused():
    with pytest.raises(ValueError, match=r"step 1 uses 3 chunks at once, but there are 2 blocks"):
        move_count([[0], [0, 1, 2]], 2)
