"""Settings outside of modules: what the model's functions name of globals, enclosing variables, classes and objects.

They are read off the code: a global that a function loads, and of the objects, classes and modules that are found so
those attributes whose names any of these functions has. More than forward reads may be among them; what it does read
is, but for names that are made of text (`getattr(cfg, f"{kind}_weight")`).
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import enum
import functools
import inspect
import os
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from autopar.trace.code import (
    ASKING,
    CODE,
    FLAGS,
    FUNCTIONS,
    TYPES,
    asked_of,
    asks_for_nothing,
    functions_of,
    globals_of,
    is_torchs_code,
    loggers_of,
    names_of,
    needs_types,
    variables_of,
)
from autopar.trace.keys import Keys
from autopar.trace.lookups import CACHED, Cell, Now, Of, clearings, keeps_numbers, other_places, registry_of
from autopar.trace.values import (
    IN_PLACE,
    MISSING,
    SCALARS,
    WEAK_TABLES,
    few_in,
    file_of,
    in_front,
    is_installed,
    is_mine,
    is_of_torch,
    is_torchs,
    led_to,
    operators_of,
)

HOLDERS = 2000  # objects of the user's are looked at, at most
MAKING = (
    "__init__",
    "__new__",
    "__init_subclass__",
    "__post_init__",
    "__setattr__",
    "__repr__",
    "__str__",
    "__reduce__",
)
GIVEN = "what a hook is given"
NO_NAME = "autopar_has_given_nothing_this_name"
OTHERS = (Tensor, np.ndarray, np.generic, torch.autograd.Function)
NO_OWNERS = (*OTHERS, *SCALARS, *CODE, enum.Enum, type, types.ModuleType)


@dataclass
class _Holder:
    """Something with attributes. `tried`: names that were looked up."""

    place: Of
    tried: set[str] = field(default_factory=set[str])


ASKED = TYPES | ASKING


class Settings:
    """What is found. `found`: (place, name, value), each once."""

    def __init__(self, methods: Mapping[str, list[Any]]) -> None:
        self.found: list[tuple[Mapping[str, Any], str, Any]] = []
        self.cached: list[Any] = []  # functions that keep what they gave
        self.owners: list[Any] = []  # objects that hooks are methods of, and modules that functions name
        self.asking: list[tuple[dict[str, Any], Set[str]]] = []  # globals of functions, and what they name of `ASKED`
        self._methods = methods
        self._known: dict[tuple[int, str], Any] = {}  # (id of a place, name) -> the place, so that its id stays its own
        self._classes: dict[type, Mapping[str, Any]] = {}  # the place of each: `vars` makes a new one every time
        self._names: set[str] = set()  # of all code so far
        self._asked: set[str] = set()  # those that it looks up by text, which need not be there
        self._done: set[types.CodeType] = set()
        self._functions: dict[int, types.FunctionType] = {}
        self._left: list[Any] = []
        self._holders: dict[int, _Holder] = {}
        self._keepers: dict[int, Any] = {}  # objects of torch's and Python's own classes, and tables of such

    def look(self, functions: Iterable[Any], classes: Iterable[type], hooks: Iterable[Any] = ()) -> None:
        """At what these functions (whatever is none of them is passed over), and those that they name, name; and at
        those names in classes of the user's. `hooks`: callables of any kind.
        """
        self._left += functions
        self._left += (call for name in sorted(self._methods) if _is_operator(name) for call in self._methods[name])
        for hook in hooks:
            self._look_at_call(hook)
        for kind in classes:
            if not _is_installed(kind):
                self._hold(kind)
        known = -1
        while self._left or len(self._known) > known:
            known = len(self._known)
            while self._left and len(self._functions) < FUNCTIONS:
                self._look_at_code(self._left.pop())
            self._left.clear()
            for holder in [*self._holders.values()]:
                self._look_inside(holder)

    def _look_at_call(self, call: Any) -> None:
        """At a function, or a method, or an object that may be called, and at what it is given once for all."""
        if isinstance(call, partial):
            given = cast("partial[Any]", call)
            for part in (given.func, *given.args, *given.keywords.values()):
                self._look_at_call(part)
        elif isinstance(call, types.MethodType):
            self._look_at_code(call, is_hook=True)
            self._own(call.__self__)
        elif isinstance(call, types.FunctionType):
            self._look_at_code(call, is_hook=True)
        elif not isinstance(call, (*SCALARS, type)):
            for kind in type(call).__mro__:
                self._look_at_code(vars(kind).get("__call__"), is_hook=True)
            self._own(call)

    def _own(self, value: Any) -> None:
        """An object that functions are given, or are methods of: they may write to it."""
        if isinstance(value, (list, dict, deque)):
            self._see({GIVEN: value}, GIVEN, value)
        elif hasattr(value, "__dict__") and not isinstance(value, NO_OWNERS):
            self.owners.append(value)
            self._hold(value)

    def keys(self) -> Keys | None:
        """By which the code that was looked at asks dicts; None where that is not all code."""
        if len(self._functions) >= FUNCTIONS:
            return None
        methods = (call for name, calls in self._methods.items() if name not in MAKING for call in calls)
        return Keys(*(dict.fromkeys(one.__code__ for one in every) for every in (self._functions.values(), methods)))

    def objects(self) -> list[Any]:
        """Those that were found, but for classes, modules and functions."""
        held = (holder.place.holder for holder in self._holders.values())
        return [one for one in held if not isinstance(one, (type, types.ModuleType, types.FunctionType, enum.Enum))]

    def _look_at_code(self, given: Any, is_hook: bool = False) -> None:
        if isinstance(given, types.MethodType):
            self._hold(given.__self__)
        elif isinstance(given, partial):
            whole = cast("partial[Any]", given)
            self._look_at_code(whole.func)
            for part in (*whole.args, *whole.keywords.values()):
                self._hold(part)
        elif isinstance(given, CACHED) and not all(is_torchs_code(one.__code__) for one in functions_of(given)):
            self.cached.append(given)
            self._see(Now(clearings(given)), "cache_clear", 0)
        elif (registered := registry_of(given)) is not None:
            self._see(registered, "registry", registered["registry"])
        for function in functions_of(given):
            if id(function) not in self._functions and not is_torchs_code(function.__code__):
                self._look_at_function(function, is_hook)
                for name in globals_of(function.__code__, "IMPORT_NAME"):
                    if (module := sys.modules.get(name)) is not None:
                        self._hold(module)

    def _look_at_function(self, function: types.FunctionType, is_hook: bool) -> None:
        self._functions[id(function)] = function
        is_pips = not is_hook and is_installed(function.__code__.co_filename)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not filled yet
                self._see(Cell(cell), name, cell.cell_contents, is_pips)
        self._look_at_defaults(function, is_pips)
        if function.__code__ in self._done:  # of another function, with other variables
            return
        self._done.add(function.__code__)
        names = set(names_of(function.__code__))
        if asked := names & ASKED:
            asked &= {*globals_of(function.__code__)}
            self.asking.append((function.__globals__, asked | ({"is"} if needs_types(function.__code__) else set())))
        self._names |= names
        for name in sorted(names & FLAGS.keys()):
            self._see(Now(FLAGS[name]), name, FLAGS[name]())
        if not is_pips:
            self._asked |= asked_of(function.__code__)
            for logger in loggers_of(function):
                self._see_places(logger)
            for name in sorted(variables_of(function.__code__)):
                self._see(Now(partial(os.environ.get, name)), name, os.environ.get(name))
        # In one order on all ranks: what is found first names what is found.
        self._left += (call for name in sorted(names & self._methods.keys()) for call in self._methods[name])
        read: set[str] | None = None
        for name in sorted(names & function.__globals__.keys()):
            if name.startswith("@"):  # no name that anybody can write: pytest's, in what it makes of an assert
                continue
            value = function.__globals__[name]
            if not isinstance(value, (types.ModuleType, types.FunctionType, type)):
                read = set(globals_of(function.__code__)) if read is None else read
                if name not in read:  # but of an attribute: `self.loss`, in a script that calls its loss so
                    continue
            self._see(function.__globals__, name, value, is_pips)
        if not is_pips:  # what is not there yet
            named = {*globals_of(function.__code__)} - function.__globals__.keys() - vars(builtins).keys()
            for name in sorted(named):
                self._see(function.__globals__, name, MISSING)

    def _look_at_defaults(self, function: types.FunctionType, is_pips: bool) -> None:
        given, defaults = function.__code__.co_varnames[: function.__code__.co_argcount], function.__defaults__ or ()
        defaults = dict(zip(given[len(given) - len(defaults) :], defaults, strict=True))
        named = function.__kwdefaults__ or {}
        for name, part in {**defaults, **named}.items():
            if isinstance(part, IN_PLACE):
                self._see({name: part}, name, part, is_pips)
            elif not is_pips:
                self._own(part)
        if not is_pips and defaults and all(isinstance(part, SCALARS) for part in defaults.values()):
            self._see(Of(function), "__defaults__", function.__defaults__)
        if not is_pips and named and all(isinstance(part, SCALARS) for part in named.values()):
            self._see(Of(function), "__kwdefaults__", named)

    def _see(self, place: Mapping[str, Any], name: str, value: Any, is_pips: bool = False) -> None:
        """That this value is there. In installed code only plain values are taken to change."""
        if (id(place), name) in self._known:
            return
        self._known[id(place), name] = place
        if isinstance(value, (*CODE, CACHED)):
            self._left.append(value)
        if isinstance(value, types.ModuleType):
            self._hold(value)
            return
        if isinstance(value, functools.singledispatchmethod):
            self._left.append(value)
        if isinstance(value, nn.Module):
            self.owners.append(value)
        self._see_places(value)
        if isinstance(value, CACHED) and value.cache_info().currsize and asks_for_nothing(value):
            self._hold(value())  # made before, and given again
        for there in led_to(value):
            self._left += [value()] if isinstance(value, weakref.WeakMethod) else []
            self._hold(there)
        if isinstance(value, partial):
            given = {**dict(zip(map(str, range(len(value.args))), value.args, strict=True)), **value.keywords}
            for key, part in given.items():
                self._see(given, key, part)
        if is_pips and not isinstance(value, (*SCALARS, Tensor)):
            return
        if place.get(name, MISSING) is value or isinstance(value, SCALARS):  # and is not made anew each time
            self.found.append((place, name, value))
        if isinstance(value, (list, tuple, set, dict, deque, types.MappingProxyType)):
            for part in few_in(value):
                self._left += [part] if isinstance(part, CODE) else []
                self._hold(part)
        self._hold(value)

    def _see_places(self, value: Any) -> None:
        for place in other_places(value):
            self._see(*place)
        is_table = isinstance(value, (list, tuple, dict))
        if (is_table or keeps_numbers(value)) and id(value) not in self._keepers:
            self._keepers[id(value)] = value
            for part in few_in(value) if is_table else vars(value).values():  # a loader's dataset
                self._see_places(part)
                self._hold(part)

    def _hold(self, value: Any) -> None:
        if len(self._holders) < HOLDERS and id(value) not in self._holders and _has_settings(value):
            self._holders[id(value)] = _Holder(Of(value))
            if not isinstance(value, (type, types.ModuleType, types.FunctionType)):
                self.owners += [] if isinstance(value, WEAK_TABLES) else [value]  # whose keys are of the trace's copies
                for one, name, call in operators_of(type(value)):
                    self._see(self._class(one), name, call)
                if is_users_class(type(value)):
                    self._see(Now(partial(type, value)), "__class__", type(value))
            if isinstance(value, type) and not _is_installed(value):  # calling it may give what is there already
                self._left += [vars(one).get("__new__") for one in type.mro(value)]
                self._left += [vars(one).get("__call__") for one in type.mro(type(value))]
            for kind in () if isinstance(value, (type, types.ModuleType)) else type(value).__mro__:  # its operators
                self._left += (call for name, call in vars(kind).items() if _is_operator(name))

    def _class(self, kind: type) -> Mapping[str, Any]:
        """Its place, one for each."""
        return self._classes.setdefault(kind, vars(kind))

    def _look_inside(self, holder: _Holder) -> None:
        value = holder.place.holder
        kinds, above = _classes(value), type(value).__mro__
        names = self._names | self._asked
        names = (names & _names_in(value) if _lists_names(value) else names) - holder.tried
        holder.tried |= names
        for name in sorted(names):
            if name.startswith("__"):
                continue
            static = inspect.getattr_static(value, name, MISSING)
            own = getattr(value, "__dict__", {})
            if _is_code(static) and (isinstance(value, type) or name not in own):
                owner = next(one for one in (*kinds, *above) if name in vars(one))
                self._see(self._class(owner), name, static)
                for one in in_front(kinds, owner) if owner in kinds else ():
                    self._see(self._class(one), name, MISSING)
                if isinstance(own, dict):  # an object may get one of its own
                    self._see(own, name, MISSING)
            elif (part := holder.place.get(name, MISSING)) is not MISSING:
                self._see(holder.place, name, part)
        if not isinstance(value, (type, types.ModuleType, Mapping)):
            for name in sorted(name for name in self._asked - holder.tried if not name.startswith("__")):
                holder.tried.add(name)
                self._see(holder.place, name, MISSING)


def _is_operator(name: str) -> bool:
    """Whether Python calls a method without its name: `scale(x)`, `table[key]`."""
    return name.startswith("__") and name not in MAKING


def _is_installed(kind: type) -> bool:
    return is_installed(file_of(kind))


def is_users_class(value: Any) -> bool:
    """Whether it is a class of the user's that settings may be kept in."""
    if not isinstance(value, type) or issubclass(value, (nn.Module, Tensor, torch.autograd.Function, enum.Enum)):
        return False
    return is_mine(value)


