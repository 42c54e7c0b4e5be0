"""Models that hold a second copy of their weights, which follows the first in forward, and a queue of what it gives."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional


def follow(how: str, teacher: nn.Parameter, student: nn.Parameter, rate: float = 0.2) -> None:
    """Under no_grad, as scripts write it."""
    match how:
        case "data =":
            teacher.data = teacher.data * (1 - rate) + student.data * rate
        case "data.mul_":
            teacher.data.mul_(1 - rate).add_(student.data, alpha=rate)
        case "mul_":
            teacher.mul_(1 - rate).add_(student, alpha=rate)
        case "copy_":
            teacher.copy_(teacher * (1 - rate) + student * rate)
        case "lerp_":
            teacher.lerp_(student, rate)
        case other:
            raise ValueError(other)


HOW = ("data =", "data.mul_", "mul_", "copy_", "lerp_")


class Contrast(nn.Module):
    """Momentum contrast (He et al., 2020): a key encoder that follows, and a queue of its keys with a pointer that is a
    buffer.
    """

    def __init__(self, how: str = "data =", width: int = 8, keys: int = 32) -> None:
        super().__init__()
        self.how, self.keys = how, keys
        self.query = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, width))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(width, keys), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        for student, teacher in zip(self.query.parameters(), self.key.parameters(), strict=True):
            follow(self.how, teacher, student)

    @torch.no_grad()
    def put(self, keys: Tensor) -> None:
        count, place = len(keys), int(self.place)
        assert self.keys % count == 0
        self.queue[:, place : place + count] = keys.T
        self.place[0] = (place + count) % self.keys

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        query = functional.normalize(self.query(x), dim=1)
        with torch.no_grad():
            if self.training:
                self.follow()
            key = functional.normalize(self.key(y), dim=1)
        near = torch.einsum("nc,nc->n", query, key).unsqueeze(-1)
        far = query @ self.queue.clone().detach()
        logits = torch.cat([near, far], 1) / 0.2
        if self.training:
            self.put(key)
        return functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
