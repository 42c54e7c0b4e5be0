"""Values besides tensors that code may see: whose they are, and whether two mean the same to a program."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import enum
import functools
import operator
import random
import sys
import types
import weakref
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from autopar._compat import pytree

MISSING = object()

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
CONSTANT = (*SCALARS, enum.Enum)  # equal ones are one
CONTAINERS = (list, tuple, dict, set, np.ndarray)
MUTABLE = (list, dict, deque)
COLLECTIONS = (Mapping, Sequence, Set)  # also those of classes of a user's or a library's
DRAWING = (random.Random, np.random.Generator, np.random.RandomState)
BYTES = (array, bytearray, ctypes.c_int.__mro__[-2])  # numbers of C's, arrays and structures
# What may change and stay the same object.
IN_PLACE = (
    list, dict, set, deque, types.MappingProxyType, np.ndarray, Tensor, *DRAWING, Iterator, *BYTES, SynchronizedBase,
    functools.partial,
)  # fmt: skip
FEW = 1024  # objects in a list are looked at, at most
DEEPEST = 100  # containers in containers, likewise
WEAK_TABLES = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
KEEPERS = (  # of Python's, for settings
    argparse.Namespace, types.SimpleNamespace, UserDict, UserList, ChainMap, *WEAK_TABLES,
)  # fmt: skip
COMPILED = {*sys.stdlib_module_names, "torch", "numpy"}  # some of their modules have no file
SITE = "site-packages", "dist-packages"  # where installed packages lie
_TORCH = str(Path(torch.__file__).parent)
_STANDARD = str(Path(random.__file__).parent)
_OURS = str(Path(__file__).parents[1])


def is_noted_once(was: Any, now: Any) -> bool:
    """Whether code that made `now` of `was` may have noted something for good: that it has warned, what kind of labels
    there are. A number that changes is a counter.
    """
    is_flag = was is MISSING or was is None or isinstance(was, (bool, str))
    is_set = isinstance(was, set) and now is was and not any(isinstance(part, Tensor) for part in held_in(now))
    return (is_flag and isinstance(now, SCALARS)) or is_set


@dataclass(frozen=True)
class Change:
    """What a trace has changed, in words. `is_table`: a dict has got entries, and lost none, nor a tensor among them: a
    table of what was found out, which is asked before it is found out again.
    """

    told: str
    is_table: bool = False


def is_grown_table(was: Any, now: Any) -> bool:
    """Whether what a dict had, by `snapshot`, is in it still, and what is new holds no tensor."""
    if not isinstance(now, dict) or not (isinstance(was, tuple) and was[0] is type(now)):
        return False
    table, had = cast("dict[Any, Any]", now), dict(cast("list[tuple[Any, Any]]", was[1]))
    if had.keys() - table.keys():
        return False
    kept = all(snapshot(table[key]) == value or is_grown_table(value, table[key]) for key, value in had.items())
    new = [value for key, value in table.items() if key not in had]
    return kept and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(new))


def has_grown(value: Any, was: Any, now: Any) -> bool:
    """Whether what had `was` in it, by `snapshot`, is such a table, or an object in the place of `value` with more."""
    return is_grown_table(was, now) if now is value else _is_grown_object(value, now)


def _is_grown_object(was: Any, now: Any) -> bool:
    """Whether an object of a package stands for another one that had the same in it, but for such tables that grew:
    einx makes its registry anew for each thing that it notes there.
    """
    if now is was or type(now) is not type(was) or isinstance(was, PLAIN) or is_mine(type(was)):
        return False
    return (
        isinstance(getattr(was, "__dict__", None), dict)
        and vars(now).keys() == vars(was).keys()
        and is_grown_table(snapshot(vars(was)), vars(now))
    )


def is_alike(was: Any, now: Any) -> bool:
    """Whether there is nothing more in it."""
    return _is_grown_object(was, now) and snapshot(vars(was)) == snapshot(vars(now))


DEEPEST = 8  # folders of a package
PLAIN = (
    list, tuple, dict, set, frozenset, deque, np.ndarray, Tensor, nn.Module, type, enum.Enum, functools.partial,
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, *BYTES,
    SynchronizedBase,
)  # fmt: skip


def held_in(value: Any) -> list[Any]:
    """What is in a list, tuple, set, deque or the values of a dict, told by these themselves: classes of users that are
    some may say that they have no length, or another.
    """
    match value:
        case dict():
            return [*dict.values(cast("dict[Any, Any]", value))]
        case types.MappingProxyType():
            return [*cast("Mapping[Any, Any]", value).values()]
        case list() | tuple() | set() | frozenset() | deque():
            kind = next(one for one in (list, tuple, set, frozenset, deque) if isinstance(value, one))
            return [*kind.__iter__(cast("Any", value))]
        case _:
            return []


def put_in(value: list[Any] | dict[Any, Any], part_of: Callable[[Any], Any]) -> None:
    """Let a list or a dict hold `part_of` what it holds, told by these themselves: a class of the user's may give
    something else by `[]`.
    """
    base: Any = list if isinstance(value, list) else dict
    places = list[Any](range(list.__len__(value)) if isinstance(value, list) else dict.keys(value))
    for place, held in zip(places, held_in(value), strict=True):
        if (made := part_of(held)) is not held:
            base.__setitem__(value, place, made)


def copied(value: Any) -> Any:
    """Lists, dicts and tuples with the same in them; anything else is itself."""
    is_known = isinstance(value, (tuple, *MUTABLE)) or type(value) in pytree.SUPPORTED_NODES
    return pytree.tree_map(lambda leaf: leaf, value) if is_known else value


def made_anew(value: Any) -> Any:
    """A list, a dict, a set or a tuple of such with the same in it, for a call of its own; anything else is itself."""
    return pytree.tree_map(lambda leaf: set[Any](leaf) if type(leaf) is set else leaf, value)


def told(value: Any) -> str:
    """What an attribute is, in words."""
    if value is MISSING:
        return "not there"
    if isinstance(value, Tensor):
        return f"a tensor {[*value.shape]}"
    count = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
    return f"a {type(value).__name__} with {count} tensors in it" if count else repr(value)[:80]


def few_in(value: Any) -> list[Any]:
    """The same, of what holds few."""
    found = held_in(value)
    return found if len(found) <= FEW else []


_OPERATORS = """
    call getitem len iter bool contains add radd sub rsub mul rmul truediv rtruediv matmul rmatmul pow neg float int
    index enter exit getattr eq lt gt le ge
