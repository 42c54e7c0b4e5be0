"""What the host takes for each kernel of a program that launches them one by one: `python -m autopar.measure.dispatch
DEVICE`, which `autopar.calibrate` calls.

A step whose kernels have nearly nothing to do takes what the host takes: a small model, trained as users train theirs.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.compile import compile
from autopar.machine.device import init_mesh
from autopar.search.backends import launched
from autopar.simulate.timeline import pricer_of
from cost_models.hardware import Hardware

BLOCKS, WIDTH, ROWS = 16, 32, 8
WARM, STEPS = 5, 40


class Small(nn.Module):
    """Norms, products with biases and elementwise operators, in the proportions of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(BLOCKS))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(BLOCKS))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(functional.gelu(up(norm(x))))
        return x.square().mean()


def dispatched(device_type: str) -> tuple[float, int]:
    """Seconds of the host for each kernel of a step, and how many that has."""
    hardware = Hardware.load("cpu-gloo" if device_type == "cpu" else "h100-sxm")  # whichever: nothing is chosen by it
    x = torch.rand(ROWS, WIDTH)
    mesh = init_mesh(device_type, data=1)
    parallel = compile(Small(), mesh, hardware=hardware)  # without an example: DTensors, as of several ranks
    x = x.to(device_type)
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-4, foreach=True)

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            parallel(x).backward()
            optimizer.step()
        if device_type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    steps(WARM)
    seconds = min(steps(STEPS // 4) for _ in range(4))
    assert parallel.plan is not None
    count = launched(parallel.plan, pricer_of(parallel.plan, hardware))
    return seconds / count, count


if __name__ == "__main__":
    print(*dispatched(sys.argv[1]))
