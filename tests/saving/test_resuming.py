"""States of a plain optimizer are loaded into `Streamed` at any time, and training goes on as it would have."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.optim import Streamed

BEFORE, STEPS = 2, 5


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).double()
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pin", [{"0": "offload-parameters"}, {"*": "offload-optimizer"}], ids=str)
def test_training_goes_on_as_it_would_have(
    one: DeviceMesh, pin: dict[str, str], overlap: bool, is_planned: bool
) -> None:
    plain = _model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for number in range(BEFORE):
        _step(plain, optimizer, number)
    states = copy.deepcopy((plain.state_dict(), optimizer.state_dict()))
    wanted = [_step(plain, optimizer, number) for number in range(BEFORE, STEPS)]
    parallel = autopar.compile(_model(), one, pin=pin)
    streamed = Streamed(torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9), parallel, overlap=overlap)
    if is_planned:
        _step(parallel, streamed, 0)
    parallel.load_state_dict(states[0])
    streamed.load_state_dict(states[1])
    assert [_step(parallel, streamed, number) for number in range(BEFORE, STEPS)] == pytest.approx(wanted, rel=1e-12)
