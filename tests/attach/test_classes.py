"""What code may ask of the classes of modules and settings, which are watched while a model is traced."""

from __future__ import annotations

import copy
import functools
import types
from collections import ChainMap, UserDict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near, same_gradients


@dataclass
class Setting:
    scale: float = 1.5


@dataclass(frozen=True, order=True)
class Frozen:
    scale: float = 1.5


class Model(nn.Module):
    """`told`: gives a number of the model, by which the outputs are multiplied."""

    def __init__(self, told: Callable[[Any], float], cfg: Any = None) -> None:
        super().__init__()
        self.linear, self.told, self.cfg = nn.Linear(8, 8), told, cfg

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).tanh() * self.told(self)).square().mean()


def same(one: DeviceMesh, made: Callable[[], nn.Module], change: Callable[[Any], object] | None = None) -> None:
    """The numbers of plain PyTorch, in two calls, and in two more after a change of both models."""
    torch.manual_seed(5)
    plain, x = made(), torch.randn(4, 8)
    model = made()
    model.load_state_dict(plain.state_dict())
    parallel = autopar.compile(model, one)
    for number in range(4):
        if number == 2 and change is not None:
            change(plain), change(parallel)
        plain.zero_grad(), parallel.zero_grad()
        ours, theirs = parallel(x), plain(x)
        near(ours, theirs, 1e-6, f"call {number}")
        ours.backward(), theirs.backward()
        same_gradients(plain, parallel)


TABLE, OF_CLASS = {Frozen(2.5): 3.0}, {Setting: 2.0, nn.Linear: 4.0}
GLOBAL = Setting(2.5)
ASKED: dict[str, tuple[Callable[[Any], float], Any]] = {
    "equal": (lambda m: 2.0 if m.cfg == Setting() else 0.5, Setting()),
    "equal in a list": (lambda m: 2.0 if m.cfg == [Setting()] else 0.5, [Setting()]),
    "in order": (lambda m: 2.0 if m.cfg < Frozen(3.0) else 0.5, Frozen()),
    "a key": (lambda m: TABLE.get(m.cfg, 0.5), Frozen(2.5)),
    "its class": (lambda m: OF_CLASS[type(m.cfg)], Setting()),
    "a global's class": (lambda m: 2.0 if type(GLOBAL) is Setting and Setting(2.5) == GLOBAL else 0.5, None),
    "a module's class": (lambda m: OF_CLASS.get(type(m.linear), 0.5), None),
    "the model's class": (lambda m: 2.0 if type(m) is Model or m.__class__ is Model else 0.5, None),
}


@pytest.mark.parametrize("what", ASKED)
def test_code_that_asks_for_classes_gets_those_of_the_user(one: DeviceMesh, what: str) -> None:
    told, cfg = ASKED[what]
    if what == "the model's class":  # that of the parallel one is ours, outside of forward
        torch.manual_seed(5)
        model, x = Model(told), torch.randn(4, 8)
        wanted = model(x).detach()
        near(autopar.compile(model, one)(x), wanted, 1e-6, what)
        return
    same(one, lambda: Model(told, copy.deepcopy(cfg)))


def test_classes_are_as_they_were(one: DeviceMesh) -> None:
    kinds = Model, nn.Linear, Setting, nn.Module
    copy.deepcopy(Setting())  # Python notes something in a class then
    before = [dict(vars(kind)) for kind in kinds]
    same(one, lambda: Model(lambda m: m.cfg.scale, Setting()), lambda m: setattr(m.cfg, "scale", 2.0))
    with pytest.raises(TraceError):
        autopar.compile(Model(lambda m: m.cfg.none, Setting()), one)(torch.randn(4, 8))
    assert [dict(vars(kind)) for kind in kinds] == before


class Counting(Model):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).count += 1
        return super().forward(x)


def test_what_forward_writes_to_a_class_is_refused_and_not_left_there(one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"forward changes count"):
        autopar.compile(Counting(lambda _: 1.0), one)(torch.randn(4, 8))
    assert Counting.count == 0


class Single:
    _made: Single | None = None
    scale: float

    def __new__(cls) -> Single:
        if cls._made is None:
            cls._made = object.__new__(cls)
            cls._made.scale = 1.5
        return cls._made


