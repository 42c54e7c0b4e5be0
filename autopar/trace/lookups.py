"""Where a setting outside of modules is found again, call after call: each is asked by a name, as globals are."""

from __future__ import annotations

import functools
import io
import logging
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from multiprocessing import synchronize
from typing import Any, cast

from torch import Tensor, nn

from autopar.trace.values import CONSTANT, IN_PLACE, MISSING, SCALARS, few_in, is_of_torch

CACHED = type(functools.cache(len))
EVENTS = (threading.Event, synchronize.Event)
NO_KEEPERS = (
    logging.Logger, logging.Handler, io.IOBase, nn.Module, Tensor, type, types.ModuleType, types.FunctionType,
    types.MethodType, *IN_PLACE, *CONSTANT,
)  # fmt: skip
DEEP = 4  # containers in containers


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


class Kept(Now):
    """The numbers that an object of torch's or Python's own keeps: what forward does to them, as a writer of logs that
    opens a file, is done once, while it is traced.
    """


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
    """(place, name, value) of what tells what a value gives: a context variable, a logger, an event, `TABLE.get`, what
    an object of torch's or Python's own keeps (the learning rates of an optimizer).
    """
    if isinstance(value, ContextVar):
        yield (now := Now(value.get)), value.name, now.get(value.name, MISSING)
    elif isinstance(value, EVENTS):
        yield Now(value.is_set), "is_set", value.is_set()
    elif isinstance(value, logging.Logger):
        yield Now(functools.partial(_level_of, value)), value.name, _level_of(value)
    elif isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, (list, dict)):
        yield {"__self__": value.__self__}, "__self__", value.__self__
    elif keeps_numbers(value):
        yield Kept(functools.partial(_numbers_of, value)), str(type(value).__name__), _numbers_of(value)


def keeps_numbers(value: Any) -> bool:
    """Whether it is an object of a class of torch's or Python's own, whose methods are not looked at."""
    own = getattr(value, "__dict__", None) if not isinstance(value, NO_KEEPERS) else None
    return isinstance(own, dict) and is_of_torch(type(value))


def _numbers_of(value: Any) -> str:
    """The numbers and texts that it keeps, in lists and tables too, and which tensors, as text."""
    return repr(_plain(vars(value), DEEP))


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, Tensor) and depth == DEEP - 1 and not isinstance(value, nn.Parameter):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, dict) and depth:
        table = cast("dict[Any, Any]", value)
        return {key: _plain(part, depth - 1) for key, part in table.items() if isinstance(key, SCALARS)}
    if isinstance(value, (list, tuple, deque)) and depth:
        return [_plain(part, depth - 1) for part in few_in(value)]
    return None


def _level_of(logger: logging.Logger) -> int:
    """What is less is not told."""
    return max(logger.getEffectiveLevel(), logger.manager.disable + 1)
