"""Where a setting outside of modules is found again, call after call: each is asked by a name, as globals are."""

from __future__ import annotations

import functools
import logging
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from autopar.trace.values import MISSING

CACHED = type(functools.cache(len))


class Cell(dict[str, Any]):
    """A variable of an enclosing function, found by its name as a global is."""

    def __init__(self, cell: types.CellType) -> None:
        super().__init__()
        self._cell = cell

    def get(self, key: str, default: Any = None) -> Any:
        return self._cell.cell_contents

    def put(self, key: str, value: Any) -> None:
        self._cell.cell_contents = value

    def original(self, originals: Mapping[int, Any]) -> Cell:
        """The variable that this one was copied from."""
        return Cell(originals[id(self._cell)]) if id(self._cell) in originals else self


class Of(dict[str, Any]):
    """The attributes of an object, its class's among them, found by their names as globals are."""

    def __init__(self, holder: Any) -> None:
        super().__init__()
        self.holder = holder

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return getattr(self.holder, key, default)
        except Exception:  # whatever a `__getattr__` of the user's raises: it is not there
            return default

    def put(self, key: str, value: Any) -> None:
        setattr(self.holder, key, value)


class Now(dict[str, Any]):
    """What a function without arguments gives, found by any name."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self._call()
        except LookupError:  # a variable of the context that is not set
            return default


def clearings(cached: Any) -> Callable[[], int]:
    """What tells how often a function's cache (`functools.lru_cache`) was cleared: what it gives may be another now."""
    seen, count = 0, 0

    def cleared() -> int:
        nonlocal seen, count
        misses = cached.cache_info().misses
        seen, count = misses, count + (misses < seen)
        return count

    return cleared


def registry_of(value: Any) -> dict[str, Any] | None:
    """Where a function or method of `functools.singledispatch` has its `registry`; None for anything else."""
    value = value.dispatcher if isinstance(value, functools.singledispatchmethod) else value
    if not isinstance(value, types.FunctionType):
        return None
    return vars(value) if isinstance(vars(value).get("registry"), types.MappingProxyType) else None


def other_places(value: Any) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """(place, name, value) of what tells what a value gives: a context variable, a logger, an event, `TABLE.get`."""
    if isinstance(value, ContextVar):
        yield (now := Now(value.get)), value.name, now.get(value.name, MISSING)
    elif isinstance(value, threading.Event):
        yield Now(value.is_set), "is_set", value.is_set()
    elif isinstance(value, logging.Logger):
        yield Now(functools.partial(_level_of, value)), value.name, _level_of(value)
    elif isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, (list, dict)):
        yield {"__self__": value.__self__}, "__self__", value.__self__


def _level_of(logger: logging.Logger) -> int:
    """What is less is not told."""
    return max(logger.getEffectiveLevel(), logger.manager.disable + 1)