class OncePerClass(type):
    made: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *given: Any) -> Any:
        if cls not in OncePerClass.made:
            OncePerClass.made[cls] = super().__call__(*given)
        return OncePerClass.made[cls]


class OfMeta(metaclass=OncePerClass):
    def __init__(self) -> None:
        self.scale = 1.5


@functools.cache
def settings() -> types.SimpleNamespace:
    return types.SimpleNamespace(scale=1.5)


class Entries(MutableMapping[str, float]):
    """A mapping that makes an entry of whatever attribute it is asked for."""

    def __init__(self, **given: float) -> None:
        self.__dict__["held"] = given

    def __getattr__(self, name: str) -> float:
        return self.held.setdefault(name, 0.25)

    def __setitem__(self, key: str, value: float) -> None:
        self.held[key] = value

    def __getitem__(self, key: str) -> float:
        return self.held[key]

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


Single(), OfMeta(), settings()
OUTSIDE: dict[str, Any] = {"dict": UserDict(scale=1.5), "chain": ChainMap({"scale": 1.5}), "made": Entries(scale=1.5)}
USER, CHAIN, MADE = OUTSIDE.values()
GLOBALS: dict[str, tuple[Callable[[Any], float], Callable[[], object]]] = {
    "a singleton": (lambda _: Single().scale, lambda: setattr(Single(), "scale", 3.0)),
    "one of a metaclass": (lambda _: OfMeta().scale, lambda: setattr(OfMeta(), "scale", 3.0)),
    "one that is cached": (lambda _: settings().scale, lambda: setattr(settings(), "scale", 3.0)),
    "a UserDict": (lambda _: USER["scale"], lambda: USER.update(scale=3.0)),
    "a ChainMap": (lambda _: CHAIN["scale"], lambda: CHAIN.update(scale=3.0)),
    "a mapping of the user's": (lambda _: MADE["scale"], lambda: MADE.update(scale=3.0)),
}


@pytest.mark.parametrize("what", GLOBALS)
def test_settings_that_all_share_are_seen_to_change(one: DeviceMesh, what: str) -> None:
    told, change = GLOBALS[what]
    before = [*MADE]  # pytest has asked for some
    same(one, lambda: Model(told), lambda _: change())
    assert [*MADE] == before, "a look makes no entries"


class Stored:
    """A descriptor that keeps values in a dict of the object."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, one: Any, owner: type | None = None) -> Any:
        return self if one is None else one.values[self.name]

    def __set__(self, one: Any, value: Any) -> None:
        one.__dict__.setdefault("values", {})[self.name] = value


class Nested:
    scale, inner = Stored(), Stored()

    def __init__(self, inner: Any = None) -> None:
        self.scale, self.inner = 1.5, inner


class Hidden:
    __slots__ = ("__scale",)

    def __init__(self) -> None:
        self.__scale = 1.5

    def get(self) -> float:
        return self.__scale

    def set(self, scale: float) -> None:
        self.__scale = scale


class Shifted(tuple[float, ...]):
    def __iter__(self) -> Iterator[float]:
        return (one + 1.0 for one in super().__iter__())


HELD: dict[str, tuple[Callable[[Any], float], Callable[[], Any], Callable[[Any], object] | None]] = {
    "behind descriptors": (
        lambda m: m.cfg.inner.scale, lambda: Nested(Nested()), lambda m: setattr(m.cfg.inner, "scale", 3.0)
    ),
    "in hidden slots": (lambda m: m.cfg.get(), Hidden, lambda m: m.cfg.set(3.0)),
    "in a copy": (lambda m: copy.copy(m.cfg).scale, Setting, lambda m: setattr(m.cfg, "scale", 3.0)),
    "in another": (lambda m: replace(m.cfg).scale, Setting, lambda m: setattr(m.cfg, "scale", 3.0)),
    "in a tuple of a class": (lambda m: sum(m.cfg), lambda: Shifted([0.5, 1.0]), None),
}  # fmt: skip


@pytest.mark.parametrize("where", HELD)
def test_settings_are_seen_wherever_they_are_held(one: DeviceMesh, where: str) -> None:
    told, made, change = HELD[where]
    same(one, lambda: Model(told, made()), change)
