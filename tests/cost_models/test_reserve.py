"""What a device holds beside a plan, and what that leaves."""

from __future__ import annotations

import pytest

from cost_models import Hardware, known_hardware
from cost_models.hardware import RESERVES
from cost_models.reserve import Room, outside_bytes, peers_of, room_in, workspaces

H100, CPU = Hardware.load("h100-sxm"), Hardware.load("cpu-gloo")
GPUS = [name for name in known_hardware() if name != "cpu-gloo"]


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_all_figures_with_their_sources(name: str) -> None:
    hardware = Hardware.load(name)
    assert {*hardware.reserve} == {*RESERVES}
    assert all(hardware.sources[f"reserve.{what}"] for what in RESERVES)
    assert hardware.device


def test_a_cpu_shares_its_memory_and_nothing_is_left_free() -> None:
    room = room_in(1e9, CPU, (2, 2))
    assert room == Room(1e9) and room.tensors == room.taken(room.tensors) == 1e9 and room.left == 0
    assert not workspaces(CPU) and outside_bytes(CPU, (2, 2), peers=3) == 0 and not CPU.device


@pytest.mark.parametrize(("sizes", "groups"), [((1,), 0), ((8,), 1), ((8, 1), 1), ((2, 4), 3), ((2, 2, 2), 4)])
def test_a_group_for_each_axis_and_one_for_all_of_several(sizes: tuple[int, ...], groups: int) -> None:
    assert outside_bytes(H100, sizes) == groups * H100.reserve["group_bytes"]
    assert outside_bytes(H100, sizes, joined=2) == (groups + 2) * H100.reserve["group_bytes"], (
        "over several axes at once"
    )


def test_an_all_to_all_takes_more_for_each_peer() -> None:
    collectives = [("all_to_all", "tensor"), ("all_gather", "data"), ("all_to_all", "tensor")]
    assert peers_of(collectives, {"data": 8, "tensor": 4}) == 3
    assert peers_of([*collectives, ("all_to_all", "data+tensor")], {"data": 8, "tensor": 4}) == 3 + 31
    more = outside_bytes(H100, (8, 4), peers=3) - outside_bytes(H100, (8, 4))
    assert more == pytest.approx(3 * H100.reserve["peer_bytes"])


@pytest.mark.parametrize("limit", [1e9, 40e9, 80e9])
@pytest.mark.parametrize("expandable", [False, True])
def test_what_tensors_may_hold_takes_the_limit_and_no_more(limit: float, expandable: bool) -> None:
    room = room_in(limit, H100, (8,), expandable=expandable)
    assert room.tensors > 0 and room.taken(room.tensors) == pytest.approx(limit)
    assert room.left + room.tensors == pytest.approx(limit)
    assert room.left >= sum(workspaces(H100)) + H100.reserve["group_bytes"]


def test_a_limit_below_what_is_left_leaves_nothing() -> None:
    assert room_in(1e6, H100, (8,)).tensors == 0.0


def test_segments_that_grow_leave_fewer_gaps() -> None:
    assert room_in(4e10, H100, (8,), expandable=True).tensors > room_in(4e10, H100, (8,)).tensors


def test_hopper_has_larger_workspaces() -> None:
    assert workspaces(H100) == [32 << 20] * 4
    assert workspaces(Hardware.load("a100-80gb")) == [4096 * 1024 * 2 + 16 * 1024 * 8] * 4
