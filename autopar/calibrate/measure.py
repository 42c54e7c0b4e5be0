"""Seconds of one call, on a machine that others may use at the same time; and what a measurement is (`Sample`)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from autopar._compat import cuda_sleep
from autopar.machine.device import processors
from cost_models.steps import Comm, Compute, Move

STEPS = {"Compute": Compute, "Comm": Comm, "Move": Move}
LEAST_ROUND_S = 3e-4  # where the device is waited for, the clock is read between rounds of calls at least this long
LONG_S = 0.2  # a call that takes longer is timed twice: nothing that is short beside it matters
CALLS = 3  # of a round behind other work
CUDA_CALLS = 64  # of a round: far fewer launches than a stream takes before its host has to wait
HEAD_START = 100_000  # cycles that a device sleeps for each call, about 50 us: longer than a host takes to launch one
OTHER_BYTES = 3 * 2**20  # what other work touches: more than the caches of one processor


@dataclass(frozen=True)
class Sample:
    """A step, the seconds it took, and the curve it belongs to. `held`: kept out of the fit, to check it.

    `sizes`: of the mesh it ran on, whose axes are called a0, a1, ...
    """

    curve: str
    step: Compute | Comm | Move
    seconds: float
    sizes: tuple[int, ...]
    held: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "type": type(self.step).__name__}

    @staticmethod
    def from_json(content: dict[str, Any]) -> Sample:
        step = STEPS[content["type"]](**content["step"])
        return Sample(content["curve"], step, content["seconds"], tuple(content["sizes"]), content["held"])


@dataclass(frozen=True)
class Clock:
    """How calls are timed on a device where `ranks` processes are busy at once.

    A rank of one thread on the CPU is timed by the processor time it gets, so that what other programs take does not
    count; where more ranks than processors are busy, each waits for its turn: ranks / processors times as long. CUDA
    is timed by events of its own around each round, and sleeps before the first of them until the host has launched
    the round: what the host takes for a launch is not what a kernel takes, behind others. All else by the wall clock.
    """

    device: torch.device
    ranks: int

    @property
    def counts_own_time(self) -> bool:
        return self.device.type == "cpu" and torch.get_num_threads() == 1

    @property
    def turns(self) -> float:
        return max(1.0, self.ranks / processors()) if self.counts_own_time else 1.0

    def now(self) -> float:
        if self.counts_own_time:
            return time.thread_time()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def round_s(self, call: Callable[[], object], count: int) -> tuple[float, object]:
        """Seconds of so many calls one behind the other, and the last result."""
        result: object = None
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cuda_sleep(count * HEAD_START)
            begin.record()
            for _ in range(count):
                result = call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3, result
        began = self.now()
        for _ in range(count):
            result = call()
        return self.now() - began, result

    def seconds(self, call: Callable[[], object], budget_s: float) -> float:
        """Of one call: the median of rounds, for about `budget_s` on the wall. The last result stays alive.

        A rank that counts its own time does other work in front of each round, as a program does: the code and the
        values of a call are seldom still in the caches of its processor.
        """
        first_s, result = self.round_s(call, 1)
        if first_s < LONG_S:
            result = call()
        once_s, result = self.round_s(call, 1)
        count = max(1, int(LEAST_ROUND_S / max(once_s, 1e-7)))
        if self.counts_own_time:
            count = min(count, CALLS)
        if self.device.type == "cuda":
            count = min(count, CUDA_CALLS)
        is_long = once_s >= LONG_S
        rounds = [once_s] if is_long else []
        until = time.perf_counter() + budget_s
        while len(rounds) < (2 if is_long else 3) or (time.perf_counter() < until and len(rounds) < 200):
            if self.counts_own_time:
                other_work()
            taken_s, result = self.round_s(call, count)
            rounds.append(taken_s / count)
        del result
        return max(median(rounds), 1e-9) * self.turns


def other_work() -> None:
    """A pass over memory that leaves little in a processor's own caches."""
    read, written = _elsewhere()
    torch.neg(read, out=written)


@functools.cache
def _elsewhere() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(OTHER_BYTES // 8), torch.ones(OTHER_BYTES // 8)
