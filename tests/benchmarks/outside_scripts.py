"""Scripts for test_outside.py: one that is right, one that autopar gets wrong (as it says it would), one refused."""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.outside.script import Batch, Script, by_keyword

SCALE = Path(tempfile.gettempdir(), f"autopar_outside_scale_{os.getpid()}")
atexit.register(SCALE.unlink, missing_ok=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.layers(x), x[:, :8])


class FromOutside(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(SCALE.read_text())  # not noticed: docs/boundary.md


class Depends(Net):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int((self.layers(x) > 0).sum())):
            x = x * 0.9
        return super().forward(x)


def _batch(n: int) -> Batch:
    return {"x": torch.randn(n, 16)}


def _set_first(model: Any, batch: Batch) -> Any:
    SCALE.write_text(str(1 + float(batch["x"].abs().max())))
    return by_keyword(model, batch)


def scripts() -> list[Script]:
    return [
        Script("right", (), Net, _batch),
        Script("wrong", (), FromOutside, _batch, _set_first),
        Script("refused", (), Depends, _batch),
    ]
