"""Settings behind decorators, weak references, threads, looks at dicts and classes of classes; tensors with a gradient
there.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrizations, parametrize

import autopar
from autopar.errors import TraceError
from tests.attach.test_settings import Inner, Model
from tests.processes.compare import near, same_gradients

scale, here, behind, table = Inner(), threading.local(), Inner(), {"weight": 1.0}
later = types.SimpleNamespace()
weak, seen = weakref.ref(behind), types.MappingProxyType(table)


def _by_place(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def made(*args: Any) -> Any:
        return call(*args) * scale.weight

    return made


def scaled(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def made(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) * scale.weight

    return made


@scaled
def one_and() -> float:
    return 1.0


@torch.no_grad()
def in_torchs() -> float:
    return scale.weight


class Scaling:
    """Called without its name."""

    def __call__(self, model: Any) -> float:
        return scale.weight


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @_by_place
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


class Kind(type):
    weight = 1.0


class OfKind(metaclass=Kind):
    pass


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @scaled
    def body(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


class WrappedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @scaled
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def _comes(space: types.SimpleNamespace, to: float) -> None:
    space.__dict__.clear()
    if to != 1.0:
        space.weight = to


def by_default(weight: float = 1.0) -> float:
    return weight


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[float], None]]] = {
    "a decorated function": (lambda: Model(lambda _: one_and()), lambda to: setattr(scale, "weight", to)),
    "a decorator of torch's": (lambda: Model(lambda _: in_torchs()), lambda to: setattr(scale, "weight", to)),
    "a decorated method": (Wrapped, lambda to: setattr(scale, "weight", to)),
    "a decorated forward": (WrappedForward, lambda to: setattr(scale, "weight", to)),
    "a forward without names": (Positional, lambda to: setattr(scale, "weight", to)),
    "an object that is called": (lambda: Model(Scaling()), lambda to: setattr(scale, "weight", to)),
    "a thread's": (lambda: Model(lambda _: here.weight), lambda to: setattr(here, "weight", to)),
    "a weak reference": (lambda: Model(lambda _: weak().weight), lambda to: setattr(behind, "weight", to)),  # type: ignore[union-attr]
    "a look at a dict": (lambda: Model(lambda _: seen["weight"]), lambda to: table.update(weight=to)),
    "an attribute by text": (
        lambda: Model(lambda _: getattr(scale, "weight", 3.0)), lambda to: setattr(scale, "weight", to)
    ),
    "an attribute that comes": (
        lambda: Model(lambda _: later.weight if hasattr(later, "weight") else 1.0), lambda to: _comes(later, to)
    ),
    "a key by text": (lambda: Model(lambda _: vars(scale)["weight"]), lambda to: setattr(scale, "weight", to)),
    "defaults": (lambda: Model(lambda _: by_default()), lambda to: setattr(by_default, "__defaults__", (to,))),
    "a class of classes": (lambda: Model(lambda _: OfKind.weight), lambda to: setattr(Kind, "weight", to)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(one: DeviceMesh, name: str) -> None:
    build, change = CASES[name]
    change(1.0)
    plain, x = build(), torch.rand(3, 4)
    parallel = autopar.compile(plain, one)
    for to in (1.0, 0.5, 2.0):
        change(to)
        near(parallel(x), plain(x), 1e-6, f"{name}: {to}")


held = types.SimpleNamespace(weight=None)


def _reading(how: str) -> nn.Module:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
            weight = held.weight if weight is None else weight
            assert weight is not None and weight.shape == (4, 4)
            if how == "detached":
                weight = weight.detach()
            if how == "without gradients":
                with torch.no_grad():
                    weight = weight * 1
            return (self.linear(x) + x @ weight).square().mean()

    return Reads()


def test_a_gradient_through_what_lies_outside_is_refused(one: DeviceMesh) -> None:
    """It would be dropped, silently. As an argument it gets one."""
    torch.manual_seed(0)
    plain, x = _reading("as it is"), torch.randn(3, 4)
    parallel = autopar.compile(plain, one)
    held.weight = 2 * torch.randn(4, 4, requires_grad=True)
    with pytest.raises(TraceError, match=r"reads a tensor \[4, 4\].* none of its parameters.* an argument of forward"):
        parallel(x)
    for model in (plain, parallel):
        model(x, 2 * model.linear.weight.detach().requires_grad_()).backward()
    same_gradients(plain, parallel)


@pytest.mark.parametrize("how", ["detached", "without gradients"])
@pytest.mark.parametrize("what", ["made", "a leaf", "a leaf that changes"])
def test_without_one_it_is_read(one: DeviceMesh, how: str, what: str) -> None:
    plain, x = _reading(how), torch.randn(3, 4)
    parallel, leaf = autopar.compile(plain, one), torch.randn(4, 4, requires_grad=True)
    for _ in range(3):
        held.weight = (
            2 * torch.randn(4, 4, requires_grad=True) if what == "made" else torch.randn(4, 4).requires_grad_()
        )
        if what == "a leaf that changes":
            held.weight = leaf
            leaf.data.mul_(1.5)
        near(parallel(x), plain(x), 1e-6, f"{how}: {what}")


class OfItself(nn.Module):
    """Reads what the script makes of its own weight, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        average = held.weight
        made = self.linear(x) + x @ average.t() + average[0] + torch.where(average > 0, average, 0.0).sum(0)
        return (made + average.reshape(-1)[:4].softmax(0)).square().mean()


def test_an_average_of_its_own_weight_is_read(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = OfItself()
    pair, x = (plain, autopar.compile(copy.deepcopy(plain), one)), torch.randn(3, 4)
    for _ in range(3):
        for model in pair:
            held.weight = 0.9 * model.linear.weight.detach().clone()
            model(x).backward()
        same_gradients(*pair)
        for model in pair:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()


@pytest.mark.parametrize("order", ["call first", "weight first"])
def test_parametrizations_that_a_script_caches(one: DeviceMesh, order: str) -> None:
    plain, x = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh()), torch.randn(3, 4)
    parallel = autopar.compile(plain, one)
    for _ in range(2):
        for model in (plain, parallel):
            with parametrize.cached():
                terms = [lambda model=model: model(x).square().mean(), lambda model=model: model[0].weight.abs().mean()]
                first, second = (term() for term in (terms if order == "call first" else terms[::-1]))
                (first + second).backward()
        same_gradients(plain, parallel)
