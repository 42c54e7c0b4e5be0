"""Buffers that forward, or a hook, sets to new tensors (`self.mean = 0.9 * self.mean + ..`), in whichever module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near, same_gradients


class Centred(nn.Module):
    """Takes its running mean off."""

    def __init__(self, of: str = "forward") -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("before", torch.ones(8))
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.of == "forward":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.of == "swap":
            self.before, self.mean = self.mean, self.before
        return x - self.mean


def net(norm: Callable[[], nn.Module], hook: Any = None, before: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), norm(), nn.Linear(8, 2))
    if hook is not None:
        (model[1].register_forward_pre_hook if before else model[1].register_forward_hook)(hook)
    return model


def at_a_hook(module: Any, given: tuple[Tensor, ...], made: Tensor | None = None) -> None:
    module.mean = 0.9 * module.mean + 0.1 * given[0].detach().square().mean(0)


class Queue(nn.Module):
    """Reads what backward needs before it sets it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(8, 8)
        self.register_buffer("queue", torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys(x)
        scores = keys @ self.queue
        self.queue = torch.cat([self.queue[:, 4:], keys.detach()[:4].T], 1)
        return scores


KINDS: dict[str, Callable[[], nn.Module]] = {
    "of the model itself": lambda: nn.Sequential(nn.Linear(8, 8), Centred())[1],
    "of a part": lambda: net(Centred),
    "a queue of a part": lambda: nn.Sequential(nn.Linear(8, 8), Queue(), nn.Tanh()),
    "swapped": lambda: net(lambda: Centred("swap")),
    "in a hook": lambda: net(lambda: Centred("hook"), at_a_hook),
    "in a hook in front": lambda: net(lambda: Centred("hook"), at_a_hook, before=True),
    "of a part of a part": lambda: nn.Sequential(net(Centred), nn.Tanh(), net(lambda: nn.Linear(2, 8))[1]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_there_behind_each_call(one: DeviceMesh, kind: str) -> None:
    plain = KINDS[kind]()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(4):
        x = torch.randn(5, 8, requires_grad=not [*plain.parameters()])
        for model in (parallel, plain):
            model.train(step != 2).zero_grad()
        ours, theirs = parallel(x), plain(x)
        near(ours, theirs, 1e-6, f"step {step}")
        for given in (ours, theirs):
            given.square().mean().backward()
        same_gradients(plain, parallel)
        for (name, buffer), (_, right) in zip(parallel.named_buffers(), plain.named_buffers(), strict=True):
            near(buffer, right, 1e-6, f"step {step}: {name}")
        assert parallel.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (lambda module, x: module.mean.double(), r"sets the buffer 1\.mean of torch\.float32 to one of torch\.float64"),
        (lambda module, x: x.detach(), r"makes the buffer 1\.mean, of shape \(5, 8\)"),
        (lambda module, x: None, r"makes the buffer 1\.mean, of shape None"),
    ],
)
def test_of_another_kind_they_are_refused(one: DeviceMesh, after: Callable[[Any, Tensor], Any], told: str) -> None:
    def hook(module: Any, given: tuple[Tensor, ...], made: Tensor) -> None:
        module.mean = after(module, given[0])

    parallel = autopar.compile(net(lambda: Centred("hook"), hook), one)
    with pytest.raises(TraceError, match=told):
        parallel(torch.randn(5, 8))


@pytest.mark.parametrize("of", ["hook", "forward"])
def test_one_tensor_in_two_places_is_refused(one: DeviceMesh, of: str) -> None:
    """Whether one of them sets it or both do, which would part them."""
    model = nn.Sequential(nn.Linear(8, 8), Centred(), Centred(of))
    model[2].mean = model[1].mean
    parallel = autopar.compile(model, one)
    with pytest.raises(TraceError, match=r"the buffer 1\.mean .* make them two"):
        parallel(torch.randn(5, 8))
