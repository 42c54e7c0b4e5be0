"""What scripts change between calls in what Python's own helpers keep: partials, caches, tables of implementations,
weak tables, numbers of C's, loggers, the environment, enums, defaults.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_hook

import autopar

LOGGER = logging.getLogger("of_a_script")
VARIABLE = "A_SCRIPTS_FACTOR"


class Held:
    factor = 1.0

    def times(self, x: Tensor) -> Tensor:
        return x * self.factor

    @classmethod
    def of_class(cls) -> float:
        return 1.0

    of_it = 1.0

    @classmethod
    def by_class(cls) -> float:
        return cls.of_it


class Below(Held):
    pass


class Kind(enum.Enum):
    FIRST = 1

    def __init__(self, number: int) -> None:
        self.factor = float(number)


class Factor(float):
    more: float


class Model(nn.Module):
    """`does` what it is given with what it holds."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.does, self.linear, self.kind = does, nn.Linear(4, 4), Kind.FIRST
        self.partial = functools.partial(lambda x, factor: x * factor, factor=1.0)
        self.bound = functools.partial(Held().times)
        self.k_one, self.number = 1.0, Factor(2)
        self.number.more = 1.0
        self.several, self.sub = [functools.partial(lambda x, factor: x * factor, factor=1.0)], Below()
        self.partial.more = 1.0

    @staticmethod
    def still(x: Tensor) -> Tensor:
        return x

    @classmethod
    def of_class(cls) -> float:
        return 1.0

    def _by(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    by = functools.partialmethod(_by, factor=1.0)

    @functools.singledispatchmethod
    def dispatched(self, kind: Any, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, self.linear(x))


level = {"now": 1.0}
found_in, event = level.get, threading.Event()
native, shared, table, key = ctypes.c_double(1), multiprocessing.Value("d", 1.0), weakref.WeakKeyDictionary(), Held()


@functools.lru_cache
def cached(factor: float) -> float:
    return level["now"] * factor


@functools.singledispatch
def dispatched(kind: Any, x: Tensor) -> Tensor:
    return x


def by_name(x: Tensor, *, factor: float = 1.0) -> Tensor:
    return x * factor


def _set(owner: Any, name: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda model, patch: patch.setattr(owner, name, value, raising=False)


def _own(name: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda model, patch: setattr(model, name, value)


def _cleared(model: Any, patch: pytest.MonkeyPatch) -> None:
    cached.cache_clear()


def _registered(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.dispatched.register(float)(lambda self, kind, x: x * kind)


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, pytest.MonkeyPatch], None]]] = {
    "keywords of a partial": (lambda m, x: m.partial(x), lambda m, p: p.setitem(m.partial.keywords, "factor", 3.0)),
    "behind a partial's method": (lambda m, x: m.bound(x), lambda m, p: setattr(m.bound.func.__self__, "factor", 3.0)),
    "a cache that is cleared": (lambda m, x: x * cached(2.0), _cleared),
    "a number of C's": (lambda m, x: x * native.value, _set(native, "value", 3.0)),
    "one between processes": (lambda m, x: x * shared.value, _set(shared, "value", 3.0)),
    "a weak table": (lambda m, x: x * table[key], lambda m, p: table.__setitem__(key, 3.0)),
    "a static method": (lambda m, x: m.still(x), _set(Model, "still", staticmethod(lambda x: x * 3))),
    "the object's own": (lambda m, x: m.still(x), _own("still", lambda x: x * 3)),
    "a method of the class": (lambda m, x: x * m.of_class(), _set(Model, "of_class", classmethod(lambda cls: 3.0))),
    "of another class": (lambda m, x: x * Held.of_class(), _set(Held, "of_class", classmethod(lambda cls: 3.0))),
    "a partial method": (lambda m, x: m.by(x), _set(Model, "by", functools.partialmethod(Model._by, factor=3.0))),
    "an implementation for a kind": (lambda m, x: m.dispatched(3.0, x), _registered),
    "a logger's level": (
        lambda m, x: x * 3 if LOGGER.isEnabledFor(logging.DEBUG) else x,
        lambda m, p: LOGGER.setLevel(logging.DEBUG),
    ),
    "a variable of the environment": (
        lambda m, x: x * float(os.environ.get("A_SCRIPTS_FACTOR", "1")),
        lambda m, p: p.setenv(VARIABLE, "3"),
    ),
    "attributes at once": (
        lambda m, x: x * sum(value for name, value in vars(m).items() if name.startswith("k_")),
        _own("k_one", 3.0),
    ),
    "an attribute of an enum": (lambda m, x: x * m.kind.factor, _set(Kind.FIRST, "factor", 3.0)),
    "of an enum in a variable": (lambda m, x: x * Kind.FIRST.factor, _set(Kind.FIRST, "factor", 3.0)),
    "an attribute of a number": (lambda m, x: x * m.number.more, lambda m, p: setattr(m.number, "more", 3.0)),
    "a partial in a list": (
        lambda m, x: next(call(x) for call in m.several),
        lambda m, p: p.setitem(m.several[0].keywords, "factor", 3.0),
    ),
    "an attribute of a partial": (lambda m, x: x * m.partial.more, lambda m, p: setattr(m.partial, "more", 3.0)),
    "a table's own method": (lambda m, x: x * found_in("now"), lambda m, p: p.setitem(level, "now", 5.0)),
    "what a subclass is given": (lambda m, x: x * m.sub.by_class(), _set(Below, "of_it", 3.0)),
    "a method that a subclass is given": (
        lambda m, x: x * m.sub.of_class(),
        _set(Below, "of_class", classmethod(lambda cls: 3.0)),
    ),
    "a logger by its name": (
        lambda m, x: x * 3 if logging.getLogger("of_a_script").isEnabledFor(logging.DEBUG) else x,
        lambda m, p: LOGGER.setLevel(logging.DEBUG),
    ),
    "an event": (lambda m, x: x * 3 if event.is_set() else x, lambda m, p: event.set()),
    "a default by name": (lambda m, x: by_name(x), lambda m, p: p.setitem(by_name.__kwdefaults__, "factor", 3.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_script_changes_there_is_seen(one: DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    does, change = CASES[name]
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(level, "now", 1.0)
    cached.cache_clear()
    cached(2.0)
    monkeypatch.setitem(level, "now", 3.0)  # which is looked at once the cache is cleared
    LOGGER.setLevel(logging.WARNING)
    event.clear()
    native.value, shared.value, table[key] = 1.0, 1.0, 1.0
    plain, x = Model(does), torch.randn(2, 4)
    parallel = autopar.compile(plain, one)
    before = plain(x)
    for _ in range(3):
        torch.testing.assert_close(parallel(x), before)
    assert sum(map(len, parallel._autopar.programs.values())) == 1, "traced once"
    for model in (plain, parallel):
        change(model, monkeypatch)
    for _ in range(2):
        torch.testing.assert_close(parallel(x), plain(x))
    assert not torch.allclose(parallel(x), before)
    assert sum(map(len, parallel._autopar.programs.values())) == 2, "and once more"


def test_hooks_for_all_modules_are_refused_when_they_come(one: DeviceMesh) -> None:
    plain, x = Model(lambda m, x: x), torch.randn(2, 4)
    parallel = autopar.compile(plain, one)
    torch.testing.assert_close(parallel(x), plain(x))
    hook = register_module_forward_hook(lambda module, given, made: made * 2)
    try:
        with pytest.raises(RuntimeError, match="hooks are registered for all modules"):
            parallel(x)
    finally:
        hook.remove()
    torch.testing.assert_close(parallel(x), plain(x))
