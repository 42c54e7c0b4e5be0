"""Entries of dicts that no code of the model asks for: they may change, and nothing is traced again; all else is."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar

STATE: dict[Any, Any] = {"used": 1.0, "step": 0, 3: 1.0}
OTHERS = [STATE]
KEY = "step"


def by_default(x: Tensor, STATE: dict[Any, Any] = STATE) -> Tensor:
    return x * (STATE["step"] + 1)


def of_partial(x: Tensor, settings: dict[Any, Any]) -> Tensor:
    return x * (settings["step"] + 1)


def handed(state: dict[Any, Any]) -> float:
    return state["step"] + 1.0


class Model(nn.Module):
    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.does, self.linear, self.kind = does, nn.Linear(4, 4), "by_text"
        self.config: dict[Any, Any] = {"used": 1.0, "step": 0, "inner": {"a": 1.0}}
        self.same = self.settings = self.config
        self.partial = functools.partial(of_partial, settings=self.config)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, self.linear(x))

    def by_text(self, x: Tensor) -> Tensor:
        return x * (self.config["step"] + 1)


def enclosed() -> tuple[Callable[[Any, Tensor], Tensor], dict[Any, Any]]:
    inside = {"used": 1.0, "step": 0}
    return (lambda m, x: x * inside["used"]), inside


UNREAD: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "by key": lambda m, x: x * m.config["used"] * STATE["used"] * STATE[3],
    "get": lambda m, x: x * m.config.get("used") * STATE.get("used", 2.0) * m.config.get("other", 4),
    "in": lambda m, x: x * 2 if "used" in m.config and "none" not in STATE else x,
    "in text": lambda m, x: x * len(f"{m.config['used']}"),
    "of an entry": lambda m, x: x * m.config["inner"]["a"],
    "enclosed": enclosed()[0],
}

READ: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "by a variable": lambda m, x: x * (m.config[KEY] + STATE[KEY] + 1),
    "values": lambda m, x: x * sum(v for v in STATE.values()),
    "handed on": lambda m, x: x * handed(m.config),
    "by another name": lambda m, x: (lambda state: x * (state["step"] + 1))(STATE),
    "in a variable": lambda m, x: _in_a_variable(m, x),
    "unpacked": lambda m, x: x * ({**STATE}["step"] + 1),
    "in a list": lambda m, x: x * (OTHERS[0]["step"] + 1),
    "another attribute": lambda m, x: x * (m.same["step"] + m.config["used"]),
    "by text": lambda m, x: x * (getattr(m, "config")["step"] + 1),  # noqa: B009
    "by a method found by text": lambda m, x: getattr(m, m.kind)(x * m.config["used"]),
    "all attributes": lambda m, x: x * (vars(m)["config"]["step"] + 1),
    "by a key that is computed": lambda m, x: x * (m.config.get("st" + KEY[2:]) + 1),
    "how many": lambda m, x: x * (len(m.config) + STATE["used"]) if "more" not in m.config else x,
    "a default": lambda m, x: by_default(x) * STATE["used"],
    "of a partial": lambda m, x: m.partial(x) * m.settings["used"],
    "matched": lambda m, x: _matched(m, x),
}


def _in_a_variable(m: Any, x: Tensor) -> Tensor:
    config = m.config
    return x * (config["step"] + 1)


def _matched(m: Any, x: Tensor) -> Tensor:
    match m.config:
        case {"step": step}:
            return x * (step + 1)
        case _:
            return x


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    monkeypatch.setitem(STATE, "step", 0)
    return STATE


@pytest.mark.parametrize("name", UNREAD)
def test_what_no_code_asks_for_may_change(one: DeviceMesh, state: dict[Any, Any], name: str) -> None:
    does = UNREAD[name]
    _, inside = enclosed()
    if name == "enclosed":
        does, inside = enclosed()
    parallel, plain, x = autopar.compile(model := Model(does), one), model, torch.randn(2, 4)
    for step in range(3):
        state["step"] = parallel.config["step"] = plain.config["step"] = inside["step"] = step
        state[f"new {step}"] = step
        torch.testing.assert_close(parallel(x), plain(x))
    assert sum(map(len, parallel._autopar.programs.values())) == 1, "traced once"
    for held in (state, parallel.config, plain.config, inside):
        held["used"] = 3.0
    parallel.config["inner"]["a"] = plain.config["inner"]["a"] = 3.0
    torch.testing.assert_close(parallel(x), plain(x))
    state["used"] = 1.0
    for step in range(3):
        del state[f"new {step}"]


@pytest.mark.parametrize("name", READ)
def test_what_may_be_asked_for_counts(one: DeviceMesh, state: dict[Any, Any], name: str) -> None:
    plain, x = Model(READ[name]), torch.randn(2, 4)
    parallel = autopar.compile(plain, one)
    for step in (0, 1):
        state["step"] = parallel.config["step"] = plain.config["step"] = step
        torch.testing.assert_close(parallel(x), plain(x))
    parallel.config["more"] = plain.config["more"] = 1
    torch.testing.assert_close(parallel(x), plain(x))


class Plain(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Found(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Renaming(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[f"{name}_now"]


class Summing(Plain):
    def total(self) -> float:
        return sum(self.values())


INNER: dict[str, Any] = {"loss": {"weight": 1.0, "step": 0, "more": {"a": 1.0}}}
PLAIN, FOUND, RENAMING, SUMMING = Plain(used=1.0), Found(used=1.0), Renaming(used_now=1.0), Summing(used=1.0)
COUNTS: defaultdict[str, float] = defaultdict(float, used=1.0)

INNER_UNREAD: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any]]] = {
    "of a table in it": (lambda m, x: x * INNER["loss"]["weight"] * INNER["loss"].get("weight"), INNER["loss"]),
    "of one in that": (lambda m, x: x * INNER["loss"]["more"]["a"], INNER["loss"]),
    "an attribute": (lambda m, x: x * PLAIN.used, PLAIN),
    "one that is found": (lambda m, x: x * FOUND.used * FOUND["used"], FOUND),
    "of counts": (lambda m, x: x * COUNTS["used"], COUNTS),
}
INNER_READ: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any]]] = {
    "of a table in it": (lambda m, x: x * (INNER["loss"]["step"] + 1), INNER["loss"]),
    "whether it is in that": (lambda m, x: x * 2 if "step" in INNER["loss"] else x, INNER["loss"]),
    "all of that": (lambda m, x: x * sum(v for v in INNER["loss"].values() if isinstance(v, int)), INNER["loss"]),
    "an attribute": (lambda m, x: x * (PLAIN.get("step", 0) + 1), PLAIN),
    "under another name": (lambda m, x: x * RENAMING.step, RENAMING),
    "by a method": (lambda m, x: x * SUMMING.total(), SUMMING),
}


def _changes(table: dict[str, Any], monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for name in ("step", "step_now"):
        monkeypatch.setitem(table, name, number)


@pytest.mark.parametrize("name", INNER_UNREAD)
def test_what_nobody_asks_a_table_in_a_table_for_may_change(
    one: DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    does, table = INNER_UNREAD[name]
    parallel = autopar.compile(Model(does), one)
    for number in range(3):
        _changes(table, monkeypatch, number)
        parallel(torch.randn(2, 4))
    assert len(parallel._autopar.prepared()) == 1
    used = "weight" if "weight" in table and name != "of one in that" else "used"
    monkeypatch.setitem(table, used, 3.0)
    if name == "of one in that":
        monkeypatch.setitem(table["more"], "a", 3.0)
    parallel(torch.randn(2, 4))
    assert len(parallel._autopar.prepared()) == 2


@pytest.mark.parametrize("name", INNER_READ)
def test_what_may_be_asked_of_a_table_in_a_table_counts(
    one: DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    does, table = INNER_READ[name]
    plain = Model(does)
    if name == "whether it is in that":
        monkeypatch.delitem(table, "step")
    else:
        _changes(table, monkeypatch, 0)
    parallel = autopar.compile(plain, one)
    parallel(torch.randn(2, 4))
    _changes(table, monkeypatch, 2)
    x = torch.randn(2, 4)
    torch.testing.assert_close(parallel(x), plain(x))
    assert len(parallel._autopar.prepared()) == 2