"""
OPERATORS = frozenset(f"__{name}__" for name in _OPERATORS.split())  # what Python calls of an object without its name


def is_mine(kind: type) -> bool:
    """Whether a class is of a script's, whose attributes may be set: none of torch, Python, ours or a package."""
    return kind.__module__ == "__main__" or not is_others(file_of(kind))


def in_front(kinds: Sequence[type], owner: type) -> list[type]:
    """Those of a script's that are asked before `owner`, and may be given what it has."""
    return [one for one in kinds[: kinds.index(owner)] if is_mine(one)]


def operators_of(kind: type) -> list[tuple[type, str, Any]]:
    """The operators of a class, and those that it has from others of a script's: whose, name, what."""
    kinds = [one for one in kind.__mro__ if is_mine(one)]
    return [(one, name, vars(one)[name]) for one in kinds for name in sorted(OPERATORS & vars(one).keys())]


def led_to(value: Any) -> list[Any]:
    """The objects that a weak reference, a proxy, a weak method or a weak table leads to."""
    if type(value) in weakref.ProxyTypes:
        with contextlib.suppress(ReferenceError):  # it is gone
            return [value.__repr__.__self__]
        return []
    if isinstance(value, weakref.WeakMethod):
        return [method.__self__] if (method := value()) is not None else []
    if isinstance(value, weakref.ref):
        return [there] if (there := value()) is not None else []
    if isinstance(value, (weakref.WeakSet, weakref.WeakKeyDictionary)):
        return [*value][:FEW]
    return [*value.values()][:FEW] if isinstance(value, weakref.WeakValueDictionary) else []


Hidden = Mapping[int, Set[Any] | None]  # id of a container or object -> keys that do not count; None: all


def snapshot(value: Any, hidden: Hidden = types.MappingProxyType({})) -> Any:
    """Something that equals another snapshot where two values mean the same to a program. Objects are themselves."""
    return _Looked(whole=False, hidden=hidden).at(value, DEEPEST)


def inside(value: Any, hidden: Hidden = types.MappingProxyType({})) -> Any:
    """As `snapshot`, with the attributes of objects, and of those that they hold."""
    return _Looked(whole=True, hidden=hidden).at(value, DEEPEST)


