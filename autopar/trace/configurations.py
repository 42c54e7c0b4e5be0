"""What forward reads of the configurations and other plain objects that modules hold: of a copy that is only traced.

Scripts write to configurations between steps (`save_pretrained` notes a dtype there). Only what forward has read says
anything about a program.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn

PLAIN = (
    list, tuple, dict, set, frozenset, np.ndarray, Tensor, nn.Module, type, enum.Enum, functools.partial,
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip


FEW = 32  # objects in a list are looked at, at most


def own_names(value: Any) -> dict[str, Any] | None:
    """The attributes of a configuration or the like; None for what is no such object."""
    return None if isinstance(value, PLAIN) else getattr(value, "__dict__", None)


class Configurations:
    """Objects whose reads are noted while a model is traced."""

    def __init__(self) -> None:
        self._read: dict[int, set[str] | None] = {}  # by id; None: all of it
        self._held: list[Any] = []  # so that their ids stay theirs

    def read(self, copied: Any) -> set[str] | None:
        """Names of its own that were read of an object of the traced copy; None: any may have been."""
        return self._read.get(id(copied))

    def watch(self, value: Any, is_open: Callable[[], bool]) -> None:
        """Note from now on what is read of `value` while `is_open` says so."""
        if isinstance(value, (list, tuple)) and len(value) <= FEW:
            for part in value:
                self.watch(part, is_open)
        if own_names(value) is None or id(value) in self._read or type(value).__module__.startswith("torch"):
            return
        with contextlib.suppress(TypeError):  # a class of C, or with slots: any of it may have been read
            value.__class__ = _watched(type(value), self, is_open)
            self._read[id(value)] = set()
        self._held.append(value)

    def note(self, value: Any, name: str, own: dict[str, Any]) -> None:
        seen = self._read.get(id(value))
        if seen is None:
            return
        if name == "__dict__":
            self._read[id(value)] = None
        elif not name.startswith("__"):
            name = getattr(type(value), "attribute_map", {}).get(name, name)
            seen.add(name)


class Unannounced:
    """In front of a class, subclasses are made without its `__init_subclass__`, which may ask for arguments or keep
    lists: it is for those that authors write.
    """

    def __init_subclass__(cls) -> None: ...


def _watched(kind: type, configurations: Configurations, is_open: Callable[[], bool]) -> type:
    def __getattribute__(self: Any, name: str) -> Any:
        if is_open():
            configurations.note(self, name, object.__getattribute__(self, "__dict__"))
        value = super(made, self).__getattribute__(name)
        if is_open() and not name.startswith("__"):
            configurations.watch(value, is_open)
        return value

    made: Any = type(kind.__name__, (Unannounced, kind), {"__getattribute__": __getattribute__})
    made.__qualname__, made.__module__ = kind.__qualname__, kind.__module__
    return made