def _has_settings(value: Any) -> bool:
    """Whether it is a class, a plain object or a function with attributes, of the user's or installed. Modules are
    watched while they are traced (`autopar.trace.reads`); of their classes one may be named.
    """
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace, threading.local)):
        return True
    if isinstance(value, types.FunctionType):
        return bool(vars(value))
    if isinstance(value, types.ModuleType):
        return value.__name__ not in sys.builtin_module_names and not is_torchs(getattr(value, "__file__", None) or "")
    kind: type = value if isinstance(value, type) else type(value)
    if issubclass(kind, nn.Module):
        return kind is value
    is_other = not is_mine(kind) if issubclass(kind, enum.Enum) else issubclass(kind, OTHERS)
    return not is_other and not is_of_torch(kind)


def _classes(value: Any) -> tuple[type, ...]:
    return value.__mro__ if isinstance(value, type) else type(value).__mro__


def _is_code(static: Any) -> bool:
    """Whether what a class has by a name is a method or the like, which makes something when it is looked up."""
    return isinstance(static, CODE) or (hasattr(static, "__get__") and not inspect.isdatadescriptor(static))


def _lists_names(value: Any) -> bool:
    """Whether all attributes are where Python keeps them, or keys; not where a `__getattr__` finds others. That of a
    mapping is not asked for names which are no keys: it may make an entry of each. One that makes an object of whatever
    name it is asked for (einx's tracers do) keeps no settings in those.
    """
    if isinstance(value, (type, types.ModuleType, Mapping)) or not any(
        "__getattr__" in vars(one) for one in _classes(value)
    ):
        return True
    return not isinstance(Of(value).get(NO_NAME, None), SCALARS)


def _names_in(value: Any) -> set[str]:
    """The names of all attributes, of classes of the user's and installed ones among them."""
    kinds = [] if isinstance(value, types.ModuleType) else [one for one in _classes(value) if not is_of_torch(one)]
    kinds += [one for one in type.mro(type(value)) if not is_of_torch(one)] if isinstance(value, type) else []
    return {*getattr(value, "__dict__", {}), *_keys_of(value), *(name for one in kinds for name in vars(one))}


def _keys_of(value: Any) -> list[str]:
    """Of a mapping, which may have an attribute for each."""
    if not isinstance(value, Mapping):
        return []
    with contextlib.suppress(Exception):  # whatever an `__iter__` of the user's raises
        return [key for key in cast("Mapping[Any, Any]", value) if isinstance(key, str)]
    return []