class _Looked:
    """A look at a value and all that it holds: each container once, however often it is there."""

    def __init__(self, *, whole: bool, hidden: Hidden) -> None:
        self.whole, self.hidden = whole, hidden
        self.known: dict[int, Any] = {}  # by what holds itself, it is its `id`

    def at(self, value: Any, depth: int) -> Any:
        match value:
            case nn.Parameter():  # its values are no constants of a program
                return id(value)
            case Tensor():
                return id(value), 0 if value.is_inference() else value._version
            case np.ndarray():
                held = self._all(value.ravel().tolist(), depth - 1) if value.dtype.hasobject else value.tobytes()
                return value.dtype.str, value.shape, held
            case _ if isinstance(value, BYTES):
                return type(value), getattr(value, "typecode", None), bytes(value)
            case SynchronizedBase():  # `multiprocessing.Value`
                return self.at(value.get_obj(), depth)
            case list() | tuple() | dict() | set() | frozenset() | deque():
                if id(value) not in self.known:
                    self.known[id(value)] = id(value)
                    self.known[id(value)] = self._held(value, depth - 1) if depth else id(value)
                return self.known[id(value)]
            case types.MappingProxyType():  # a look at a dict
                return self._held(dict(value), depth - 1) if depth else id(value)
            case np.random.Generator():
                return repr(value.bit_generator.state)
            case random.Random():
                return value.getstate()
            case np.random.RandomState():
                return repr(value.get_state())
            case types.GeneratorType():
                frame = value.gi_frame
                return None if frame is None else (frame.f_lasti, self._all(dict(frame.f_locals), min(depth - 1, 2)))
            case Iterator():  # what is left, where it says so (itertools.count in its repr)
                return id(value), operator.length_hint(value), repr(value)
            case _ if isinstance(value, SCALARS):
                return type(value), repr(value) if isinstance(value, float) else value
            case _:
                return self._object(value, depth)

    def _held(self, value: Any, depth: int) -> Any:
        """The kind of a container, what is in it, and what attributes an object of a class of the user's has."""
        held = self._all(value, depth)
        own = getattr(value, "__dict__", None)
        told = (deque, held, value.maxlen) if isinstance(value, deque) else (type(value), held)
        return (*told, self._all(dict(own), depth)) if own else told

    def _all(self, value: Any, depth: int) -> Any:
        without = self.hidden.get(id(value), ())
        if without is None:
            return None
        if isinstance(value, dict):
            kind = OrderedDict if isinstance(value, OrderedDict) else dict
            held = kind.items(cast("Any", value))
            return [(key, self.at(part, depth)) for key, part in held if key not in without]
        if without:
            return [self.at(part, depth) for place, part in enumerate(held_in(value)) if place not in without]
        if isinstance(value, (set, frozenset)):
            return frozenset(map(_hashed, held_in(value)))
        return [self.at(part, depth) for part in held_in(value)]

    def _object(self, value: Any, depth: int) -> Any:
        if isinstance(value, functools.partial) and depth:
            made = cast("functools.partial[Any]", value)
            held = (made.args, made.keywords, vars(made), getattr(made.func, "__self__", None))
            return id(value), id(made.func), [self.at(part, depth - 1) for part in held]
        own = own_names(value) if self.whole and depth else None
        if own is None or is_of_torch(type(value)):
            return id(value)
        if id(value) not in self.known:
            self.known[id(value)] = id(value)
            without = self.hidden.get(id(value)) or ()
            own = {name: part for name, part in own.items() if name not in without}
            self.known[id(value)] = id(value), self._all(own, depth - 1)
        return self.known[id(value)]


def _hashed(value: Any) -> Any:
    return (type(value), value) if isinstance(value, SCALARS) else id(value)


def own_names(value: Any) -> Mapping[str, Any] | None:
    """The attributes of a configuration or the like; None for what is no such object."""
    if isinstance(value, (*PLAIN, *SCALARS)):
        return None
    own = getattr(value, "__dict__", None)
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return (
        own if not slots else {**(own or {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}
    )


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    of_class = f"_{kind.__name__.lstrip('_')}"  # what Python puts before names of two underscores
    return tuple(of_class + name if name.startswith("__") and not name.endswith("__") else name for name in names)


def _is_in_site(file: str) -> bool:
    return any(name in file for name in SITE)


def is_torchs(file: str) -> bool:
    """Whether a source file is torch's, Python's own or ours, as far as its names are not the user's to change."""
    return file.startswith((_TORCH, _OURS, "<")) or (file.startswith(_STANDARD) and not _is_in_site(file))


def is_own(file: str) -> bool:
    """Whether a source file is ours."""
    return file.startswith(_OURS)


@functools.cache
def is_installed(file: str) -> bool:
    """Whether a source file came with a package that pip has installed, whose tables nobody changes: among the others,
    or in a folder of its own (`pip install --target`), where what pip has noted of it lies beside it.
    """
    if not file or _is_in_site(file):
        return bool(file)
    path = Path(file)
    folders = [*path.parents][:DEEPEST] if path.is_absolute() else []
    records = ((folder, record) for folder in folders for record in folder.glob("*.dist-info/RECORD"))
    return any(path.relative_to(folder).as_posix() in _noted_in(record) for folder, record in records)


@functools.cache
def _noted_in(record: Path) -> frozenset[str]:
    """The files of a package, as pip has noted them."""
    return frozenset(line.partition(",")[0] for line in record.read_text(errors="replace").splitlines())


def is_others(file: str) -> bool:
    """Whether a source file is none of a script's."""
    return is_torchs(file) or is_installed(file)


def is_of_torch(kind: type) -> bool:
    """Whether it is a class of torch's, Python's own or ours, but for those that settings are kept in."""
    if kind.__module__ == "__main__" or kind in KEEPERS:
        return False
    return is_torchs(file_of(kind))


def file_of(kind: type) -> str:
    """Where its module was read from; "<" for one of Python or torch that is compiled in, "" where nobody knows: a
    module that was loaded by hand, or made of text.
    """
    if not isinstance(module := cast("Any", kind.__module__), str):  # of C's, which has it as an attribute of objects
        return "<"
    if file := getattr(sys.modules.get(module), "__file__", None):
        return file
    return "<" if module.partition(".")[0] in COMPILED else ""
