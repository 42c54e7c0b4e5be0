"""The caching allocator of the replays: blocks, growth, and what a step's holds make of them."""

import random
from itertools import pairwise

import pytest

from benchmarks.replay.allocator import PAGE, ROUND, SMALL_PAGE, Segment, Stream, reserved_by
from cost_models.simulator import COMPUTE, Event, Hold

MIB = 1 << 20


def event(*holds: Hold) -> Event:
    return Event("event", COMPUTE, 1.0, (), holds)


def test_a_request_takes_the_smallest_free_block_and_the_end_last() -> None:
    segment = Segment(PAGE)
    large, wall, small, other = (segment.allocate(size * MIB) for size in (30, 2, 10, 2))
    assert (large, wall, small, other) == (0, 30 * MIB, 32 * MIB, 42 * MIB)
    segment.release(large, 30 * MIB)
    segment.release(small, 10 * MIB)
    assert segment.allocate(8 * MIB) == 32 * MIB  # of 10 and 30, and the end
    assert segment.allocate(3 * MIB) == 0  # 2 are left of the 10
    assert segment.allocate(28 * MIB) == 44 * MIB  # 27 are left of the 30: the segment grows
    assert segment.end == 72 * MIB and segment.mapped == 80 * MIB


def test_the_end_grows_from_the_free_block_that_stands_there() -> None:
    segment = Segment(PAGE)
    first, last = segment.allocate(5 * MIB), segment.allocate(7 * MIB)
    segment.release(last, 7 * MIB)
    assert segment.allocate(9 * MIB) == last and segment.end == 14 * MIB
    segment.release(last, 9 * MIB)
    segment.release(first, 5 * MIB)
    assert segment.free == {0: 14 * MIB}


@pytest.mark.parametrize("seed", range(20))
def test_blocks_never_overlap_and_nothing_is_lost(seed: int) -> None:
    """Against a list of who lies where, kept beside it."""
    drawn, segment = random.Random(seed), Segment(PAGE)
    live: list[tuple[int, int]] = []
    most = 0
    for _ in range(400):
        if live and drawn.random() < 0.48:
            segment.release(*live.pop(drawn.randrange(len(live))))
        else:
            nbytes = ROUND * drawn.randint(1, 1 << drawn.randint(1, 14))
            fitting = [size for at, size in segment.free.items() if size >= nbytes and at + size < segment.end]
            before = segment.end
            live.append((segment.allocate(nbytes), nbytes))
            assert not fitting or segment.end == before, "it grew though a block was free"
        most = max(most, sum(nbytes for _, nbytes in live))
        blocks = sorted([*live, *segment.free.items()])
        places = [at for at, _ in blocks] + [segment.end]
        assert [at + nbytes for at, nbytes in blocks] == places[1:] and places[0] == 0
        free = sorted(segment.free)
        assert all(at + segment.free[at] < after for at, after in pairwise(free)), "neighbours"
    assert segment.end >= most and segment.mapped % PAGE == 0 and 0 <= segment.mapped - segment.end < PAGE


def test_small_requests_have_a_segment_of_their_own() -> None:
    stream = Stream()
    stream.allocate(1)
    assert stream.reserved == SMALL_PAGE and stream.small.end == ROUND
    stream.allocate(MIB + 1)
    assert stream.large.end == MIB + ROUND and stream.reserved == SMALL_PAGE + PAGE


def test_gaps_between_values_that_stay_are_reserved_and_not_held() -> None:
    """Temporaries that grow with each operator never fit between the values that stay."""
    stays = [Hold(f"saved {i}", 20 * MIB, until=(5,)) for i in range(5)]
    events = [event(Hold(f"temporary {i}", (21 + i) * MIB), stays[i]) for i in range(5)] + [event()]
    held = 5 * 20 + 21 + 4  # at the last of them
    reserved = reserved_by(events, steps=1)["hbm"]
    assert reserved > held * MIB
    assert reserved_by(events, steps=4) == reserved_by(events, steps=3), "steps that are alike reserve no more"


def test_states_of_the_optimizer_come_at_the_end_of_the_first_step() -> None:
    """They take the room of activations, which is what makes the second step ask for more."""
    states = Hold("optimizer states of w", 40 * MIB, until=None, resident=True)
    weight = Hold("parameter w", 20 * MIB, until=None, resident=True)
    events = [event(weight, states, Hold("activations", 80 * MIB, until=(1,))), event()]
    assert reserved_by(events, steps=1)["hbm"] == 140 * MIB  # the activations are there until the step ends
    assert reserved_by([event(weight, Hold("activations", 80 * MIB)), event(states)], steps=1)["hbm"] == 100 * MIB
    assert reserved_by([event(weight, Hold("activations", 80 * MIB)), event(states)], steps=2)["hbm"] == 140 * MIB
