"""Methods that stand in classes for as long as a model is traced, and note what is read of their objects.

They stand in the user's own classes, also for objects that nobody watches: an object of a class made for watching would
be of another one to code that asks (`type(layer) is nn.Linear`, `==` of dataclasses, tables by class).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from autopar.trace.values import MISSING


class StandIns:
    """Of some classes. `names`: of the methods."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._own: dict[type, dict[str, Any]] = {}  # class -> what of these it defines itself

    def __contains__(self, kind: type) -> bool:
        return kind in self._own

    def put(self, kind: type, made: Iterable[Callable[..., Any]]) -> bool:
        """Let these stand in a class, in the order of `names`. False where it is one of C, which is not written to."""
        own = {name: vars(kind).get(name, MISSING) for name in self.names}
        try:
            for name, method in zip(self.names, made, strict=True):
                type.__setattr__(kind, name, method)
        except TypeError:
            return False
        self._own[kind] = own
        return True

    def restore(self) -> None:
        """Classes are as they were."""
        for kind, own in reversed(self._own.items()):
            for name, was in own.items():
                if was is MISSING:
                    type.__delattr__(kind, name)
                else:
                    type.__setattr__(kind, name, was)
        self._own.clear()
