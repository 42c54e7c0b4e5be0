"""Forwards that ask whether two of their arguments are one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.own(x) if context is None or context is x else self.cross(context)


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.inner(x, context).square().mean()


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.own(x) + context


@pytest.mark.parametrize("inputs", ["global", "local"])
def test_one_thing_under_two_names_is_refused_where_forward_asks(one: DeviceMesh, inputs: Any) -> None:
    plain = Net(Attention())
    parallel = autopar.compile(copy.deepcopy(plain), one, inputs=inputs)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    near(parallel(x, y), plain(x, y), 1e-6, "loss")
    with pytest.raises(TraceError, match=r"forward asks whether context is x at .*test_identity.py:\d+, and this call"):
        parallel(x, x)


def test_where_it_does_not_ask_it_is_as_two(one: DeviceMesh) -> None:
    plain = Net(Added())
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x = torch.randn(6, 4)
    for given in ((x, x), (x, x.clone())):
        near(parallel(*given), plain(*given), 1e-6, "loss")
