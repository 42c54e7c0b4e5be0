"""Settings of a module that change in place, however deep they lie and whatever holds them."""

from __future__ import annotations

import types
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.attach.test_settings import Inner, Model, scaled, sees_what_changes


class Box(dict[str, float]):
    """With an attribute beside what is in it."""


def boxed() -> Box:
    box = Box()
    box.weight = 1.0  # type: ignore[attr-defined]
    return box


def spaces(depth: int) -> Any:
    return types.SimpleNamespace(weight=1.0, inner=spaces(depth - 1) if depth else None)


def dicts(depth: int) -> dict[str, Any]:
    return {"weight": 1.0, "inner": dicts(depth - 1) if depth else None}


def innermost(settings: Any) -> Any:
    return reduce(lambda one, _: one.inner if hasattr(one, "inner") else one["inner"], range(5), settings)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], None]]] = {
    "dicts": (lambda: dicts(5), lambda s: innermost(s)["weight"], lambda s: innermost(s).update(weight=0.5)),
    "namespaces": (lambda: spaces(5), lambda s: innermost(s).weight, lambda s: scaled(innermost(s))),
    "many": (lambda: [Inner() for _ in range(100)], lambda s: s[70].weight, lambda s: scaled(s[70])),
    "lists in a dict": (lambda: {"a": [Inner(), Inner()]}, lambda s: s["a"][1].weight, lambda s: scaled(s["a"][1])),
    "tuples in lists": (lambda: [[(Inner(),)]], lambda s: s[0][0][0].weight, lambda s: scaled(s[0][0][0])),
    "in a deque": (lambda: deque([Inner(), Inner()]), lambda s: s[1].weight, lambda s: scaled(s[1])),
    "user's dict": (lambda: UserDict(weight=1.0), lambda s: s["weight"], lambda s: s.update(weight=0.5)),
    "user's list": (lambda: UserList([1.0, 2.0]), lambda s: s[0], lambda s: s.__setitem__(0, 0.5)),
    "chain": (lambda: ChainMap({}, {"weight": 1.0}), lambda s: s["weight"], lambda s: s.update(weight=0.5)),
    "beside": (boxed, lambda s: s.weight, scaled),
    "array": (lambda: array("d", [1.0, 2.0]), lambda s: s[0], lambda s: s.__setitem__(0, 0.5)),
    "bytes": (lambda: bytearray([2, 3]), lambda s: s[0], lambda s: s.__setitem__(0, 1)),
    "objects": (
        lambda: np.array([1.0, None], dtype=object), lambda s: s[0], lambda s: s.__setitem__(0, 0.5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_seen(one: DeviceMesh, name: str) -> None:
    settings, read, change = CASES[name]
    sees_what_changes(one, settings, lambda model: read(model.settings), change)


weights = array("d", [1.0])


def test_an_array_among_globals_is_seen(one: DeviceMesh) -> None:
    plain, x = Model(lambda _: weights[0]), torch.rand(3, 4)
    parallel = autopar.compile(plain, one)
    before = parallel(x)
    weights[0] = 0.5
    torch.testing.assert_close(parallel(x), before / 2)
