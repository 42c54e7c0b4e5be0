"""Checks of how many rows a mask picks, as models of images and text have them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils import torch_compilable_check

import autopar
from autopar.errors import CheckFailed
from tests.processes.compare import both_backward, same_gradients


class Merged(nn.Module):
    """Puts features of an image in the place of its tokens, as many as values say."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.image = nn.Linear(4, 4).double(), nn.Linear(3, 4).double()

    def forward(self, x: Tensor, pixels: Tensor, there: Tensor) -> Tensor:
        h, features = self.words(x), self.image(pixels)
        mask, features = h[:, 0] > h[:, 1].detach(), features[there]
        torch_compilable_check(
            h[mask].numel() >= features.numel(), f"tokens: {mask.sum()}, features: {features.shape[0]}"
        )
        torch_compilable_check(features.shape[0] <= len(there), "too many")
        return h.square().mean() + features.sum() * h[mask].mean()


def test_they_are_looked_at_in_each_call(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Merged()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for count in (1, 2):
        there = torch.arange(5) < count
        both_backward(plain, parallel, torch.randn(16, 4).double(), torch.randn(5, 3).double(), there, within=1e-12)
    same_gradients(plain, parallel)
    with pytest.raises((CheckFailed, RuntimeError)):
        parallel(torch.randn(1, 4).double(), torch.randn(5, 3).double(), torch.ones(5, dtype=torch.bool))
