"""Settings outside of tensors that forward reads, wherever they lie, and what forward must not change of them."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import random
import threading
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from autopar import TraceError


class Default:
    weight = 1.0


class Slotted:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0


@dataclasses.dataclass
class Inner:
    weight: float = 1.0


@dataclasses.dataclass
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)


@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: float = 1.0


class Items(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Found:
    """Finds its attributes by itself, as configurations of libraries do."""

    def __init__(self) -> None:
        self.__dict__["content"] = {"weight": 1.0}

    def __getattr__(self, name: str) -> Any:
        if name not in self.content:
            raise AttributeError(name)
        return self.content[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.content[name] = value


class Schedule:
    def __init__(self) -> None:
        self.step = 0

    def __call__(self) -> float:
        return 1 / (1 + self.step)

    def counted(self) -> float:
        self.step += 1
        return 1 / self.step


default, slotted, nested, items, found, schedule = Default(), Slotted(), Outer(), Items(), Found(), Schedule()
spaces = types.SimpleNamespace(inner=argparse.Namespace(weight=1.0))
items["inner"] = Items(weight=1.0)
chosen, replaced = functional.mse_loss, Inner()
table: dict[str, Any] = {"loss": lambda: table["weight"], "weight": 1.0}
held = functools.partial(lambda given: given["weight"], {"weight": 1.0})
current: ContextVar[float] = ContextVar("current", default=1.0)


class Model(nn.Module):
    def __init__(self, weight: Callable[[Any], Any], settings: Any = None) -> None:
        super().__init__()
        self.linear, self.weight, self.settings = nn.Linear(4, 4), weight, settings

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * self.weight(self)


def rebind(name: str, value: Any) -> None:
    globals()[name] = value


GLOBAL: dict[str, tuple[Callable[[Any], Any], Callable[[], None]]] = {
    "default of a class": (lambda _: default.weight, lambda: setattr(default, "weight", 0.5)),
    "class": (lambda _: default.weight, lambda: setattr(Default, "weight", 0.5)),
    "slots": (lambda _: slotted.weight, lambda: setattr(slotted, "weight", 0.5)),
    "namespaces": (lambda _: spaces.inner.weight, lambda: setattr(spaces.inner, "weight", 0.5)),
    "dataclasses": (lambda _: nested.inner.weight, lambda: setattr(nested.inner, "weight", 0.5)),
    "items": (lambda _: items.inner.weight, lambda: setattr(items.inner, "weight", 0.5)),
    "found": (lambda _: found.weight, lambda: setattr(found, "weight", 0.5)),
    "schedule": (lambda _: schedule(), lambda: setattr(schedule, "step", 3)),
    "function": (lambda _: chosen(torch.ones(2), torch.zeros(2)), lambda: rebind("chosen", functional.huber_loss)),
    "object": (lambda _: replaced.weight, lambda: rebind("replaced", Inner(0.5))),
    "table": (lambda _: table["loss"](), lambda: table.update(weight=0.5)),
    "partial": (lambda _: held(), lambda: held.args[0].update(weight=0.5)),
    "context": (lambda _: current.get(), lambda: current.set(0.5) and None),
}


@pytest.fixture(autouse=True)
def as_they_were() -> Any:
    kept = copy.copy(globals())
    yield
    globals().update(kept)
    Default.weight = 1.0
    default.__dict__.clear()
    for one in (slotted, spaces.inner, nested.inner, items.inner, found, table, held.args[0]):
        one.update(weight=1.0) if type(one) is dict else setattr(one, "weight", 1.0)
    schedule.step = 0
    current.set(1.0)


@pytest.mark.parametrize("name", GLOBAL)
def test_a_setting_outside_of_the_module_that_changes_is_seen(one: DeviceMesh, name: str) -> None:
    weight, change = GLOBAL[name]
    plain = Model(weight)
    parallel, x = autopar.compile(copy.deepcopy(plain), one), torch.rand(3, 4)
    before = plain(x)
    torch.testing.assert_close(parallel(x), before)
    change()
    assert not torch.isclose(plain(x), before)
    torch.testing.assert_close(parallel(x), plain(x))


def scaled(settings: Any) -> None:
    settings.weight = 0.5


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], None]]] = {
    "namespaces": (
        lambda: types.SimpleNamespace(inner=types.SimpleNamespace(weight=1.0)),
        lambda model: model.settings.inner.weight,
        lambda settings: scaled(settings.inner),
    ),
    "slots": (Slotted, lambda model: model.settings.weight, scaled),
    "found": (Found, lambda model: model.settings.weight, scaled),
    "items": (lambda: Items(weight=1.0), lambda model: model.settings.weight, scaled),
    "in a dict": (
        lambda: {"a": Inner()}, lambda model: model.settings["a"].weight, lambda settings: scaled(settings["a"]),
    ),
    "method": (lambda: Schedule().__call__, lambda model: model.settings(), lambda it: setattr(it.__self__, "step", 1)),
    "partial": (
        lambda: functools.partial(lambda given: given["weight"], {"weight": 1.0}),
        lambda model: model.settings(),
        lambda settings: settings.args[0].update(weight=0.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_a_setting_in_an_object_of_a_module_that_changes_is_seen(one: DeviceMesh, name: str) -> None:
    sees_what_changes(one, *HELD[name])


def sees_what_changes(
    one: DeviceMesh, settings: Callable[[], Any], weight: Callable[[Any], Any], change: Callable[[Any], None]
) -> None:
    """`weight`: of a model with these settings, which `change` is made to."""
    plain, x = Model(weight, settings()), torch.rand(3, 4)
    parallel = autopar.compile(Model(weight, settings()), one)
    parallel.load_state_dict(plain.state_dict())
    before = plain(x)
    for _ in range(2):
        torch.testing.assert_close(parallel(x), before)
    assert len(parallel._autopar.prepared()) == 1, "one program, as long as nothing changes"
    for model in (plain, parallel):
        change(model.settings)
    assert not torch.isclose(plain(x), before)
    torch.testing.assert_close(parallel(x), plain(x))


def test_a_frozen_dataclass_may_be_replaced(one: DeviceMesh) -> None:
    plain = Model(lambda model: model.settings.weight, Frozen())
    parallel, x = autopar.compile(copy.deepcopy(plain), one), torch.rand(3, 4)
    torch.testing.assert_close(parallel(x), plain(x))
    plain.settings = parallel.settings = dataclasses.replace(plain.settings, weight=0.5)
    torch.testing.assert_close(parallel(x), plain(x))


def test_a_method_that_is_replaced_is_seen(one: DeviceMesh) -> None:
    class Scaled(Model):
        def scale(self) -> float:
            return 1.0

    plain = Scaled(lambda model: model.scale())
    parallel, x = autopar.compile(copy.deepcopy(plain), one), torch.rand(3, 4)
    before = plain(x)
    torch.testing.assert_close(parallel(x), before)
    parallel.scale = lambda: 0.5
    torch.testing.assert_close(parallel(x), before / 2)
    del parallel.scale
    Scaled.scale = lambda self: 0.25  # type: ignore[method-assign]
    torch.testing.assert_close(parallel(x), before / 4)


@pytest.mark.parametrize("made", [threading.Lock, lambda: (number for number in range(3))])
def test_what_cannot_be_copied_may_be_an_attribute(one: DeviceMesh, made: Callable[[], Any]) -> None:
    plain = Model(lambda model: 1.0, made())
    parallel = autopar.compile(plain, one)
    assert parallel(torch.rand(3, 4)).isfinite()
    assert parallel.settings is plain.settings


count, counts = 0, {"calls": 0}


def counted(_: Any) -> int:
    global count
    count += 1
    return count


def counted_inside(_: Any) -> int:
    counts["calls"] += 1
    return counts["calls"]


def of_its_class(model: Any) -> int:
    type(model).calls = getattr(type(model), "calls", 0) + 1
    return type(model).calls


REFUSED: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "count .*, which is no attribute": (counted, lambda: None),
    "counts, which is no attribute": (counted_inside, lambda: None),
    "step .*, which is no attribute": (lambda _: schedule.counted(), lambda: None),
    "calls of the class Model": (of_its_class, lambda: None),
    r"self.settings \(count\)": (lambda model: next(model.settings), lambda: itertools.count(1)),
    r"self.settings \(Random: draw with torch\)": (lambda model: model.settings.random(), lambda: random.Random(3)),
    r"self.settings \(Generator: draw with": (lambda model: model.settings.random(), lambda: np.random.default_rng(3)),
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_forward_changes_besides_attributes_is_refused_and_put_back(one: DeviceMesh, told: str) -> None:
    weight, settings = REFUSED[told]
    parallel = autopar.compile(Model(weight, settings()), one)
    with pytest.raises(TraceError, match=f"forward changes .*{told}.* return the values instead"):
        parallel(torch.rand(3, 4))
    assert count == 0 and not hasattr(Model, "calls")


warned = False


def warns_once(_: Any) -> float:
    global warned
    if not warned:
        warned = True
    return 1.0


def test_what_is_noted_once_may_be_noted(one: DeviceMesh) -> None:
    parallel = autopar.compile(Model(warns_once), one)
    for _ in range(2):
        assert parallel(torch.rand(3, 4)).isfinite()
    assert warned


found_out: dict[Any, Any] = {"of one kind": 1.0}


def is_told(_: Any) -> float:
    """What einops does for each type of tensor: it is asked before it is found out again."""
    if "of another" not in found_out:
        found_out["of another"] = Schedule()
        found_out["of both"] = {"factor": 2.0}
    return found_out["of both"]["factor"]


def begins_otherwise(_: Any) -> float:
    if "begun" in found_out:
        return 2.0
    found_out["begun"] = Schedule()
    return 1.0


def more_each_time(_: Any) -> float:
    found_out[len(found_out)] = Schedule()
    return 1.0


def test_a_table_of_what_was_found_out_may_grow_once(one: DeviceMesh) -> None:
    model, x = Model(is_told), torch.rand(3, 4)
    parallel = autopar.compile(model, one)
    made = [parallel(x) for _ in range(2)]
    torch.testing.assert_close(made[1].detach(), model(x).detach())
    assert torch.equal(made[0], made[1])


@pytest.mark.parametrize("weight", [begins_otherwise, more_each_time])
def test_a_table_that_grows_at_each_call_or_that_says_what_is_computed_is_refused(
    one: DeviceMesh, weight: Callable[[Any], float]
) -> None:
    with pytest.raises(TraceError, match=r"forward changes found_out .*, which is no attribute"):
        autopar.compile(Model(weight), one)(torch.rand(3, 4))
