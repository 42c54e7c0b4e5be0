"""Entries of dicts that no code of the model asks for: they may change, and nothing is traced again; all else is."""

from __future__ import annotations

import functools
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
