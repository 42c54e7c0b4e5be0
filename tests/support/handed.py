"""A model that gives what it was given, buffers, looks at them and copies of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class HandsOn(nn.Module):
    """Its last outputs are apart, although their values are those of others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("memory", torch.randn(3, 4))
        self.register_buffer("read", torch.randn(5, 4))
        self.register_buffer("seen", torch.zeros(()))
        self.last: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Any, ...]:
        h = self.layer(x) + self.read.mean(0)
        self.seen += 1
        self.memory[0].copy_(h.detach()[0])
        self.last = h.clone()
        there = (x, mask, self.memory, self.read, self.seen)
        looks = (x[1], x.view(-1)[2:], self.memory[0], self.memory.t(), self.read[2:], self.read.view(-1))
        again = (h.detach(), h.detach()[0], {"h": h})
        apart = (h + 1, h + 1, h.clone(), h.clone(), h.detach().clone(), self.memory.clone()[0], self.read.clone()[1])
        return h, there, looks, again, apart, (x.clone()[0], x.clone(), torch.tensor([1.0, 2.0]))
