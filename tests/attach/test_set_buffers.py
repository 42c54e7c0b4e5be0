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
        if self.of == "dict":
            self._buffers["mean"] = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.of == "again":
            mean = self.mean
            del self.mean
            self.register_buffer("mean", 0.9 * mean + 0.1 * x.detach().mean(0))
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
    "swapped by the model itself": lambda: Centred("swap"),
    "put where they lie": lambda: net(lambda: Centred("dict")),
    "put where they lie in the model itself": lambda: Centred("dict"),
    "registered again": lambda: net(lambda: Centred("again")),
    "registered again in the model itself": lambda: Centred("again"),
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
        theirs = dict(plain.named_buffers())
        for name, buffer in parallel.named_buffers():
            near(buffer, theirs.pop(name), 1e-6, f"step {step}: {name}")
        assert not theirs
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


def takes_away(module: Any, given: tuple[Tensor, ...], made: Tensor) -> None:
    del module.before


def saves_it_no_more(module: Any, given: tuple[Tensor, ...], made: Tensor) -> None:
    module.register_buffer("mean", module.mean * 2, persistent=False)


def sets_a_parameter(module: Any, given: tuple[Tensor, ...], made: Tensor) -> None:
    module._parameters["weight"] = nn.Parameter(module.weight.detach() * 2)


@pytest.mark.parametrize(
    ("hook", "place", "told"),
    [
        (takes_away, 1, r"takes the buffer 1\.before away"),
        (
            saves_it_no_more,
            1,
            r"registers the buffer mean of a Centred again at .*persistent=False, as it was not before",
        ),
        (sets_a_parameter, 2, r"sets self\.2\.weight to a parameter"),
    ],
)
def test_what_is_registered_stays(one: DeviceMesh, hook: Any, place: int, told: str) -> None:
    model = net(Centred)
    model[place].register_forward_hook(hook)
    with pytest.raises(TraceError, match=told):
        autopar.compile(model, one)(torch.randn(5, 8))


@pytest.mark.parametrize("of", ["hook", "forward"])
def test_one_tensor_in_two_places_is_refused(one: DeviceMesh, of: str) -> None:
    """Whether one of them sets it or both do, which would part them."""
    model = nn.Sequential(nn.Linear(8, 8), Centred(), Centred(of))
    model[2].mean = model[1].mean
    parallel = autopar.compile(model, one)
    with pytest.raises(TraceError, match=r"the buffer 1\.mean .* make them two"):
        parallel(torch.randn(5, 8))


class Registers(nn.Module):
    """A table that forward makes, and makes anew where it is too short; one that is what the first batch gives."""

    def __init__(self, begins: str, persistent: bool = False) -> None:
        super().__init__()
        self.layer, self.persistent, self.begins = nn.Linear(4, 4), persistent, begins
        if begins != "absent":
            table = torch.arange(2.0)[:, None] if begins == "short" else None
            self.register_buffer("table", table, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        table: Tensor | None = getattr(self, "table", None)
        if self.begins == "first batch":
            if table is None:
                self.register_buffer("table", hidden.detach()[:2], persistent=self.persistent)
            return (hidden - self.table.mean(0)).square().mean()
        if table is None or len(table) < len(x):
            self.register_buffer("table", torch.arange(float(len(x)))[:, None], persistent=self.persistent)
        return (hidden + self.table[: len(x)]).square().mean()


@pytest.mark.parametrize("begins", ["none", "absent", "short", "first batch"])
def test_forward_registers_a_buffer_that_nobody_saves(begins: str, one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Registers(begins)
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    for rows in (3, 3, 5, 2, 6):
        x = torch.randn(rows, 4)
        losses = [model(x) for model in (plain, parallel)]
        near(losses[1], losses[0], 1e-6, f"{rows} rows")
        for loss in losses:
            loss.backward()
        near(parallel.table, plain.table, 1e-6, f"{rows} rows")
    same_gradients(plain, parallel)
    assert parallel.state_dict().keys() == plain.state_dict().keys()


def test_one_that_is_saved_is_not_registered_in_forward(one: DeviceMesh) -> None:
    parallel = autopar.compile(Registers("none", persistent=True), one)
    with pytest.raises(TraceError, match=r"forward makes the buffer table, of shape \(3, 1\)"):
        parallel(torch.randn(3, 4))


def test_a_buffer_has_no_gradient_in_forward(one: DeviceMesh) -> None:
    """Quantizers of vectors ask."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            if self.mean.grad is None:
                self.mean.lerp_(self.layer(x).detach().mean(0), 0.5)
            return (self.layer(x) - self.mean).square().mean()

    plain = Asks()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x = torch.randn(3, 4)
    near(parallel(x), plain(x), 1e-6, "loss")


def test_a_buffer_that_forward_resizes_is_refused(one: DeviceMesh) -> None:
    """Observers of quantizers do; behind a first call of the plain model they have their sizes."""

    class Resizes(nn.Module):
        least: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("least", torch.tensor([]))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            if self.least.numel() == 0:
                self.least.resize_(4).fill_(9.0)
            self.least.copy_(torch.minimum(self.least, hidden.detach().amin(0)))
            return (hidden - self.least).square().mean()

    plain, x = Resizes(), torch.randn(3, 4)
    with pytest.raises(TraceError, match=r"resizes the buffer least from \(0,\) to \(4,\).* call the plain model once"):
        autopar.compile(copy.deepcopy(plain), one)(x)
    plain(x)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    near(parallel(x), plain(x), 1e-6, "loss")


def test_a_buffer_may_be_none_from_a_call_on(one: DeviceMesh) -> None:
    """A batch norm without running statistics takes those of each batch."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    for call in range(3):
        x = torch.randn(6, 4)
        for model in (plain, parallel):
            if call == 1:
                model[1].running_mean = model[1].running_var = None
                model.eval()
        near(parallel(x), plain(x), 1e-5, f"call {call}")
