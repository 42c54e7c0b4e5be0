"""Schedules against what is published of them, against bounds, and against a run over channels that block."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autopar.pipeline import (
    SCHEDULES,
    Action,
    Durations,
    Schedule,
    ScheduleError,
    StageBytes,
    in_flight,
    least_seconds,
    make_schedule,
    makespans,
    memory,
    play,
    projected,
    verify,
    violations,
)
from autopar.pipeline.__main__ import main
from autopar.pipeline.messages import send_behind

# sha256 of the lists, a rank a line; 1F1B, interleaved and ZB-V are those of torch.distributed.pipelining 2.13.
DIGESTS = {
    ("1f1b", 4, 8, None): "fa269d16",
    ("zb-h1", 4, 8, None): "dfcc169c",
    ("zb-h2", 4, 8, None): "e6d7c454",
    ("interleaved", 4, 8, 2): "79e82102",
    ("interleaved", 4, 8, 4): "452b74a1",
    ("zb-v", 4, 8, None): "34fd4086",
    ("1f1b", 8, 32, None): "816752f8",
    ("zb-h1", 8, 32, None): "37420cc1",
    ("zb-h2", 8, 32, None): "80ea9487",
    ("interleaved", 8, 32, 2): "d904abf0",
    ("interleaved", 8, 32, 4): "9f5a1c18",
    ("zb-v", 8, 32, None): "2b85b484",
}
LISTS = {
    "1f1b": """\
F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7""",
    "zb-h1": """\
F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7""",
}
# Qi et al., arXiv 2401.10241, tables 5 and 9: P, M, ms of F, I, W and a send, rates of 1F1B, ZB-H1 and ZB-H2.
RATES = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257),
]

QUICK_FIRST = [
    pytest.param(row, id=f"P{row[0]}-M{row[1]}-F{row[2]}", marks=pytest.mark.slow if row[0] > 16 else ())
    for row in RATES
]


def even(schedule: Schedule, f: float, i: float, w: float, send: float = 0.0) -> Durations:
    """Seconds of a rank's share, cut evenly among its stages."""
    count, each = schedule.stages, schedule.stages // schedule.ranks
    return Durations((f / each,) * count, (i / each,) * count, (w / each,) * count, (send,) * (count - 1))


def rows(schedule: Schedule) -> str:
    return "\n".join(schedule.text(rank, messages=False) for rank in range(schedule.ranks))


@pytest.mark.parametrize(("name", "ranks", "count", "chunks"), DIGESTS)
def test_lists_are_those_that_are_published(name: str, ranks: int, count: int, chunks: int | None) -> None:
    schedule = make_schedule(name, ranks, count, chunks)
    verify(schedule)
    assert hashlib.sha256(rows(schedule).encode()).hexdigest()[:8] == DIGESTS[name, ranks, count, chunks]
    if (ranks, count) == (4, 8) and name in LISTS:
        assert rows(schedule) == LISTS[name]


@pytest.mark.parametrize("row", QUICK_FIRST)
def test_rates_of_bubbles_are_those_that_are_published(row: tuple[Any, ...]) -> None:
    ranks, count, f, i, w, send, *rates = row
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), rates, strict=True):
        schedule = make_schedule(name, ranks, count)
        played = play(schedule, even(schedule, f, i, w, send))
        assert round(1 - count * (f + i + w) / played.span, 4) == rate, name


