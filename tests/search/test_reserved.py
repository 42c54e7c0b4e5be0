"""A limit is of what the allocator reserves: what is played, what is tried again, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

import pytest

from autopar.errors import Infeasible
from autopar.plan import Plan
from autopar.search import Question, Request, answer, ask, reserved
from autopar.search.reserved import (
    LEFT,
    RESERVED,
    TRIES,
    check_fits,
    held_within,
    reserved_bytes,
    telling,
)
from cost_models.hardware import Hardware
from cost_models.reserve import Room, outside_bytes, room_in, workspaces
from tests.support.check import mesh_of
from tests.support.families import family

H100 = Hardware.load("h100-sxm")


@cache
def question(ranks: int) -> Question:
    return ask(family("gpt2").graph, mesh_of(ranks), H100)


@cache
def fastest(ranks: int) -> Plan:
    return answer(question(ranks))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_reserves_what_it_holds_with_workspaces_and_groups(ranks: int) -> None:
    beside = sum(workspaces(H100)) + outside_bytes(H100, (ranks,))
    found = reserved_bytes(fastest(ranks), question(ranks).pricer)
    assert fastest(ranks).peak_bytes["hbm"] + beside <= found
    expandable = reserved_bytes(fastest(ranks), question(ranks).pricer, expandable=True)
    assert fastest(ranks).peak_bytes["hbm"] + beside <= expandable


def test_what_is_found_says_what_it_reserves() -> None:
    room = room_in(40e9, H100, (2,))
    plan = held_within(room, lambda held: answer(question(2), Request(memory=held)), question(2).pricer)
    assert plan.search[RESERVED] == reserved_bytes(plan, question(2).pricer) < room.limit
    assert plan.search[LEFT] == int(room.left) and plan.memory_limit == room.tensors
    assert any("are left for workspaces of kernels" in note for note in plan.notes)


def test_a_plan_with_too_many_gaps_is_searched_again_with_that_much_less() -> None:
    asked: list[float] = []
    needs = reserved_bytes(fastest(1), question(1).pricer)
    room = Room(needs - 1000.0)

    def find(held: float) -> Plan:
        asked.append(held)
        return fastest(1)

    plan = held_within(room, find, question(1).pricer)
    assert asked == [room.limit - 1000 * number for number in range(TRIES)]
    assert "the allocator then gives memory back" in plan.notes[-1]
    asked.clear()
    held_within(Room(needs), find, question(1).pricer)
    assert asked == [needs], "it fits"


def test_where_nothing_fits_in_less_the_plan_that_was_found_stays() -> None:
    room = Room(reserved_bytes(fastest(1), question(1).pricer) - 1.0)

    def find(held: float) -> Plan:
        if held < room.limit:
            raise Infeasible("no")
        return fastest(1)

    assert held_within(room, find, question(1).pricer).choices == fastest(1).choices


def test_where_less_room_ends_in_more_gaps_the_plan_with_the_fewest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where what is fetched again and again has a stream of its own: each search made it worse."""
    sizes = iter((1300, 1100, 1200))
    monkeypatch.setattr(reserved, "reserved_bytes", lambda *_, **__: next(sizes))
    plan = held_within(Room(1000.0), lambda held: fastest(1), question(1).pricer)
    assert plan.search[RESERVED] == 1100 and "the allocator then gives memory back" in plan.notes[-1]


def test_on_a_cpu_the_limit_is_what_tensors_hold() -> None:
    cpu = replace(question(1).pricer, hardware=Hardware.load("cpu-gloo"))
    asked: list[float] = []
    assert held_within(Room(123.0), lambda held: asked.append(held) or fastest(1), cpu) is fastest(1)
    assert asked == [123.0]


def test_where_nothing_fits_it_is_said_how_much_is_no_plans() -> None:
    room = room_in(2e9, H100, (2,))
    with (
        pytest.raises(
            Infeasible, match=r"no\. Of the 1\.86 GiB, .* MiB are left for .*; with those, about .* GiB is"
        ) as caught,
        telling(room),
    ):
        raise Infeasible("no.", at_least=1e9, enough=None)
    assert caught.value.at_least == room.taken(1e9) and caught.value.enough is None
    with pytest.raises(Infeasible, match=r"no plan fits in 1\.00 KiB per rank"), telling(room_in(1024, H100, (2,))):
        pytest.fail("searched")
    with pytest.raises(Infeasible, match=r"^no\.$"), telling(Room(2e9)):
        raise Infeasible("no.")


def test_a_plan_that_needs_more_than_the_user_allows_is_refused() -> None:
    peak = fastest(2).peak_bytes["hbm"]
    room = room_in(inf, H100, (2,))
    check_fits(peak, replace(room, limit=room.taken(peak)), "1GiB")
    with pytest.raises(
        ValueError, match=r"the plan needs .* of each rank's device, .* of it for workspaces of .*'1GiB'"
    ):
        check_fits(peak, replace(room, limit=room.taken(peak) * 0.99), "1GiB")
    with pytest.raises(
        ValueError, match=r"the plan needs .* of each rank's device, and memory=0\.5 allows .*; give more"
    ):
        check_fits(peak, Room(peak - 1.0), 0.5)
