"""By which keys code looks into a dict that it finds under a name: an entry that nobody asks for may change.

    self.config["width"], CONFIG.get("rate", 0.1), "bias" in self.config

Read off the code (Python 3.11 and 3.12). Where it does anything else with the dict (goes over it, hands it on, gives it
another name, writes to it), all of it counts.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Sequence
from typing import Any

from autopar.trace.code import asked_of, codes

BY_NAME = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD")
OF_NO_VALUE = ("LOAD_CONST", "LOAD_FAST", "STORE_FAST", "LOAD_CLOSURE", "MAKE_CELL", "COPY_FREE_VARS")
NOTHING = ("EXTENDED_ARG", "CACHE", "PRECALL", "NOP")
TEXT = frozenset(("getattr", "__getattribute__", "attrgetter", "methodcaller"))
ALL_NAMES = frozenset(("vars", "__dict__", "globals", "locals", "eval", "exec"))  # who asks them may find any


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

    def asked(self, name: str) -> frozenset[Any] | None:
        """The keys by which dicts under that name are asked; None where something else is done with one."""
        if name not in self._parts or ALL_NAMES & self._parts.keys() or name in self._by_text:
            return None
        found = [_keys_in(part, name) for part in self._parts[name]]
        known = [keys for keys in found if keys is not None]
        return frozenset[Any]().union(*known) if len(known) == len(found) else None


def _by_names(every: Iterable[types.CodeType]) -> dict[str, list[types.CodeType]]:
    found: dict[str, list[types.CodeType]] = {}
    for part in (part for code in every for part in codes(code)):
        for name in {*part.co_names, *part.co_varnames, *part.co_freevars, *part.co_cellvars}:
            found.setdefault(name, []).append(part)
    return found


def _keys_in(code: types.CodeType, name: str) -> set[Any] | None:
    if name in code.co_varnames:  # a parameter, which may have the dict as its default
        return None
    lines, found = [one for one in dis.get_instructions(code) if one.opname not in NOTHING], set[Any]()
    for place, one in enumerate(lines):
        if one.argval != name or one.opname in OF_NO_VALUE:
            continue
        keys = _key_at(lines, place) if one.opname in BY_NAME else []
        if not keys:
            return None
        found |= {*keys}
    return found


def _key_at(lines: Sequence[dis.Instruction], place: int) -> list[Any]:
    """The key by which the dict that is loaded there is asked; nothing where it is not asked by a constant."""
    behind = [(one.opname, one.argval) for one in lines[place + 1 : place + 5]]
    match behind:
        case [("LOAD_CONST", key), ("BINARY_SUBSCR", _), *_]:
            return [key]
        case [("LOAD_METHOD" | "LOAD_ATTR", "get"), ("LOAD_CONST", key), ("CALL", 1), *_]:
            return [key]
        case [("LOAD_METHOD" | "LOAD_ATTR", "get"), ("LOAD_CONST", key), (load, _), ("CALL", 2)] if _loads(load):
            return [key]
        case [("CONTAINS_OP", _), *_]:
            first = place - 1 if lines[place].opname not in ("LOAD_ATTR", "LOAD_METHOD") else place - 2
            is_of_a_variable = first == place - 1 or lines[place - 1].opname in ("LOAD_FAST", "LOAD_DEREF")
            is_constant = first >= 0 and lines[first].opname == "LOAD_CONST"
            return [lines[first].argval] if is_of_a_variable and is_constant else []
        case _:
            return []


def _loads(name: str) -> bool:
    return name in ("LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
