"""However coarse: what is drawn of a stream adds up to what the timeline says of it, and nothing lies elsewhere."""

from dataclasses import replace
from math import fsum, isclose

import pytest

from autopar.page.blocks import Piece, blocks_of, merged
from autopar.simulate.timeline import timeline_of
from tests.simulate.plans import best, drawn

CASES = [("gpt2", (2, 2), 1, None), ("gpt2", (2, 2), 1, 2), ("cnn", (2,), 0, 1), ("block", (2, 2), 3, 1)]


@pytest.mark.parametrize("most", [10**9, 400, 60])
@pytest.mark.parametrize(("name", "sizes", "seed", "prefetch"), CASES)
def test_blocks_add_up_to_the_timeline(name, sizes, seed, prefetch, most):
    plan, pricer = drawn(name, sizes, seed)
    plan = replace(plan, prefetch=prefetch)
    timeline = timeline_of(plan, pricer, prefetch)
    blocks = blocks_of(timeline, plan, most)
    assert next(iter(blocks.streams)) == timeline.main
    for stream, busy in timeline.busy_s.items():
        ones = blocks.streams.get(stream, ())
        assert isclose(fsum(one.seconds for one in ones), busy, rel_tol=1e-9, abs_tol=1e-15)
        assert sum(one.count for one in ones) == sum(e.stream == stream and e.seconds > 0 for e in timeline.events)
    for stream, exposed in timeline.exposed_s.items():
        there = fsum(one.seconds for one in blocks.exposed.get(stream, ()))
        assert isclose(there, exposed, rel_tol=1e-9, abs_tol=1e-15)
    stands = fsum(bubble.end - bubble.begin for bubble in timeline.bubbles)
    assert isclose(fsum(one.seconds for one in blocks.waits), stands, rel_tol=1e-9, abs_tol=1e-15)
    every = [one for ones in (*blocks.streams.values(), blocks.waits, *blocks.exposed.values()) for one in ones]
    assert len(every) <= most and all(one.seconds <= blocks.grain for one in every if one.count > 1)
    assert blocks.grain == 0 or (most < 10**9 and len(timeline.events) > most / 2)


def test_no_event_stands_a_grain_from_its_place():
    pieces = [Piece(0.1 * n, 0.05, "x", f"event {n}") for n in range(100)]
    for grain in (0.0, 0.2, 0.5, 3.0):
        blocks = merged(pieces, grain)
        starts = [start for block in blocks for start in [block.begin] * block.count]
        assert all(0 <= piece.begin - start <= grain for piece, start in zip(pieces, starts, strict=True))
        assert len(blocks) <= 2 * 10 / grain + 1 if grain else len(blocks) == 100


def test_a_merged_block_tells_the_longest_of_it():
    pieces = [Piece(0.0, 1.0, "short", "a"), Piece(1.0, 3.0, "long", "b"), Piece(4.0, 1.0, "short", "c")]
    (block,) = merged(pieces, 5.0)
    assert (block.sort, block.told, block.count, block.seconds) == ("long", "b", 3, 5.0)


def test_where_nothing_waits_nothing_is_exposed():
    plan, pricer = best("mlp", (2,))
    timeline = timeline_of(plan, pricer, None)
    blocks = blocks_of(timeline, plan)
    assert bool(blocks.waits) == bool(timeline.bubbles)
