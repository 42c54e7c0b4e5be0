"""By which keys code looks into a dict that it finds under a name: an entry that nobody asks for may change.

    self.config["width"], CONFIG.get("rate", 0.1), "bias" in self.config, CONFIG["loss"]["weight"], CONFIG.width

A path has a key, and those by which what is there is asked in turn.

Read off the code (Python 3.11 and 3.12). Where it does anything else with the dict (goes over it, hands it on, gives it
another name, writes to it), all of it counts.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from autopar.trace.code import asked_of, codes
from autopar.trace.values import MISSING

BY_NAME = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD")
OF_NO_VALUE = ("LOAD_CONST", "LOAD_FAST", "STORE_FAST", "LOAD_CLOSURE", "MAKE_CELL", "COPY_FREE_VARS")
NOTHING = ("EXTENDED_ARG", "CACHE", "PRECALL", "NOP")
TEXT = frozenset(("getattr", "__getattribute__", "attrgetter", "methodcaller"))
ALL_NAMES = frozenset(("vars", "__dict__", "globals", "locals", "eval", "exec"))  # who asks them may find any


Path = tuple[Any, ...]
PLAIN = (dict, defaultdict, OrderedDict)
ASKING = ("__getitem__", "__missing__", "get", "__contains__", "__getattr__", "__getattribute__")
FINDS = frozenset(("KeyError", "AttributeError", "get", "format"))


class Keys:
    """Of all this code. `methods`: what it may find by text that it makes."""

    def __init__(self, code: Iterable[types.CodeType], methods: Iterable[types.CodeType]) -> None:
        self._code, self._methods = [*code], [*methods]

    @functools.cached_property
    def _parts(self) -> dict[str, list[types.CodeType]]:
        """Name -> where it stands."""
        found = _by_names(self._code)
        return _by_names({*self._code, *self._methods}) if TEXT & found.keys() else found

    @functools.cached_property
    def _by_text(self) -> set[str]:
        """The names that are looked up by text."""
        return {name for code in (*self._code, *self._methods) for name in asked_of(code)}

    def asked(self, name: str, kind: type) -> frozenset[Path] | None:
        """The paths by which dicts of that class under that name are asked; None where something else is done with one,
        or may be.
        """
        if name not in self._parts or ALL_NAMES & self._parts.keys() or name in self._by_text or not _is_plain(kind):
            return None
        found = [_paths_in(part, name, kind) for part in self._parts[name]]
        known = [paths for paths in found if paths is not None]
        return frozenset[Path]().union(*known) if len(known) == len(found) else None


def looked_up(table: dict[Any, Any], path: Path) -> Any:
    """What is at a path; MISSING where nothing is, or a table of another kind than a path is read off for."""
    for place, key in enumerate(path):
        if place and type(table) not in PLAIN:
            return table
        table = dict.get(table, key, MISSING)
    return table


def _is_plain(kind: type) -> bool:
    """Whether it is a dict whose entries are found as in any, or as attributes."""
    if kind in PLAIN:
        return True
    own = [one for one in kind.__mro__[: kind.__mro__.index(dict)] if one not in PLAIN]
    asks = [vars(one)[name] for one in own for name in ASKING if name in vars(one)]
    return all(ask in (dict.__getitem__, dict.get) or _only_finds(ask) for ask in asks)


def _only_finds(ask: Any) -> bool:
    """Whether a `__getattr__` gives `self[name]`, and nothing else."""
    if not isinstance(ask, types.FunctionType) or ask.__name__ != "__getattr__" or ask.__closure__:
        return False
    return {*ask.__code__.co_names} <= FINDS and ask.__code__.co_argcount == 2 and len([*codes(ask.__code__)]) == 1


def _by_names(every: Iterable[types.CodeType]) -> dict[str, list[types.CodeType]]:
    found: dict[str, list[types.CodeType]] = {}
    for part in (part for code in every for part in codes(code)):
        for name in {*part.co_names, *part.co_varnames, *part.co_freevars, *part.co_cellvars}:
            found.setdefault(name, []).append(part)
    return found


def _paths_in(code: types.CodeType, name: str, kind: type) -> set[Path] | None:
    if name in code.co_varnames:  # a parameter, which may have the dict as its default
        return None
    lines, found = [one for one in dis.get_instructions(code) if one.opname not in NOTHING], set[Path]()
    for place, one in enumerate(lines):
        if one.argval != name or one.opname in OF_NO_VALUE:
            continue
        path = _path_at(lines, place, kind) if one.opname in BY_NAME else ()
        if not path:
            return None
        found.add(path)
    return found


def _path_at(lines: Sequence[dis.Instruction], place: int, kind: type) -> Path:
    """The keys by which the dict that is loaded there is asked; none where it is not asked by a constant."""
    behind = [(one.opname, one.argval) for one in lines[place + 1 : place + 5]]
    match behind:
        case [("LOAD_CONST", key), ("BINARY_SUBSCR", _), *_]:
            return key, *_path_at(lines, place + 2, dict)
        case [("LOAD_METHOD" | "LOAD_ATTR", "get"), ("LOAD_CONST", key), ("CALL", 1), *_]:
            return (key,)
        case [("LOAD_METHOD" | "LOAD_ATTR", "get"), ("LOAD_CONST", key), (load, _), ("CALL", 2)] if _loads(load):
            return (key,)
        case [("LOAD_ATTR", key), *_] if kind not in PLAIN and not hasattr(kind, key):
            return (key,)
        case [("CONTAINS_OP", _), *_] if lines[place].opname != "BINARY_SUBSCR":
            first = place - 1 if lines[place].opname not in ("LOAD_ATTR", "LOAD_METHOD") else place - 2
            is_of_a_variable = first == place - 1 or lines[place - 1].opname in ("LOAD_FAST", "LOAD_DEREF")
            is_constant = first >= 0 and lines[first].opname == "LOAD_CONST"
            return (lines[first].argval,) if is_of_a_variable and is_constant else ()
        case _:
            return ()


def _loads(name: str) -> bool:
    return name in ("LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
