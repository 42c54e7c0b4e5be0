"""What forward reads of the configurations and other plain objects that modules hold: of a copy that is only traced.

Scripts write to configurations between steps (`save_pretrained` notes a dtype there). Only what forward has read says
anything about a program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from autopar.trace.values import (
    MISSING,
    Change,
    Unannounced,
    few_in,
    inside,
    is_grown_table,
    is_noted_once,
    is_of_torch,
    own_names,
    snapshot,
)


class Configurations:
    """Objects whose reads are noted while a model is traced."""

    def __init__(self) -> None:
        self._read: dict[int, set[str] | None] = {}  # by id; None: all of it
        self._held: list[tuple[Any, type]] = []  # with their own classes; held, so that their ids stay theirs
        # (id, name) -> the object, what was there, a snapshot of that
        self._before: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        self._whole: list[tuple[Any, Any]] = []  # objects of which any may have been read, and what was in them

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
        if isinstance(value, (list, tuple, dict, deque)):
            for part in few_in(value):
                self.watch(part, is_open)
        if own_names(value) is None or self.is_known(value) or is_of_torch(type(value)):
            return
        if not self.notes_reads_of(value, is_open):
            self._whole.append((value, inside(value)))

    def notes_reads_of(self, value: Any, is_open: Callable[[], bool]) -> bool:
        """Watch this object, and those that are read of it; False where it is of a class of C, has slots, or is of a
        class that wants no subclass: any of it may have been read.
        """
        self._held.append((value, type(value)))
        try:
            object.__setattr__(value, "__class__", _watched(type(value), self, is_open))  # though it be frozen
        except Exception:  # TypeError; and whatever a metaclass raises of classes that are made by nobody it knows
            return False
        self._read[id(value)] = set()
        return True

    def release(self) -> None:
        """Each is of its own class again: globals, and what cannot be copied, are the user's own objects."""
        for value, kind in self._held:
            if type(value) is not kind:
                object.__setattr__(value, "__class__", kind)

    def changed(self) -> Change | None:
        """An attribute that the trace changed."""
        for (_, name), (value, was, before) in self._before.items():
            now = vars(value).get(name, MISSING)
            if snapshot(now) != before and not is_noted_once(was, now):
                return Change(f"{name} of {_named(value)}", now is was and is_grown_table(before, now))
        changed = (f"what is in {_named(value)}" for value, was in self._whole if inside(value) != was)
        return next(map(Change, changed), None)

    def before(self, value: Any, name: str) -> None:
        """That an attribute is read or written, as it is still."""
        if not name.startswith("__"):
            own = object.__getattribute__(value, "__dict__")
            was = own.get(name, MISSING)
            self._before.setdefault((id(value), name), (value, was, snapshot(was)))

    def note(self, value: Any, name: str, own: dict[str, Any]) -> None:
        seen = self._read.get(id(value))
        if seen is None:
            return
        if name == "__dict__":
            self._read[id(value)] = None
        elif not name.startswith("__"):
            name = getattr(type(value), "attribute_map", {}).get(name, name)
            seen.add(name)
            self.before(value, name)


def _watched(kind: type, configurations: Configurations, is_open: Callable[[], bool]) -> type:
    def __getattribute__(self: Any, name: str) -> Any:
        if is_open():
            configurations.note(self, name, object.__getattribute__(self, "__dict__"))
        value = super(made, self).__getattribute__(name)
        if is_open() and not name.startswith("__"):
            configurations.watch(value, is_open)
        return value

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if is_open():
            configurations.before(self, name)
        super(made, self).__setattr__(name, value)

    body = {"__getattribute__": __getattribute__, "__setattr__": __setattr__}
    made: Any = type(kind.__name__, (Unannounced, kind), body)
    made.__qualname__, made.__module__ = kind.__qualname__, kind.__module__
    return made


def _named(value: Any) -> str:
    return f"an object of class {type(value).__name__}"