@pytest.mark.parametrize("row", QUICK_FIRST)
def test_of_equal_stages_1f1b_takes_what_its_formula_says(row: tuple[Any, ...]) -> None:
    ranks, count, f, i, w, send, *_ = row
    schedule = make_schedule("1f1b", ranks, count)
    takes = (count + ranks - 1) * (f + i + w) + 2 * send * ((ranks - 1) * count / ranks + ranks - 2)
    assert play(schedule, even(schedule, f, i, w, send)).makespan == pytest.approx(takes, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "chunks", "step", "above", "held"),
    [
        ("gpipe", None, 33.0, 22.4, 32.0),
        ("1f1b", None, 33.0, 24.2, 8.0),
        ("interleaved", 2, 28.5, 12.0, 11.5),
        ("interleaved", 4, 26.25, 7.6, 9.75),
        ("looped-bfs", 2, 28.5, 11.4, 32.0),
        ("zb-h1", None, 27.0, 10.9, 8.0),
        ("zb-h2", None, 27.0, 8.2, 15.0),
        ("interleaved-zb", 2, 25.5, 6.2, 8.0),
        ("zb-v", None, 25.5, 5.1, 8.0),
    ],
)
def test_steps_and_what_is_in_flight(name: str, chunks: int | None, step: float, above: float, held: float) -> None:
    """Of P = 4, M = 8, F = I = W = 1; and % above ideal of P = 8, M = 32, F = I = 1, W = 0.75, a send of 0.03."""
    small, large = make_schedule(name, 4, 8, chunks), make_schedule(name, 8, 32, chunks)
    assert play(small, even(small, 1, 1, 1)).makespan == pytest.approx(step)
    assert round(100 * (play(large, even(large, 1, 1, 0.75, 0.03)).makespan / (32 * 2.75) - 1), 1) == above
    assert max(in_flight(large).most_saved) / large.stages_per_rank == held


def test_no_play_beats_the_bound() -> None:
    draw = random.Random(0)
    for _ in range(60):
        name, ranks = draw.choice([*SCHEDULES]), draw.randint(1, 5)
        schedule = make_schedule(name, ranks, ranks * draw.randint(1, 3))

        def drawn(count: int) -> tuple[float, ...]:
            return tuple(draw.uniform(0.1, 3.0) for _ in range(count))

        stages = schedule.stages
        durations = Durations(drawn(stages), drawn(stages), drawn(stages), drawn(stages - 1))
        least = least_seconds(schedule.rank_of, schedule.micro_batches, durations)
        assert play(schedule, durations).makespan >= least * (1 - 1e-12)
    reached = make_schedule("zb-h1", 4, 8)
    assert play(reached, even(reached, 1, 1, 1)).makespan == least_seconds(range(4), 8, even(reached, 1, 1, 1))


def test_many_plays_at_once_take_what_each_takes() -> None:
    draw = random.Random(1)
    for name in SCHEDULES:
        ranks = draw.randint(2, 4)
        schedule = make_schedule(name, ranks, 2 * ranks)

        def drawn(count: int) -> tuple[float, ...]:
            return tuple(draw.uniform(0.1, 3.0) for _ in range(count))

        stages = schedule.stages
        many = [
            Durations(*(drawn(stages) for _ in range(3)), drawn(stages - 1), drawn(stages), drawn(stages - 1))
            for _ in range(5)
        ]
        assert makespans(schedule, many) == [play(schedule, one).makespan for one in many]
        assert makespans(schedule, []) == []


def run_over_channels(schedule: Schedule) -> dict[tuple[str, int, int], object]:
    """What every action makes, as a value that says how it was made. A send waits for its receive; buffers hold poison
    until they are received into.
    """
    places, ranks = [0] * schedule.ranks, range(schedule.ranks)
    held: list[dict[tuple[str, int, int], object]] = [{} for _ in ranks]
    made: dict[tuple[str, int, int], object] = {}

    def read(rank: int, kind: str, stage: int, number: int) -> object:
        found = held[rank].get((kind, stage, number), "poison")
        assert found != "poison", f"rank {rank} reads {stage}{kind}{number} before it is there"
        return found

    def compute(rank: int, action: Action) -> None:
        kind, stage, number = action
        match kind:
            case "F":
                value: object = ("F", stage, number, read(rank, "F", stage - 1, number) if stage else "batch")
            case "W":
                value = ("W", stage, number, read(rank, "B", stage, number))
            case _:
                behind = read(rank, "B", stage + 1, number) if stage + 1 < schedule.stages else "loss"
                value = ("B", stage, number, read(rank, "F", stage, number), behind)
        name = "B" if kind == "I" else kind
        held[rank][name, stage, number] = made[name, stage, number] = value

    while any(places[rank] < len(schedule.lists[rank]) for rank in ranks):
        before = [*places]
        for rank in ranks:
            while places[rank] < len(schedule.lists[rank]):
                kind, stage, number = action = schedule.lists[rank][places[rank]]
                if kind in ("F", "B", "I", "W"):
                    compute(rank, action)
                elif kind in ("SA", "SG"):
                    other = schedule.rank_of[stage + 1 if kind == "SA" else stage - 1]
                    if places[other] == len(schedule.lists[other]):
                        break
                    waits = schedule.lists[other][places[other]]
                    if (
                        waits.kind != ("RA" if kind == "SA" else "RG")
                        or schedule.rank_of[waits.stage - 1 if kind == "SA" else waits.stage + 1] != rank
                    ):
                        break
                    what = "F" if kind == "SA" else "B"  # the channel knows no names: the receiver says what it is
                    came_from = waits.stage - 1 if kind == "SA" else waits.stage + 1
                    held[other][what, came_from, waits.micro_batch] = read(rank, what, stage, number)
                    places[other] += 1
                else:
                    break  # until its sender comes
                places[rank] += 1
        assert places != before, "ranks wait for each other"
    return made


