"""What calibrate and measure do on CUDA, with stand-ins for its events and its properties: no device is here."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from autopar._compat import FakeTensorMode
from autopar.calibrate import bench, compute, measure
from autopar.calibrate.measure import Clock
from autopar.machine.device import ALONE, host_threads
from autopar.measure import watch
from autopar.measure.watch import Stopwatch

CUDA = torch.device("cuda")
compiling: Any = sys.modules["autopar.planner"]


class Device:
    """A device on which each call takes 5 ms, whatever the host's clock says; waiting for it is counted, and how often
    it was sent to sleep.
    """

    def __init__(self) -> None:
        self.ms, self.waited, self.slept, self.rested = 0.0, 0, list[int](), list[int]()

    def work(self, value: Any = None) -> Any:
        self.ms += 5.0
        return value

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.ms)
        event.synchronize = lambda: setattr(self, "waited", self.waited + 1)
        event.elapsed_time = lambda other: other.at - event.at
        return event


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", made.Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.rested.append(len(made.slept)))
    for module in (measure, watch):
        monkeypatch.setattr(module, "cuda_sleep", made.slept.append)
    return made


def test_calls_are_timed_by_the_events_of_the_device(device: Device) -> None:
    assert Clock(CUDA, 4).seconds(device.work, 0.0) == pytest.approx(5e-3)
    seconds, result = Clock(CUDA, 1).round_s(lambda: device.work("made"), 7)
    assert (seconds, result) == (pytest.approx(35e-3), "made")
    assert device.slept[-1] == 7 * measure.HEAD_START  # the host launches all of a round before the first is timed


def test_a_program_is_timed_node_by_node_and_waited_for_before_it_could_be_full(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "AT_ONCE", 4)
    graph = fx.Graph()
    made = graph.placeholder("x")
    for _ in range(6):
        made = graph.call_function(device.work, (made,))
    graph.output(made)
    spent: dict[Any, float] = {}
    timed = Stopwatch(fx.GraphModule(nn.Module(), graph), "forward", {}, CUDA, spent)
    assert timed(3) == 3 and spent == {"forward": pytest.approx(30e-3)} and device.waited == 1
    assert timed(4) == 4 and spent == {"forward": pytest.approx(60e-3)} and device.waited == 2
    assert device.slept == [watch.HEAD_START] * 4 and not timed.env  # nothing that it made is kept
    assert device.rested == [0, 1, 2, 3], "before it sleeps, it has nothing left to do"


def test_operands_take_turns_beyond_the_last_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50 * 2**20))
    on_cpu = torch.ones(2)
    assert bench.rotated_bytes((1, on_cpu)) == bench.ROTATED_BYTES
    with FakeTensorMode():
        assert bench.rotated_bytes((torch.empty(2, device="cuda"),)) == 4 * 50 * 2**20


def test_tf32_is_allowed_while_its_products_are_made_and_timed_and_no_longer() -> None:
    before = torch.get_float32_matmul_precision()
    seen = [torch.get_float32_matmul_precision() for _ in compute._with_tf32(iter(range(3)))]  # type: ignore[arg-type]
    assert seen == ["high"] * 3 and torch.get_float32_matmul_precision() == before == "highest"


def test_updates_on_the_host_have_the_threads_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []
    before = torch.get_num_threads()
    compute._with_threads(2, lambda: inside.append(torch.get_num_threads()))
    assert inside == [2] and torch.get_num_threads() == before
    monkeypatch.setattr(f"{host_threads.__module__}.processors", lambda: 16)
    assert [host_threads(elements) for elements in (1, ALONE - 1, ALONE)] == [1, 1, 14]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert host_threads(ALONE) == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host_threads(ALONE) == 1


def test_parameters_on_the_host_want_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = SimpleNamespace(residence={"a": "host", "b": "stream", "c": "host"})
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(ValueError, match=r"2 parameters .* has cuda:nccl alone; start it with backend='cpu:gloo,cuda:"):
        compiling._see_to_the_host(plan)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
