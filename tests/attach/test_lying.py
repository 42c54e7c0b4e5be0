"""How outputs lie in memory: a script may view them as it views the model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autopar
from tests.processes.compare import near, same_gradients


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x.transpose(0, 1))
        return y, y.relu().transpose(0, 1), self.linear(x)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.last = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        packed = pack_padded_sequence(x, [5, 2, 4, 3], batch_first=True, enforce_sorted=False)
        return (self.last(pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0]),)


@pytest.mark.parametrize("kind", [Turned, Tagger])
def test_outputs_without_gaps_have_none(one: DeviceMesh, kind: Callable[[], Any]) -> None:
    plain = kind()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x = torch.randn(4, 5, 8)
    losses = list[Tensor]()
    for model in (parallel, plain):
        outputs = model(x)
        assert outputs[0].is_contiguous()
        losses.append(sum((one.square().mean() for one in outputs), outputs[0].view(-1, 6).sin().sum()))
        losses[-1].backward()
    near(losses[0], losses[1], 1e-6, "loss")
    same_gradients(plain, parallel)