def wanted(schedule: Schedule) -> dict[tuple[str, int, int], object]:
    """What one rank makes of all stages, a micro-batch after the other."""
    made: dict[tuple[str, int, int], object] = {}
    kinds = {action.kind for row in schedule.lists for action in row}
    for number in range(schedule.micro_batches):
        for stage in range(schedule.stages):
            made["F", stage, number] = ("F", stage, number, made["F", stage - 1, number] if stage else "batch")
        for stage in reversed(range(schedule.stages)):
            behind = made["B", stage + 1, number] if stage + 1 < schedule.stages else "loss"
            made["B", stage, number] = ("B", stage, number, made["F", stage, number], behind)
            if "W" in kinds:
                made["W", stage, number] = ("W", stage, number, made["B", stage, number])
    return made


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_makes_what_one_rank_makes(name: str) -> None:
    for ranks, groups in ((1, 3), (2, 1), (3, 2), (4, 2)):
        schedule = make_schedule(name, ranks, ranks * groups)
        verify(schedule)
        assert run_over_channels(schedule) == wanted(schedule)


def drawn_order(draw: random.Random, rank_of: Sequence[int], count: int, split: bool) -> list[Action]:
    """A legal global order of everything, drawn action by action."""
    stages, done, order = len(rank_of), set[Action](), list[Action]()
    backward = "I" if split else "B"
    left = [
        Action(kind, stage, number)  # type: ignore[arg-type]
        for kind in (("F", "I", "W") if split else ("F", "B"))
        for stage in range(stages)
        for number in range(count)
    ]

    def is_ready(action: Action) -> bool:
        kind, stage, number = action
        match kind:
            case "F":
                return stage == 0 or Action("F", stage - 1, number) in done
            case "W":
                return Action("I", stage, number) in done
            case _:
                behind = stage + 1 == stages or Action(backward, stage + 1, number) in done  # type: ignore[arg-type]
                return Action("F", stage, number) in done and behind

    while left:
        action = draw.choice([one for one in left if is_ready(one)])
        left.remove(action)
        done.add(action)
        order.append(action)
        if (send := send_behind(rank_of, action)) is not None:
            order.append(send)
    return order


def test_a_thousand_orders_that_nobody_made() -> None:
    """Whatever the order and the cut, ranks that project it run, and make what one rank makes."""
    draw = random.Random(1)
    for _ in range(1000):
        ranks = draw.randint(1, 4)
        rank_of = [*range(ranks), *(draw.randrange(ranks) for _ in range(draw.randint(0, 2)))]
        draw.shuffle(rank_of)
        order = drawn_order(draw, rank_of, draw.randint(1, 3), draw.random() < 0.5)
        schedule = projected("drawn", 1 + max(one.micro_batch for one in order), rank_of, order)
        counts = verify(schedule)
        assert all(row[-1] == 0 for row in (*counts.saved, *counts.pending))
        assert run_over_channels(schedule) == wanted(schedule)


def changed(schedule: Schedule, rank: int, row: Sequence[Action]) -> Schedule:
    lists = [*schedule.lists]
    lists[rank] = tuple(row)
    return replace(schedule, lists=tuple(lists))


