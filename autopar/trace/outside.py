"""The states of Python's and numpy's own generators."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np


def states_outside() -> tuple[Any, Any]:
    """The states of Python's and numpy's own generators."""
    return random.getstate(), np.random.get_state()


def unlike(states: tuple[Any, Any]) -> tuple[Any, Any]:
    """States that no function comes to by itself which sets a seed, the same ones of the same."""
    pythons, (name, keys, *rest) = states
    seed = hashlib.sha256(repr((pythons, name, rest)).encode() + keys.tobytes()).digest()
    return random.Random(seed).getstate(), np.random.RandomState([*seed]).get_state()


@contextlib.contextmanager
def undrawn(states: tuple[Any, Any] | None = None) -> Iterator[None]:
    """Behind it Python's and numpy's own generators are as they were; inside they go on from these states."""
    before = states_outside()
    go_on_from(before if states is None else states)
    try:
        yield
    finally:
        go_on_from(before)


def go_on_from(states: tuple[Any, Any]) -> None:
    """Let Python's and numpy's own generators have these states."""
    random.setstate(states[0])
    np.random.set_state(states[1])
