"""Steps of a plain model and of its parallel one, on the same batches, with the same draws."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.processes.compare import same_gradients


def train_alike(plain: nn.Module, parallel: Any, batches: Iterable[Tensor]) -> list[float]:
    """The losses, which are the same, as gradients are, also where there are none."""
    losses = list[float]()
    for number, x in enumerate(batches):
        found = list[Tensor]()
        for model in (plain, parallel):
            model.zero_grad()
            random.seed(number)
            loss = model(x)
            loss.backward()
            found.append(loss.detach())
        torch.testing.assert_close(found[1], found[0], rtol=1e-12 if x.dtype == torch.float64 else 1e-6, atol=1e-14)
        same_gradients(plain, parallel)
        losses.append(float(found[0]))
    return losses


def penalise_alike(plain: nn.Module, parallel: Any, batches: Iterable[Tensor], seed: int = 0) -> None:
    """Likewise, with the norm of the gradient by each batch in the loss. `seed`: of the first one's draws."""
    for number, x in enumerate(batches, seed):
        x.requires_grad_()
        for model in (plain, parallel):
            model.zero_grad()
            random.seed(number)
            loss = model(x)
            (by_x,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + by_x.square().sum()).backward()
        same_gradients(plain, parallel)