def test_damage_is_named() -> None:
    schedule = make_schedule("1f1b", 3, 4)
    row = [*schedule.lists[1]]
    receives = [at for at, one in enumerate(row) if one.kind == "RA"]
    swapped = [*row]
    swapped[receives[0]], swapped[receives[1]] = swapped[receives[1]], swapped[receives[0]]
    with pytest.raises(ScheduleError, match=r"1f1b: rank 1, position \d+: 1F0 stands in front of 1RA0"):
        verify(changed(schedule, 1, swapped))
    with pytest.raises(ScheduleError, match=r"rank 1 never runs 1SA0; its list needs it once"):
        verify(changed(schedule, 1, [one for one in row if str(one) != "1SA0"]))
    backward = row.index(Action("B", 1, 0))
    with pytest.raises(ScheduleError, match=r"rank 1, position 0: 1B0 stands in front of 1F0"):
        verify(changed(schedule, 1, [row[backward], *row[:backward], *row[backward + 1 :]]))
    with pytest.raises(ScheduleError, match=r"rank 1 runs 1F0 at positions 1, \d+; once is needed"):
        verify(changed(schedule, 1, [*row, Action("F", 1, 0)]))
    late = make_schedule("gpipe", 2, 2)
    first, second = late.lists
    sends = [one for one in first if one.kind == "SA"]
    order = [*(one for one in first if one.kind == "F"), *reversed(sends), *first[len(sends) * 2 :]]
    with pytest.raises(ScheduleError, match=r"1RA0 would be given what rank 0 sends as 0SA1"):
        verify(changed(late, 0, order))
    assert second == late.lists[1] and not violations(late)


def test_ranks_that_wait_in_a_circle_are_named() -> None:
    """Each sends before it receives, which queues would let pass and a rendezvous does not."""
    told = ("0F0 0SA0 0F1 0SA1 0RG0 0B0 0RG1 0B1", "1RA0 1F0 1B0 1SG0 1RA1 1F1 1B1 1SG1")
    lists = tuple(tuple(Action(one[1:-1], int(one[0]), int(one[-1])) for one in row.split()) for row in told)
    circle = r"circle: rank 0 with 0SA1 at position 3 for rank 1, rank 1 with 1SG0 at position 3 for rank 0"
    with pytest.raises(ScheduleError, match=circle):
        verify(Schedule("by hand", 2, (0, 1), lists))
    with pytest.raises(AssertionError, match="ranks wait for each other"):
        run_over_channels(Schedule("by hand", 2, (0, 1), lists))


@pytest.mark.parametrize("name", SCHEDULES)
def test_memory_is_an_instant_of_the_list(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    stages, counts = schedule.stages, in_flight(schedule)
    each = (10.0,) * stages
    alone = memory(schedule, StageBytes((100.0,) * stages, each, each, (0.0,) * (stages - 1)))
    for rank, one in enumerate(alone):
        most = 100 * schedule.rank_of.count(rank) + 10 * counts.most_held[rank]
        # W has begun before what it holds is let go of, and F holds before it is counted
        assert most <= one.peak <= most + 10 and one.nbytes[one.position] == one.peak
    nbytes = StageBytes((100.0,) * stages, (10.0,) * stages, (0.0,) * stages, (1.0,) * (stages - 1))
    with_buffers = memory(schedule, nbytes)
    for rank, one in enumerate(with_buffers):
        assert one.peak > 100 * schedule.rank_of.count(rank) + 10 * counts.most_saved[rank] - 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("1f1bb", 4, 8), "no schedule '1f1bb'; did you mean 1f1b"),
        (("1f1b", 4, 0), "1f1b over 0 micro-batches; at least 1 is needed"),
        (("interleaved", 4, 6), "6 is no multiple of 4; give 4 or 8"),
        (("1f1b", 4, 8, 2), "1f1b has 1 stage on each rank, and 2 are asked for"),
    ],
)
def test_what_cannot_be_is_said(arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_schedule(*arguments)
    with pytest.raises(ValueError, match=r"send has 1 entry, but 3 stages .* need 2"):
        Durations((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, (0.0,))


def test_the_command_draws_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stages", "4", "--micro-batches", "8"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in SCHEDULES)
    assert main(["--stages", "4", "--micro-batches", "6", "--schedule", "interleaved"]) == 2
    assert "6 is no multiple of 4" in capsys.readouterr().err
