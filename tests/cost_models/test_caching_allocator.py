"""The caching allocator: blocks, growth, and what a step's holds make of them."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from cost_models.caching_allocator import (
    LARGE,
    PAGE,
    ROUND,
    ROUND_LARGE,
    SMALL_PAGE,
    Segment,
    Segments,
    Stream,
    reserved_by,
)
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
    stream = Stream.of(expandable=True)
    stream.allocate(1)
    assert stream.reserved == SMALL_PAGE and isinstance(stream.small, Segment) and stream.small.end == ROUND
    stream.allocate(MIB + 1)
    assert (
        isinstance(stream.large, Segment) and stream.large.end == MIB + ROUND and stream.reserved == SMALL_PAGE + PAGE
    )


def test_gaps_between_values_that_stay_are_reserved_and_not_held() -> None:
    """Temporaries that grow with each operator never fit between the values that stay."""
    stays = [Hold(f"saved {i}", 20 * MIB, until=(5,)) for i in range(5)]
    events = [event(Hold(f"temporary {i}", (21 + i) * MIB), stays[i]) for i in range(5)] + [event()]
    held = 5 * 20 + 21 + 4  # at the last of them
    reserved = reserved_by(events, steps=1, expandable=True)["hbm"]
    assert reserved > held * MIB
    assert reserved_by(events, steps=4, expandable=True) == reserved_by(events, steps=3, expandable=True), (
        "steps that are alike reserve no more"
    )


def test_states_of_the_optimizer_come_at_the_end_of_the_first_step() -> None:
    """They take the room of activations, which is what makes the second step ask for more."""
    states = Hold("optimizer states of w", 40 * MIB, until=None, resident=True, at_first_update=True)
    weight = Hold("parameter w", 20 * MIB, until=None, resident=True)
    events = [event(weight, states, Hold("activations", 80 * MIB, until=(1,))), event()]
    assert (
        reserved_by(events, steps=1, expandable=True)["hbm"] == 140 * MIB
    )  # the activations are there until the step ends
    assert (
        reserved_by([event(weight, Hold("activations", 80 * MIB)), event(states)], steps=1, expandable=True)["hbm"]
        == 100 * MIB
    )
    assert (
        reserved_by([event(weight, Hold("activations", 80 * MIB)), event(states)], steps=2, expandable=True)["hbm"]
        == 140 * MIB
    )


# --- segments of their own size --------------------------------------------------------------------------------------


def test_a_request_has_a_segment_as_large_as_it_needs() -> None:
    for asked, taken in ((2 * MIB, PAGE), (LARGE - ROUND, PAGE), (LARGE, LARGE), (33 * MIB, 34 * MIB)):
        segments = Segments(is_small=False)
        segments.allocate(asked)
        assert segments.mapped == taken and segments.mapped % ROUND_LARGE == 0
    small = Segments(is_small=True)
    for _ in range(4):
        small.allocate(MIB)
    assert small.mapped == 2 * SMALL_PAGE


def test_what_is_left_of_a_block_is_a_block_if_it_is_worth_one() -> None:
    segments = Segments(is_small=False)
    first = segments.allocate(13 * MIB)  # of 14, where 1 MiB is left: wasted
    assert segments.free == {} and segments.mapped == 14 * MIB
    segments.release(first, 13 * MIB)
    assert segments.free == {(0, 0): 14 * MIB}
    segments.allocate(4 * MIB)
    assert segments.free == {(0, 4 * MIB): 10 * MIB}


def test_blocks_of_two_segments_never_become_one() -> None:
    segments = Segments(is_small=False)
    one, other = segments.allocate(12 * MIB), segments.allocate(12 * MIB)
    for block in (one, other):
        segments.release(block, 12 * MIB)
    segments.allocate(20 * MIB)
    assert segments.mapped == 44 * MIB, "24 MiB were free, in two places"


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("is_small", [False, True])
def test_segments_lose_nothing_and_take_the_least_that_fits(seed: int, is_small: bool) -> None:
    drawn, segments = random.Random(seed), Segments(is_small)
    live: list[tuple[int, int]] = []
    for _ in range(400):
        if live and drawn.random() < 0.48:
            segments.release(*live.pop(drawn.randrange(len(live))))
        else:
            nbytes = ROUND * drawn.randint(1, 2048 if is_small else 60000)
            fitting, before = [size for size in segments.free.values() if size >= nbytes], segments.mapped
            live.append((segments.allocate(nbytes), nbytes))
            assert (segments.mapped == before) == bool(fitting)
            if fitting:
                assert min(fitting) - nbytes <= max(segments.taken[live[-1][0]][2], min(fitting))
        taken = [(segment, place, size) for segment, place, size in segments.taken.values()]
        free = [(segment, place, size) for (segment, place), size in segments.free.items()]
        blocks = sorted([*taken, *free])
        assert sum(size for *_, size in blocks) == segments.mapped
        for (segment, place, size), (after, behind, _) in pairwise(blocks):
            assert (place + size == behind) if after == segment else behind == 0
        assert all((segment, place + size) not in segments.free for segment, place, size in free), "neighbours"
    for block in live:
        segments.release(*block)
    assert sum(segments.free.values()) == segments.mapped and not segments.taken


def test_what_libraries_keep_is_reserved_besides() -> None:
    events = [event(Hold("value", 40 * MIB))]
    assert reserved_by(events)["hbm"] == 40 * MIB
    assert reserved_by(events, beside={"hbm": [32 * MIB, 32 * MIB]})["hbm"] == 104 * MIB


def test_what_begins_as_an_event_ends_takes_the_room_of_what_ended_with_it() -> None:
    """As a result of the next operator does, which is asked for once the operands of the last one are let go."""
    first, behind = Hold("first", 40 * MIB), Hold("next", 40 * MIB, since=0, until=(1,))
    assert reserved_by([event(first), event(behind)])["hbm"] == 40 * MIB
    assert reserved_by([event(first, behind), event()])["hbm"] == 40 * MIB
    beside = Hold("beside", 40 * MIB, until=(1,))
    assert reserved_by([event(first, beside), event()])["hbm"] == 80 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_what_has_no_bytes_reserves_none(seed: int, expandable: bool) -> None:
    """As the states and temporaries of an optimizer that has none."""
    drawn = random.Random(seed)

    def hold(nbytes: int, number: int) -> Hold:
        return Hold("a", nbytes, until=(min(39, number + drawn.randrange(6)),))

    def empty(beside: Hold) -> Hold:
        return replace(beside, nbytes=0)

    real = [[hold(drawn.randrange(1, 4 * MIB), number) for _ in range(drawn.randrange(4))] for number in range(40)]
    padded = [[one for some in zip(holds, map(empty, holds), strict=True) for one in some] for holds in real]
    bare, beside = (reserved_by([*(event(*some) for some in holds)], expandable=expandable) for holds in (real, padded))
    assert bare == beside
