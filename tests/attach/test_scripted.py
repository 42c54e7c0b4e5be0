"""Functions of torch.jit.script in forward: as on one process, whether they have run before or not."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.compare import both_backward, same_gradients

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def swish(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    @torch.jit.script
    def gated(x: Tensor, y: Tensor) -> Tensor:
        """As WaveGlow and VITS have it."""
        if x.dim() > 1:
            return torch.tanh(x) * swish(y)
        return x

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    SCRIPTED = torch.jit.script(Inner())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(gated(h, swish(h))).square().mean()


@pytest.mark.parametrize("is_warm", [pytest.param(False, marks=pytest.mark.slow), True])
def test_parameters_ahead_of_them_have_gradients(one: DeviceMesh, is_warm: bool) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    for _ in range(4 * is_warm):  # behind which there is a plan of torch's, with a backward of its own
        plain(torch.randn(3, 4).double()).backward()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for rows in (3, 3, 5, 4):
        x = torch.randn(rows, 4).double()
        plain.zero_grad(), parallel.zero_grad()
        both_backward(plain, parallel, x, within=1e-12)
        assert plain.first.weight.grad is not None and plain.first.weight.grad.any()
        same_gradients(parallel, plain)


def test_a_scripted_module_is_refused(one: DeviceMesh) -> None:
    told = r"module 1 of the model is compiled by torch.jit \(RecursiveScriptModule\), which leaves no Python code"
    with pytest.raises(ValueError, match=told):
        autopar.compile(nn.Sequential(nn.Linear(4, 4), SCRIPTED), one)
