"""Laws of the simulator, and random schedules beside a slow simulator that is obviously right.

Durations are whole seconds, so that sums are exact and `==` is meant.
"""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from cost_models.simulator import COMPUTE, Event, Hold, Timeline, play
from tests.simulate.reference import STREAMS, random_events, watch

SEEDS = range(150)


def level_at(timeline: Timeline, tier: str, instant: float) -> int:
    memory = timeline.memory[tier]
    return [level for since, level in zip(memory.times, memory.levels, strict=True) if since <= instant][-1]


def longest_chain(events: list[Event]) -> float:
    length: list[float] = []
    for event in events:
        length.append(event.seconds + max((length[other] for other in event.after), default=0.0))
    return max(length)


# --- by hand -------------------------------------------------------------------------------------------------------


def test_nothing_takes_no_time():
    timeline = play([])
    assert timeline.seconds == 0 and not timeline.memory and not timeline.busy_s


def test_three_layers_whose_weights_are_gathered_one_layer_ahead():
    """Gathers take 2 s, layers 3 s: only the first gather is waited for. 2 + 3 * 3 = 11."""
    gather = "comm:data"
    events = [
        Event("gather 0", gather, 2),
        Event("gather 1", gather, 2),  # launched ahead of layer 0
        Event("layer 0", COMPUTE, 3, (0,)),
        Event("gather 2", gather, 2),
        Event("layer 1", COMPUTE, 3, (1,)),
        Event("layer 2", COMPUTE, 3, (3,)),
    ]
    timeline = play(events)
    assert timeline.seconds == 11
    assert timeline.starts == (0, 2, 2, 4, 5, 8)
    assert timeline.exposed_s == {gather: 2} and timeline.exposed_of == (2, 0, 0, 0, 0, 0)
    assert [(b.begin, b.end, b.waiting, b.behind) for b in timeline.bubbles] == [(0, 2, 2, 0)]
    assert timeline.utilisation == {gather: 6 / 11, COMPUTE: 9 / 11} and timeline.idle_s == {gather: 5, COMPUTE: 2}


def test_a_wait_is_charged_to_whoever_fills_it():
    """Compute waits from 1 to 8 for `b`, which itself waited for `a`: 4 s of `a` and 3 s of `b` are exposed."""
    events = [
        Event("start", COMPUTE, 1),
        Event("a", "comm:data", 5),
        Event("b", "comm:tensor", 3, (1,)),
        Event("end", COMPUTE, 2, (2,)),
        Event("late", "h2d", 4, (3,)),
    ]
    timeline = play(events)
    assert timeline.exposed_s == {"comm:data": 4, "comm:tensor": 3, "h2d": 4}
    assert [bubble.waiting for bubble in timeline.bubbles] == [3, -1]


def test_memory_is_held_from_allocation_to_the_end_of_the_last_reader():
    events = [
        Event("make", COMPUTE, 2, holds=(Hold("weights", 100, resident=True), Hold("x", 10, until=(1, 2)))),
        Event("send", "comm:data", 5, (0,), (Hold("buffer", 7),)),
        Event("read", COMPUTE, 1, (0,), (Hold("y", 1, until=None), Hold("pinned", 3, "host"))),
        Event("queued", "comm:data", 1, (0,), (Hold("early", 20, since=0),)),
    ]
    timeline = play(events)
    memory = timeline.memory["hbm"]
    levels = [level_at(timeline, "hbm", second + 0.5) for second in range(8)]
    assert levels == [110, 110, 138, 138, 138, 138, 138, 121][:8]
    assert (memory.levels[0], memory.levels[-1], memory.peak_bytes, memory.peak_at) == (100, 100, 138, 2)
    assert memory.holders == (("weights", 100), ("early", 20), ("x", 10), ("buffer", 7), ("y", 1))
    assert timeline.memory["host"].peak_bytes == 3


def test_an_event_that_takes_no_time_is_still_an_instant():
    events = [
        Event("one", COMPUTE, 0, holds=(Hold("a", 5),)),
        Event("two", COMPUTE, 0, holds=(Hold("b", 7),)),
        Event("three", COMPUTE, 1, holds=(Hold("c", 6),)),
    ]
    memory = play(events).memory["hbm"]
    assert (memory.peak_bytes, memory.peak_event, memory.holders) == (7, 1, (("b", 7),))


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_an_absurd_duration_is_refused(seconds):
    with pytest.raises(ValueError, match="'gather'"):
        Event("gather", COMPUTE, seconds)


@pytest.mark.parametrize("other", [1, 2, -1])
def test_an_event_can_only_wait_for_earlier_ones(other):
    with pytest.raises(ValueError, match=r"'second'.*does not stand before"):
        play([Event("first", COMPUTE, 1), Event("second", COMPUTE, 1, (other,))])


def test_memory_is_not_held_since_a_later_event():
    with pytest.raises(ValueError, match=r"'first'.*x is held since event 1"):
        play([Event("first", COMPUTE, 1, holds=(Hold("x", 1, since=1),)), Event("second", COMPUTE, 1)])


