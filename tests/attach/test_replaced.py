"""What a script gives objects, classes and tables between calls: methods, classes, implementations, names."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import GPT2Config

import autopar


class Scale:
    """What is looked at by all kinds of ways."""

    def __init__(self) -> None:
        self.factor = 2.0

    def times(self, x: Tensor) -> Tensor:
        return x * self.factor

    def __call__(self, x: Tensor) -> Tensor:
        return x - self.factor

    def __mul__(self, x: Tensor) -> Tensor:
        return x * self.factor


class Doubled(Scale):
    pass


class Tripled(Scale):
    def times(self, x: Tensor) -> Tensor:
        return x * 3


class Plain(nn.Linear):
    pass


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


held = Scale()
reference, proxy, method = weakref.ref(held), weakref.proxy(held), weakref.WeakMethod(held.times)
values, keys, members = (
    weakref.WeakValueDictionary(one=held),
    weakref.WeakKeyDictionary({held: 1}),
    weakref.WeakSet([held]),
)
level = 1.0


@functools.lru_cache
def cached(factor: float) -> float:
    return factor * level


@functools.singledispatch
def dispatched(kind: Any, x: Tensor) -> Tensor:
    return x


def of_names(x: Tensor) -> Tensor:
    for name in ("before", "times"):
        function = getattr(held, name, None)
        x = x if function is None else function(x)
    return x


def of_what_comes_later(x: Tensor) -> Tensor:
    try:
        return x * later
    except NameError:
        return x


def of_class(x: Tensor) -> Tensor:
    return x * 3 if isinstance(held, Doubled) else x


class Calls(Base):
    """`does` what it is given, with an object that it holds."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.does, self.scale = does, Scale()
        self.seen, self.doubled, self.other = weakref.ref(held), Doubled(), Plain(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, self.linear(x))


def _replace(owner: Any, name: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda model, patch: patch.setattr(owner, name, value, raising=False)


def _level(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "level", 5.0)
    cached.cache_clear()


def _register(model: Any, patch: pytest.MonkeyPatch) -> None:
    dispatched.register(int)(lambda kind, x: x * kind)


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, pytest.MonkeyPatch], None]]] = {
    "a method of a class": (lambda m, x: m.scale.times(x), _replace(Scale, "times", lambda self, x: x * 9)),
    "a method of an object": (
        lambda m, x: m.scale.times(x),
        lambda m, patch: patch.setattr(m.scale, "times", lambda x: x * 9, raising=False),
    ),
    "a method of a global": (lambda m, x: held.times(x), _replace(held, "times", lambda x: x * 9)),
    "its class's": (lambda m, x: held.times(x), _replace(Scale, "times", lambda self, x: x * 9)),
    "behind a reference": (lambda m, x: x * reference().factor, _replace(held, "factor", 5.0)),
    "behind the module's": (lambda m, x: x * m.seen().factor, _replace(held, "factor", 5.0)),
    "behind a proxy": (lambda m, x: x * proxy.factor, _replace(held, "factor", 5.0)),
    "behind a weak method": (lambda m, x: method()(x), _replace(held, "factor", 5.0)),
    "in a table of values": (lambda m, x: x * values["one"].factor, _replace(held, "factor", 5.0)),
    "in a table of keys": (lambda m, x: x * sum(one.factor for one in keys), _replace(held, "factor", 5.0)),
    "in a set": (lambda m, x: x * sum(one.factor for one in members), _replace(held, "factor", 5.0)),
    "what a cached function reads": (lambda m, x: x * cached(1.0), _level),
    "read by names in a loop": (lambda m, x: of_names(x), _replace(held, "factor", 5.0)),
    "found by names in a loop": (lambda m, x: of_names(x), _replace(held, "before", lambda x: x * 7)),
    "a global that comes": (lambda m, x: of_what_comes_later(x), lambda m, p: p.setitem(globals(), "later", 3.0)),
    "the class of an object": (lambda m, x: of_class(x), _replace(held, "__class__", Doubled)),
    "a method that was inherited": (
        lambda m, x: m.doubled.times(x),
        _replace(Doubled, "times", lambda self, x: x * 9),
    ),
    "a forward that was inherited": (lambda m, x: m.other(x), _replace(Plain, "forward", lambda self, x: x * 9)),
    "the class of what a module holds": (
        lambda m, x: m.doubled.times(x),
        lambda m, patch: patch.setattr(m.doubled, "__class__", Tripled),
    ),
    "what is called": (lambda m, x: m.scale(x), _replace(Scale, "__call__", lambda self, x: x * 9)),
    "an operator": (lambda m, x: m.scale * x, _replace(Scale, "__mul__", lambda self, x: x * 9)),
    "an operator of a global": (lambda m, x: held * x, _replace(Scale, "__mul__", lambda self, x: x * 9)),
    "a flag of torch": (
        lambda m, x: x * (3 if torch.are_deterministic_algorithms_enabled() else 1),
        lambda m, patch: torch.use_deterministic_algorithms(True),
    ),
    "another implementation": (lambda m, x: dispatched(2, x), _register),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_script_replaces_is_seen(one: DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    does, change = CASES[name]
    cached.cache_clear()
    torch.use_deterministic_algorithms(False)
    plain, x = Calls(does), torch.randn(2, 4)
    parallel = autopar.compile(plain, one)
    for number in range(2):
        for _ in range(2):
            torch.testing.assert_close(parallel(x), plain(x))
        assert sum(map(len, parallel._autopar.programs.values())) == number + 1, "traced once for each state"
        for model in (plain, parallel):
            change(model, monkeypatch)
    torch.testing.assert_close(parallel(x), plain(x))
    torch.use_deterministic_algorithms(False)


def test_the_forward_of_the_models_own_class(one: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * 2

    plain, x = Own(), torch.randn(2, 4)
    parallel = autopar.compile(plain, one)
    before = parallel(x)
    monkeypatch.setattr(Own, "forward", lambda self, x: self.linear(x) * 4)
    torch.testing.assert_close(parallel(x), 2 * before)


def test_numbers_of_a_packages_class_are_seen(one: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a script's; of its methods only a script's classes are looked at."""

    class Configured(Base):
        def __init__(self) -> None:
            super().__init__()
            self.config = GPT2Config()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * len(self.config.model_type)

    plain, x = Configured(), torch.randn(2, 4)
    parallel = autopar.compile(plain, one)
    before = parallel(x)
    monkeypatch.setattr(GPT2Config, "model_type", "x")
    torch.testing.assert_close(parallel(x), before / 4)
