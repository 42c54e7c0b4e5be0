"""What forward asks of torch, and is told as without autopar."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_exporting
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near


class Streams(nn.Module):
    """Notes in training alone, goes on from its last row in calls without gradients, and asks values for theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(1, 4), persistent=False)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.layer(x))
        if torch.is_grad_enabled():
            self.mean += h.detach().mean(0)
            self.calls += 1
        else:
            h = torch.cat([self.last, h])
            self.last = h[-1:]
        if h.requires_grad:
            h = h * 2
        if h.grad_fn is not None:
            h = h + 1
        with torch.no_grad():
            has_gradient = (h + 1).requires_grad or torch.is_grad_enabled()
        return {"loss": h.square().mean(), "h": h if has_gradient else h - 0.5}


@pytest.mark.parametrize("calls", ["ttnntentei", "ntnte", "eitt"])
def test_whether_there_are_gradients(calls: str, one: DeviceMesh) -> None:
    """Calls that train, without gradients in train mode and in eval mode, and in inference mode, in any order."""
    torch.manual_seed(0)
    plain = Streams()
    models: tuple[Any, ...] = (plain, autopar.compile(copy.deepcopy(plain), one))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for number, kind in enumerate(calls):
        found: list[Any] = []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(number)
            model.train(kind in "tn")
            with torch.inference_mode(kind == "i"), torch.set_grad_enabled(kind == "t"):
                made = model(torch.randn(3, 4))
            if kind == "t":
                made["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([made["h"], model.mean, model.last, model.norm.running_mean])
            assert made["h"].requires_grad == (kind == "t") and model.calls == models[0].calls
        for place, (theirs, ours) in enumerate(zip(*found, strict=True)):
            near(ours, theirs, 1e-5, f"call {number}, value {place}")


class Asks(nn.Module):
    def __init__(self, asks: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.layer, self.asks = nn.Linear(4, 4), asks

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return (h * 2 if self.asks(x) else h).square().mean()


ASKED: dict[str, Callable[[Tensor], bool]] = {
    "compiling": lambda _: torch.compiler.is_compiling(),
    "exporting": lambda _: torch.compiler.is_exporting() or is_exporting(),
    "both": lambda _: bool(torch.compiler.is_compiling() | False),
    "type": lambda x: type(x) is not torch.Tensor,
    "type in a table": lambda x: {torch.Tensor: False}.get(type(x), True),
}


@pytest.mark.parametrize("told", ASKED)
def test_nobody_is_told_that_it_is_traced(told: str, one: DeviceMesh) -> None:
    plain, x = Asks(ASKED[told]), torch.randn(3, 4)
    near(autopar.compile(copy.deepcopy(plain), one)(x), plain(x), 1e-5, told)


def seeded(_: Tensor) -> bool:
    torch.manual_seed(0)
    return True


def with_its_own_seed(_: Tensor) -> bool:
    with torch.random.fork_rng():
        return True


@pytest.mark.parametrize(
    ("asks", "told"),
    [
        (seeded, r"seeds the random generator, or asks for its state \(manual_seed\) at .*test_asked.py"),
        (with_its_own_seed, r"\(fork_rng\) at .*test_asked.py"),
        (lambda _: torch.get_rng_state().numel() > 0, r"\(get_rng_state\) at .*test_asked.py"),
    ],
)
def test_seeds_are_refused(asks: Callable[[Tensor], bool], told: str, one: DeviceMesh) -> None:
    parallel = autopar.compile(Asks(asks), one)
    before = torch.get_rng_state()
    with pytest.raises(TraceError, match=told):
        parallel(torch.ones(3, 4))
    assert torch.get_rng_state().equal(before)


def test_gradients_of_parameters_are_not_read_in_forward(one: DeviceMesh) -> None:
    class Reads(Asks):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean() if self.layer.weight.grad is None else self.layer(x).sum()

    with pytest.raises(TraceError, match=r"forward reads \.grad of a parameter at .*test_asked.py"):
        autopar.compile(Reads(seeded), one)(torch.ones(3, 4))


class Counts(nn.Module):
    """Asks buffers of one element behind its writes to them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(1, dtype=dtype))
        self.register_buffer("seen", torch.tensor(0, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.seen.add_(len(x))
        loss = self.layer(x).square().mean()
        loss = loss * 2 if self.steps <= 3 else loss
        return loss / 3 if self.seen.item() > 12 and int(self.steps) % 2 else loss


@pytest.mark.filterwarnings("ignore:the model is traced and planned for the 4th time")
@pytest.mark.parametrize("dtype", [torch.long, torch.float32, torch.float64])
def test_a_buffer_of_one_element_is_asked_behind_a_write(dtype: torch.dtype, one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Counts(dtype)
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    for call in range(9):
        x = torch.randn(3, 4)
        near(parallel(x), plain(x), 1e-5, f"call {call}")
        assert parallel.steps.equal(plain.steps) and parallel.seen.equal(plain.seen)


def test_numbers_of_numpy_are_numbers(one: DeviceMesh) -> None:
    class Scales(Asks):
        def forward(self, x: Tensor, by: float) -> Tensor:  # type: ignore[override]
            return self.layer(x).square().mean() * by

    plain, x = Scales(seeded), torch.randn(3, 4)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for by in (np.float32(2), np.float64(0.5), np.int64(3)):
        near(parallel(x, by), plain(x, by), 1e-5, repr(by))


def test_a_buffer_that_gets_another_shape_has_another_program(one: DeviceMesh) -> None:
    class Bank(Asks):
        def __init__(self) -> None:
            super().__init__(seeded)
            self.register_buffer("bank", torch.randn(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) @ self.bank.t()).logsumexp(1).mean()

    plain, x = Bank(), torch.randn(3, 4)
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    for rows in (5, 7, 5):
        plain.bank = torch.randn(rows, 4)
        parallel.bank = plain.bank.clone()
        near(parallel(x), plain(x), 1e-5, f"{rows} rows")


def test_a_hook_of_an_output_that_nobody_holds_is_seen(one: DeviceMesh) -> None:
    class Two(Asks):
        def forward(self, x: Tensor) -> Any:
            h = self.layer(x)
            return h.square().mean(), h

    parallel: Any = autopar.compile(Two(seeded), one)

    def loss() -> Tensor:
        made, h = parallel(torch.randn(3, 4))
        h.register_hook(lambda gradient: gradient)
        return made

    with pytest.raises(RuntimeError, match="output 1 of the module has a hook"):
        loss().backward()


class Both(nn.Module):
    """Asks its labels, and then values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        same = (labels[None] == labels[:, None]).byte()
        if all(len(one) <= 1 for one in (*torch.where(same), *torch.where(same ^ 1))):
            return x.sum()
        made = self.layer(x).sum()
        return made if made > 0 else {"loss": -made}


def test_the_line_is_told_that_asks_what_arguments_do_not_say(one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"depends on values at .*made if made > 0 else"):
        autopar.compile(Both(), one)(torch.randn(3, 4), torch.tensor([1, 1, 0]))
