"""Models for checks on processes: the families of `tests.support`, and small ones for one question each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, WIDTH, CLASSES = 8, 16, 12


class Net(nn.Module):
    """Two layers with a batch norm between, a frozen scale, a tied pair, and attributes that a user may have."""

    def __init__(self, width: int = WIDTH, classes: int = CLASSES) -> None:
        super().__init__()
        self.name_of_user = "mine"
        self.first, self.norm = nn.Linear(width, 2 * width, bias=False), nn.BatchNorm1d(2 * width)  # a bias gets noise
        self.second, self.third = nn.Linear(2 * width, width), nn.Linear(width, 2 * width, bias=False)
        self.third.weight = self.first.weight
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width), requires_grad=False)
        self.head = nn.Linear(2 * width, classes)

    def describe(self) -> str:
        return f"{self.name_of_user} {self.head.out_features}"

    def logits(self, x: Tensor) -> Tensor:
        x = self.second(functional.gelu(self.norm(self.first(x))))
        return self.head(torch.tanh(self.third(x * self.scale)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.logits(x), y)


class Logits(Net):
    """Without its loss."""

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


class Several(Net):
    """Several inputs in a dict, several outputs in a structure; no single scalar among them."""

    def forward(self, batch: dict[str, Tensor], scale: float = 1.0) -> dict[str, Any]:
        logits = self.logits(batch["x"]) * scale
        return {"logits": logits, "pair": (logits.sum(-1), batch["y"] + 1), "note": "fine"}


class Drop(nn.Module):
    def __init__(self, p: float = 0.5, width: int = 64) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(width, width, bias=False), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x))


def batch(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(BATCH, WIDTH, generator=generator),
        "y": torch.randint(0, CLASSES, (BATCH,), generator=generator),
    }


def net(kind: type[Net] = Net, seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind()
