"""Buffers that forward sets to tensors of other shapes, or with a gradient that goes on into the next call, as spiking
networks have their membranes: they are plain attributes from then on, where nobody saves them.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near, same_gradients


class Leaky(nn.Module):
    """A neuron that all of its kind are reset with, as snntorch has it."""

    instances: ClassVar[list[nn.Module]] = []

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        Leaky.instances.append(self)
        self.register_buffer("membrane", torch.zeros(0), persistent=persistent)

    def forward(self, current: Tensor) -> Tensor:
        if self.membrane.shape != current.shape:
            self.membrane = torch.zeros_like(current)
        self.membrane = 0.9 * self.membrane + current
        return torch.sigmoid(4 * self.membrane - 2)

    @classmethod
    def reset(cls) -> None:
        for one in cls.instances:
            one.membrane = torch.zeros_like(one.membrane)


class Spiking(nn.Module):
    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), Leaky(persistent), nn.Linear(8, 3), Leaky(persistent))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.filterwarnings("ignore:the model is traced and planned for the")
def test_membranes_carry_gradients_through_calls(one: DeviceMesh) -> None:
    """Reset in front of each sequence by the list of the class, and of another number of rows in one of them."""
    torch.manual_seed(0)
    plain = Spiking()
    parallel: Any = autopar.compile(plain, one)
    plain = copy.deepcopy(plain)
    Leaky.instances += [plain.layers[1], plain.layers[3]]
    names = [*plain.state_dict()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (parallel, plain)]
    for sequence in range(4):
        Leaky.reset()
        xs = torch.randn(3, 2 if sequence == 2 else 4, 6)
        for model, optimizer in zip((parallel, plain), optimizers, strict=True):
            optimizer.zero_grad()
            torch.stack([model(x) for x in xs]).square().mean().backward()
        same_gradients(plain, parallel)
        for number in (1, 3):
            near(parallel.layers[number].membrane, plain.layers[number].membrane, 1e-5, f"sequence {sequence}")
        for optimizer in optimizers:
            optimizer.step()
    assert [*parallel.state_dict()] == names
    assert len(parallel._autopar.prepared()) <= 6


def test_the_model_that_was_traced_keeps_its_buffers() -> None:
    from autopar.trace import capture

    model = Spiking()
    captured = capture(model, (torch.randn(4, 6),), {})
    assert {name for name, _ in model.named_buffers()} == {"layers.1.membrane", "layers.3.membrane"}
    assert captured.reads.unregistered == {("layers.1", "membrane"), ("layers.3", "membrane")}
    assert not model.state_dict().keys() & dict(model.named_buffers()).keys()


def test_what_is_saved_stays_a_buffer(one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"makes the buffer layers\.1\.membrane, of shape \(4, 8\)"):
        autopar.compile(Spiking(persistent=True), one)(torch.randn(4, 6))
