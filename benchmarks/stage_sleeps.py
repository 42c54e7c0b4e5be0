"""What the runtime of pipelines adds to a schedule: stages that sleep instead of computing, on real processes.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.stage_sleeps

Sleeping ranks do not share processors, so that four of them run on two cores as they would on four devices. Prints the
seconds of the schedule as `autopar.pipeline.play` has them for these stages, the seconds of a step, and the ratio.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.measure.pipeline import WEIGHTS, Key, each_part
from autopar.pipeline import Durations, make_schedule, play

SECONDS, MICRO_BATCHES, STEPS = 0.02, 8, 5  # of each F, I and W
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved")


class Layers(nn.Module):
    """Small enough that computing is nothing beside the sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (x - y).square().mean()


def measured(schedule: str, ranks: int) -> tuple[float, float]:
    """Seconds of a step as played, and as it runs."""
    x, y = torch.randn(MICRO_BATCHES, 8), torch.randn(MICRO_BATCHES, 8)
    mesh = autopar.init_mesh("cpu", pipe=ranks)
    parallel = autopar.compile(Layers(), mesh, micro_batches=MICRO_BATCHES, schedule=schedule, hardware="cpu-gloo")
    parallel(x, y).backward()
    lists = make_schedule(schedule, ranks, MICRO_BATCHES)
    each = SECONDS / lists.stages_per_rank

    def sleeping(run: Callable[..., Any], key: Key) -> Callable[..., Any]:
        whole = key[1] not in ("forward", WEIGHTS) and not lists.splits_backward

        def part(*args: Any) -> Any:
            time.sleep(2 * each if whole else each)
            return run(*args)

        return part

    told: list[float] = []
    with each_part(parallel, sleeping):
        for _ in range(STEPS):
            dist.barrier()
            began = time.perf_counter()
            parallel(x, y).backward()
            dist.barrier()
            told.append(time.perf_counter() - began)
    stages = (each,) * lists.stages
    return play(lists, Durations(stages, stages, stages, (0.0,) * (lists.stages - 1))).makespan, median(told)


def main() -> None:
    """Print a line for each schedule."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for schedule in SCHEDULES:
        torch.manual_seed(0)
        played, step = measured(schedule, dist.get_world_size())
        if dist.get_rank() == 0:
            print(
                f"{schedule:12} played {played * 1e3:7.1f} ms, step {step * 1e3:7.1f} ms, {played / step:.3f}",
                flush=True,
            )
    dist.barrier()
    os._exit(0)  # gloo's threads abort now and then when many groups are taken down at once (torch 2.13)


if __name__ == "__main__":
    main()
