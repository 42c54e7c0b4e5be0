"""Functions that a module holds and that look at it through a variable of an enclosing function:

    self.to_logits = lambda x: x @ self.embedding.weight.t()

`copy.deepcopy` leaves functions as they are, so the one of a copy would read the module that was copied.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

from torch import Size, Tensor, nn

from autopar.trace.values import held_in, led_to, put_in


def look_at_copies(made: nn.Module, copy_of: Mapping[int, Any]) -> list[tuple[Any, Any]]:
    """Let the functions that modules of `made` hold look at copies: `copy_of[i]`, in the place of the object with `id`
    i (what `copy.deepcopy` leaves in its memo). Those that look at nothing that was copied stay the same objects, as do
    their variables. What it gives: (a list, dict or variable that stands for another one in a function, that one).
    """
    turned = _Turned(copy_of)
    elsewhere = {id(one): one for old, one in copy_of.items() if isinstance(one, nn.Module) and id(one) != old}
    for part in {**{id(one): one for one in made.modules()}, **elsewhere}.values():  # a teacher that is not registered
        held = vars(part)
        for name, value in [*held.items()]:
            held[name] = turned.within(value)
    return turned.rebuilt


def globals_of(functions: Iterable[Any]) -> list[Any]:
    """The lists and dictionaries that these functions find among their globals: every copy of a function finds the very
    same.
    """
    plain = (function for function in functions if isinstance(function, types.FunctionType))
    named = (one.__globals__.get(name) for one in plain for name in one.__code__.co_names)
    return [value for value in named if isinstance(value, (list, dict, deque))]


def with_parts(value: Any, parts: list[Any]) -> Any:
    """A list or tuple like `value` of these, whatever its class makes of what it is called with."""
    kind = type(value)
    if not isinstance(value, tuple) or kind.__module__ in ("builtins", "torch.return_types") or kind is Size:
        return kind(parts)
    made = tuple.__new__(kind, parts)
    getattr(made, "__dict__", {}).update(getattr(value, "__dict__", {}))
    return made


class _Turned:
    def __init__(self, copy_of: Mapping[int, Any]) -> None:
        self.copy_of = copy_of
        self.cells: dict[int, tuple[types.CellType, types.CellType]] = {}  # with the old one, whose id stays its own
        self.own: dict[int, Any] = {}
        self.functions: dict[int, tuple[types.FunctionType, types.FunctionType]] = {}
        self.rebuilt: list[tuple[Any, Any]] = []

    def of(self, value: Any) -> Any:
        """What stands for the value where it is read."""
        if not self._reaches(value, set()):
            return value
        if id(value) in self.copy_of:
            return self.copy_of[id(value)]
        if isinstance(value, WEAK):
            return self._weak(value)
        match value:
            case types.FunctionType():
                return self._function(value)
            case types.MethodType():
                return types.MethodType(self.of(value.__func__), self.of(value.__self__))
            case partial():
                given = cast("partial[Any]", value)
                return partial(self.of(given.func), *map(self.of, given.args), **self._named(given.keywords))
            case list():
                return self._as_rebuilt(value, [*map(self.of, held_in(value))])
            case dict():
                return self._as_rebuilt(value, self._named(cast("dict[Any, Any]", value)))
            case _:
                return with_parts(value, [*map(self.of, held_in(value))])

    def within(self, value: Any) -> Any:
        """`of`, of what a copy holds; its lists and dictionaries (hooks, tables of activations) are its own already."""
        if self.copy_of.get(id(value)) is value:  # no copy: everybody's
            return value
        if isinstance(value, (types.FunctionType, types.MethodType, partial, tuple, *WEAK)):
            return self.of(value)
        if isinstance(value, (list, dict)) and id(value) not in self.own:
            self.own[id(value)] = value
            put_in(cast("Any", value), self.within)
            return value
        if isinstance(value, (Tensor, nn.Module)):
            return value
        return self.copy_of.get(id(value), value)  # a hook may be an object that the model holds elsewhere, too

    def _weak(self, value: Any) -> Any:
        """Of the same kind, to what stands for what it leads to."""
        match value:
            case weakref.ref():
                return weakref.ref(self.of(value()))
            case weakref.WeakSet():
                return weakref.WeakSet(map(self.of, value))
            case weakref.WeakValueDictionary():
                return weakref.WeakValueDictionary({name: self.of(part) for name, part in value.items()})
            case _:
                return weakref.WeakKeyDictionary({self.of(key): self.of(part) for key, part in value.items()})

    def _as_rebuilt(self, value: Any, made: Any) -> Any:
        self.rebuilt.append((made, value))
        return made

    def _named(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        return {name: self.of(value) for name, value in values.items()}

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        if id(function) in self.functions:
            return self.functions[id(function)][1]
        cells = function.__closure__ or ()
        closure = tuple(self._cell(cell) for cell in cells)
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
        )
        self.functions[id(function)] = function, made  # it may be named in one of its own variables
        made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
        made.__module__, made.__doc__ = function.__module__, function.__doc__
        made.__dict__.update(function.__dict__)
        if function.__defaults__ is not None:
            made.__defaults__ = tuple(map(self.of, function.__defaults__))
        if function.__kwdefaults__ is not None:
            made.__kwdefaults__ = self._named(function.__kwdefaults__)
        for old, new in zip(cells, closure, strict=True):
            if new is not old:
                new.cell_contents = self.of(old.cell_contents)
        return made

    def _cell(self, cell: types.CellType) -> types.CellType:
        """An empty one in its place, the same for all functions that share it; itself, where nothing is to be seen."""
        if id(cell) in self.cells:
            return self.cells[id(cell)][1]
        made = types.CellType() if self._reaches(cell, set()) else cell
        self.cells[id(cell)] = cell, made
        if made is not cell:
            self.rebuilt.append((made, cell))
        return made

    def _reaches(self, value: Any, seen: set[int]) -> bool:
        """Whether anything that was copied can be come to from there."""
        if id(value) in self.copy_of and self.copy_of[id(value)] is not value:
            return True
        if id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._reaches(part, seen) for part in parts_of(value))


WEAK = (weakref.ref, weakref.WeakSet, weakref.WeakValueDictionary, weakref.WeakKeyDictionary)


def parts_of(value: Any) -> list[Any]:
    """What a function, or a plain container, holds, or leads to."""
    if isinstance(value, WEAK):
        return [*led_to(value), *(value.values() if isinstance(value, weakref.WeakKeyDictionary) else ())]
    match value:
        case types.FunctionType():
            named = [*(value.__kwdefaults__ or {}).values()]
            return [*(value.__closure__ or ()), *(value.__defaults__ or ()), *named]
        case types.CellType():
            try:
                return [value.cell_contents]
            except ValueError:  # not filled yet
                return []
        case types.MethodType():
            return [value.__func__, value.__self__]
        case partial():
            given = cast("partial[Any]", value)
            return [given.func, *given.args, *given.keywords.values()]
        case list() | tuple() | dict():
            return held_in(value)
        case _:
            return []
