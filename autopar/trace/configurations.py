"""What forward reads of the configurations and other plain objects that modules hold: of a copy that is only traced.

Scripts write to configurations between steps (`save_pretrained` notes a dtype there). Only what forward has read says
anything about a program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from autopar.trace.lookups import Of
from autopar.trace.standing_in import StandIns
from autopar.trace.values import (
    CONSTANT,
    MISSING,
    SCALARS,
    Change,
    few_in,
    has_grown,
    inside,
    is_alike,
    is_noted_once,
    is_of_torch,
    led_to,
    own_names,
    snapshot,
)

WHOLE = ("__dict__", "__getstate__", "__getnewargs_ex__", "__getnewargs__")  # `copy.copy` asks for these


class Configurations:
    """Objects whose reads are noted while a model is traced."""

    def __init__(self) -> None:
        self._read: dict[int, set[str] | None] = {}  # by id; None: all of it
        self._held: list[Any] = []  # so that their ids stay theirs
        self._classes = StandIns(("__getattribute__", "__setattr__"))
        # (id, name) -> the object, what was there, a snapshot of that
        self._before: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        self._whole: list[tuple[Any, Any]] = []  # objects of which any may have been read, and what was in them
        self.sees: Callable[[Any, str, Any], None] = lambda *_: None  # is told of each attribute: place, name, value

    def read(self, copied: Any) -> set[str] | None:
        """Names of its own that were read of an object of the traced copy; None: any may have been."""
        return self._read.get(id(copied))

    def is_known(self, value: Any) -> bool:
        """Whether it has been looked at already."""
        return id(value) in self._read or self.is_whole(value)

    def is_whole(self, copied: Any) -> bool:
        """Whether it could not be watched."""
        return any(value is copied for value, _ in self._whole)

    def watch(self, value: Any, is_open: Callable[[], bool]) -> None:
        """Note from now on what is read of `value` while `is_open` says so."""
        for part in few_in(value) if isinstance(value, (list, tuple, dict, deque)) else led_to(value):
            self.watch(part, is_open)
        if type(value).__module__.startswith(("weakref", "_weakref")):
            return
        if self.is_known(value) or own_names(value) is None or is_of_torch(type(value)):  # looking is a read, too
            return
        if not self.notes_reads_of(value, is_open):
            self._whole.append((value, inside(value)))

    def notes_reads_of(self, value: Any, is_open: Callable[[], bool]) -> bool:
        """Watch this object, and those that are read of it; False where it is of a class of C, or keeps its attributes
        in slots: any of it may have been read.
        """
        kind = type(value)
        if any(isinstance(vars(one).get("__dict__"), property) for one in kind.__mro__):  # made anew at each look
            return False
        if not isinstance(getattr(value, "__dict__", None), dict):
            return False
        if kind not in self._classes and not self._classes.put(kind, _noting(kind, self, is_open)):
            return False
        self._held.append(value)
        self._read[id(value)] = set()
        return True

    def release(self) -> None:
        """Classes are as they were."""
        self._classes.restore()

    def changed(self, originals: Collection[int]) -> tuple[Change | None, Any]:
        """An attribute that the trace changed, and of what, but for tables of which the user's are others (`originals`:
        by ids).
        """
        for (_, name), (value, was, before) in self._before.items():
            now = self._now(value, name)
            if snapshot(now) != before and not is_noted_once(was, now) and not is_alike(was, now):
                is_table = has_grown(was, before, now)
                if not is_table or id(now) not in originals:
                    return Change(f"{name} of {_named(value)}", is_table), value
        changed = ((Change(f"what is in {_named(value)}"), value) for value, was in self._whole if inside(value) != was)
        return next(changed, (None, MISSING))

    def counted(self) -> list[Any]:
        """Objects that have other numbers, flags or text now: noted for good, or others in each call."""
        there = ((value, before, self._now(value, name)) for (_, name), (value, _, before) in self._before.items())
        return [value for value, before, now in there if isinstance(now, CONSTANT) and snapshot(now) != before]

    def _now(self, value: Any, name: str) -> Any:
        own = vars(value)
        return own[name] if name in own else _of_class(type(value), name)

    def before(self, value: Any, name: str) -> None:
        """That an attribute is read or written, as it is still."""
        if not name.startswith("__"):
            own = object.__getattribute__(value, "__dict__")
            was = own[name] if name in own else _of_class(type(value), name)
            if (id(value), name) not in self._before:
                self._before[id(value), name] = value, was, snapshot(was)
                self.sees(Of(value), name, was)

    def is_watched(self, value: Any) -> bool:
        return id(value) in self._read

    def note(self, value: Any, name: str) -> None:
        seen = self._read.get(id(value))
        if seen is None:
            return
        if name in WHOLE:
            self._read[id(value)] = None
        elif not name.startswith("__"):
            name = getattr(type(value), "attribute_map", {}).get(name, name)
            seen.add(name)
            self.before(value, name)


def _noting(kind: type, configurations: Configurations, is_open: Callable[[], bool]) -> list[Callable[..., Any]]:
    getting: Any = kind.__getattribute__
    setting: Any = kind.__setattr__

    def __getattribute__(self: Any, name: str) -> Any:
        is_noted = configurations.is_watched(self) and is_open()
        if is_noted:
            configurations.note(self, name)
        value = getting(self, name)
        if is_noted and not name.startswith("__"):
            configurations.watch(value, is_open)
        return value

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if configurations.is_watched(self) and is_open():
            configurations.before(self, name)
        setting(self, name, value)

    return [__getattribute__, __setattr__]


def _of_class(kind: type, name: str) -> Any:
    """The number or text that objects of a class have by that name, until they are given another."""
    found = next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), MISSING)
    return found if isinstance(found, SCALARS) else MISSING


def _named(value: Any) -> str:
    return f"an object of class {type(value).__name__}"
