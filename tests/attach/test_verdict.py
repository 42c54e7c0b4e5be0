"""What follows from what ranks tell of themselves: sentences, from values alone."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.attach.verdict import SETTLED_S, Judge, Report, ended, loads

STEP = ("forward", "backward")


def made(calls: Sequence[str], **told: object) -> Report:
    """The report of a rank that has made these calls."""
    sums, told_of = 0, list[tuple[int, int, str]]()
    for number, what in enumerate(calls):
        sums = zlib.crc32(what.encode(), sums)
        told_of.append((number + 1, sums, what))
    within = calls[-1] if told.get("for_s") else ""
    return replace(Report(1, len(calls), tuple(told_of), within), **told)  # type: ignore[arg-type]


def verdict(reports: Mapping[int, Report], *, after_s: float = 0.0, patience_s: float = 60.0) -> str | None:
    """Of a judge who read these at 0, and again later."""
    judge = Judge(patience_s)
    return judge.verdict(reports, 0.0) or judge.verdict(reports, after_s)


def test_a_report_is_read_as_it_was_told() -> None:
    told = made(
        STEP, for_s=2.5, slack_s=4.5, works=True, at="train.py:3", failed=(2, "ValueError: no", 1.0), dead=(3, 4)
    )
    assert loads(told.dumps()) == told
    assert loads(made(()).dumps()) == made(())


def test_ranks_that_go_together_go_on() -> None:
    ahead, behind = made((*STEP, "forward"), for_s=30.0), made(STEP, at="train.py:9")
    assert verdict({0: ahead, 1: behind}) is None
    assert verdict({0: ahead, 1: made((*STEP, "forward"), for_s=59.0)}) is None
    assert verdict({0: made(STEP, left="its script has ended"), 1: made(STEP)}) is None
    assert verdict({0: made(STEP, left="its script has ended"), 1: made(STEP, for_s=9.0)}) is None, "it finishes"
    assert verdict({0: made(STEP, dead=(1,)), 1: made(STEP)}, after_s=9.0) is None, "nobody waits for it"


def test_another_call_is_named_on_both_sides() -> None:
    told = verdict({0: made((*STEP, "forward")), 1: made((*STEP, "evaluation", "forward"))})
    assert told is not None and told.startswith("call 3 is evaluation on rank 1 and forward on rank 0; every rank")
    # also where one of them has gone on, and its report no longer has the call
    judge, plain = Judge(60.0), made(("a", "b", "c"))
    assert judge.verdict({0: made(("a", "b", "x")), 1: made(("a", "b"))}, 0.0) is None
    assert judge.verdict({0: replace(made(("a", "b", "x", "d")), told=()), 1: plain}, 1.0) is not None


def test_a_rank_that_has_left_is_named_with_its_reason() -> None:
    waits = made((*STEP, "forward"), for_s=0.5, at="train.py:7")
    gone = made(STEP, left="its script has ended with ValueError: no")
    assert verdict({0: waits, 1: gone}) == (
        "rank 1 has left behind call 2 (its script has ended with ValueError: no), and rank 0 waits in call 3, "
        "forward, at train.py:7"
    )
    assert "has made 3" in (verdict({0: replace(waits, within=""), 1: gone}) or ""), "it does not have to wait for it"


def test_a_process_that_is_gone_is_given_the_time_of_a_report() -> None:
    waits, gone = made((*STEP, "forward"), for_s=3.0, dead=(1,)), made(STEP)
    assert verdict({0: waits, 1: gone}, after_s=SETTLED_S) is None
    told = verdict({0: waits, 1: gone}, after_s=3 * SETTLED_S)
    assert told is not None and told.startswith("rank 1 has left behind call 2 (its process is gone), and rank 0 waits")
    within = made((*STEP, "forward"), for_s=2.0, at="train.py:5")
    told = verdict({0: waits, 1: within}, after_s=3 * SETTLED_S)
    assert told is not None and told.startswith(
        "rank 1 has left in call 3, forward, at train.py:5 (its process is gone)"
    )


def test_an_error_on_one_rank_is_told_once_it_has_settled() -> None:
    waits = made((*STEP, "forward"), for_s=SETTLED_S + 1)
    failed = replace(made((*STEP, "forward")), failed=(3, "MemoryError: no", SETTLED_S + 1))
    assert verdict({0: waits, 1: failed}) == (
        "call 3 failed on rank 1 (MemoryError: no), and rank 0 waits in call 3, forward"
    )
    assert verdict({0: waits, 1: replace(failed, failed=(3, "MemoryError: no", 0.5))}) is None
    assert verdict({0: replace(failed, failed=(3, "MemoryError: no", 9.0)), 1: failed}) is None, "all have failed alike"


def test_silence_is_told_of_behind_the_patience() -> None:
    waits, idle = made((*STEP, "forward"), for_s=61.0, at="train.py:7"), made(STEP, at="train.py:20")
    told = verdict({0: waits, 1: idle})
    assert told == (
        "rank 0 has waited 61 s in call 3, forward, at train.py:7 for rank 1: rank 1 is behind call 2, at train.py:20; "
        "if that is meant, give autopar.compile a longer patience_s"
    )
    assert verdict({0: replace(waits, slack_s=10.0), 1: idle}) is None, "a step takes as long"
    planning = replace(waits, works=True)
    assert verdict({0: planning, 1: waits}) is None and verdict({0: waits, 1: planning}) is None, (
        "for as long as it takes"
    )
    assert verdict({0: waits, 1: replace(idle, works=True)}) is not None, "in another call"
    assert verdict({0: waits, 1: waits}) is None, "a long step of all"
    stuck = replace(waits, for_s=601.0)
    assert "and so have all others" in (verdict({0: stuck, 1: stuck}) or "")


def test_a_frozen_rank_is_told_of_whatever_the_step_takes() -> None:
    waits, frozen = made((*STEP, "forward"), for_s=70.0, slack_s=1e9), made(STEP)
    judge = Judge(60.0)
    for second in range(0, 80, 10):
        told = judge.verdict({0: replace(waits, beat=second, for_s=float(second)), 1: frozen}, float(second))
        assert (told is not None) == (second > 60)
    assert told is not None and "nothing was heard of rank 1 for as long" in told
    judge, left = Judge(60.0), replace(frozen, left="its script has ended")
    assert all(judge.verdict({0: replace(waits, calls=2, beat=s), 1: left}, float(s)) is None for s in range(80))


def test_what_may_have_ended_another_rank() -> None:
    assert ended({0: made(STEP), 1: made(STEP)}, 0, ()) is None
    assert ended({}, 0, (1,)) == "the process of rank 1 is gone"
    assert "last heard of in call 2, backward" in (ended({1: made(STEP, for_s=1.0)}, 0, (1,)) or "")
    failed = made(STEP, failed=(2, "ValueError: no", 1.0))
    assert ended({0: failed, 1: replace(failed, left="its script has ended")}, 0, ()) is None, "all have failed alike"
    assert "ValueError" in (ended({1: made(STEP, failed=(2, "ValueError: no", 1.0))}, 0, ()) or "")
