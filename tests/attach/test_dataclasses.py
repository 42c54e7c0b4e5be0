"""Batches and settings in dataclasses of the user's, as arguments of forward."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.compare import near


@dataclass
class Batch:
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor
    weight: float = 1.0


@dataclass
class Settings:
    weight: float = 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, batch: Any, settings: Settings | None = None) -> Tensor:
        weight = getattr(batch, "weight", 1.0) if settings is None else settings.weight
        return weight * (self.inner(batch.x) - batch.y).square().mean()


@pytest.mark.parametrize("kind", ["plain", "frozen", "settings"])
def test_batches_and_settings_may_be_dataclasses(one: DeviceMesh, kind: str) -> None:
    plain = Net()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(3):
        x, y = torch.randn(6, 8), torch.randn(6, 4)
        given = (Frozen(x, y, step + 0.5),) if kind == "frozen" else (Batch(x, y),)
        more = (Settings(step + 0.5),) if kind == "settings" else ()
        near(parallel(*given, *more), plain(*given, *more), 1e-6, f"step {step}")
