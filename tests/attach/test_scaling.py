"""torch.amp.GradScaler around optimizers of ours; with several processes it is in tests/processes/operators.py."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.optim import Streamed
from tests.processes.compare import near
from tests.processes.models import batch, net


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_a_streamed_optimizer_steps_with_unscaled_gradients_or_not_at_all(one: DeviceMesh, options) -> None:
    """A fused optimizer says that it unscales by itself, which it does where it is told the scale."""
    plain, data = net(), batch()
    parallel = autopar.compile(plain, one, example_kwargs=data)
    # Adam does not notice a scale, plain SGD does
    ours = Streamed(torch.optim.SGD(parallel.parameters(), 0.1, **options), parallel)
    theirs = torch.optim.SGD(plain.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    plain(**data).backward()
    theirs.step()
    scaler.scale(parallel(**data)).backward()
    scaler.step(ours)
    scaler.update()
    for name, parameter in plain.named_parameters():
        near(parallel.get_parameter(name), parameter, 1e-6, name, 1e-7)
    before = {name: parameter.detach().clone() for name, parameter in parallel.named_parameters()}
    ours.zero_grad()
    scaler.scale(parallel(**data)).backward()
    parallel.head.weight.grad[0, 0] = torch.inf
    scaler.step(ours)
    scaler.update()
    assert scaler.get_scale() == 32.0
    assert all(torch.equal(parameter, before[name]) for name, parameter in parallel.named_parameters())