# --- random schedules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [0, 1])
def test_it_agrees_with_the_clock(least):
    for seed in SEEDS:
        events = random_events(seed, least=least)
        timeline, seen = play(events), watch(events)
        assert timeline.seconds == seen.seconds, seed
        assert list(timeline.starts) == [seen.starts[n] for n in range(len(events))], seed
        assert list(timeline.ends) == [seen.ends[n] for n in range(len(events))], seed
        assert sum(timeline.exposed_s.values()) == seen.main_idle, seed
        for tier, memory in timeline.memory.items():
            levels = [held.get(tier, 0) for held in seen.held]
            assert [level_at(timeline, tier, second + 0.5) for second in range(seen.seconds)] == levels, seed
            assert memory.peak_bytes >= max(levels, default=0), seed


def test_on_one_stream_the_peak_is_the_highest_level():
    for seed in SEEDS:
        events = random_events(seed, least=1, streams=(COMPUTE,))
        for tier, memory in play(events).memory.items():
            assert memory.peak_bytes == max(held.get(tier, 0) for held in watch(events).held), seed


def test_one_stream_takes_the_sum():
    for seed in SEEDS:
        events = random_events(seed, streams=(COMPUTE,))
        assert play(events).seconds == sum(event.seconds for event in events)


def test_a_step_lies_between_its_bounds():
    """Never more than taking turns, never less than the busiest stream or the longest chain of dependencies."""
    for seed in SEEDS:
        events = random_events(seed)
        timeline = play(events)
        assert timeline.seconds <= sum(event.seconds for event in events)
        assert timeline.seconds >= max(timeline.busy_s.values())
        assert timeline.seconds >= longest_chain(events)


def test_faster_events_and_fewer_dependencies_never_make_a_step_slower():
    for seed in SEEDS:
        events = random_events(seed, least=1)
        before = play(events).seconds
        for stream in STREAMS:
            assert (
                play([replace(e, seconds=e.seconds / 2) if e.stream == stream else e for e in events]).seconds <= before
            )
        assert play([replace(e, after=e.after[1:]) for e in events]).seconds <= before


def test_every_second_is_accounted_for():
    for seed in SEEDS:
        timeline = play(random_events(seed))
        main = timeline.busy_s.get(COMPUTE, 0)
        assert main + sum(timeline.exposed_s.values()) == timeline.seconds
        assert sum(bubble.end - bubble.begin for bubble in timeline.bubbles) == timeline.seconds - main
        assert all(exposed <= timeline.busy_s[stream] for stream, exposed in timeline.exposed_s.items())
        assert all(timeline.busy_s[s] + timeline.idle_s[s] == timeline.seconds for s in timeline.busy_s)
        if COMPUTE in timeline.busy_s:
            assert sum(timeline.phase_seconds.values()) == timeline.seconds
            assert all(one[2] == two[1] for one, two in pairwise(timeline.phases))


def test_memory_ends_where_it_began():
    for seed in SEEDS:
        for memory in play(random_events(seed)).memory.values():
            assert memory.levels[0] == memory.levels[-1]
            assert list(memory.times) == sorted(memory.times)
            assert min(memory.levels) >= 0
            assert sum(nbytes for _, nbytes in memory.holders) == memory.peak_bytes


def test_the_same_events_give_the_same_timeline():
    for seed in SEEDS:
        assert play(random_events(seed)) == play(random_events(seed))


def test_a_hundred_thousand_events_start_when_their_stream_and_their_operands_are_ready():
    """About as many as a step of Llama-70B has; how long playing takes is measured by hand (docs), not asserted."""
    streams = (COMPUTE, COMPUTE, "comm:data", "comm:tensor")
    events = [
        Event(
            f"event {n}",
            streams[n % 4],
            1e-6 * (n % 7),
            (n - 1, n // 2) if n else (),
            (Hold("x", n),) if n % 3 == 0 else (),
        )
        for n in range(100_000)
    ]
    ends: list[float] = []
    free = dict.fromkeys(streams, 0.0)
    for event in events:
        start = max((free[event.stream], *(ends[of] for of in event.after)))
        ends.append(start + event.seconds)
        free[event.stream] = ends[-1]
    assert play(events).seconds == pytest.approx(max(ends), rel=1e-12)


def test_of_two_readers_that_end_together_the_later_one_counts():
    """Both end at 2; what is held since the first of them has ended lies beside the value, which the other reads."""
    events = [
        Event("maker", COMPUTE, 1, (), (Hold("value", 100, until=(1, 2)),)),
        Event("one reader", "comm:data", 1, (0,)),
        Event("other reader", COMPUTE, 1, (0,)),
        Event("next", COMPUTE, 1, (), (Hold("new", 10, since=1),)),
    ]
    memory = play(events).memory["hbm"]
    assert memory.peak_bytes == 110 and dict(memory.holders) == {"value": 100, "new": 10}
