"""What stands in the code of functions: names, and where they are looked for."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

CODE = (types.FunctionType, types.MethodType, classmethod, staticmethod, property, cached_property, partial)
TYPES = frozenset(("type", "int", "float"))
BY_TEXT = frozenset(("getattr", "hasattr", "attrgetter", "vars", "__dict__"))
TAKES_TYPES = frozenset(("dtype", "to", "type", "astype", "view"))  # torch and numpy ask for those of Python


def functions_of(value: Any) -> list[types.FunctionType]:
    """The function that a method, a property or the like is of, and those that it is wrapped around
    (`functools.wraps`), from outside to inside; none where it is no code of Python's.
    """
    value = value.fget if isinstance(value, property) else value
    value = value.func if isinstance(value, (partial, cached_property)) else value
    value = value.__func__ if isinstance(value, (types.MethodType, classmethod, staticmethod)) else value
    found: list[types.FunctionType] = []
    while value is not None and not any(value is one for one in found):
        if isinstance(value, types.FunctionType):
            found.append(value)
        value = inspect.getattr_static(value, "__wrapped__", None)
    return found


def names_of(code: types.CodeType) -> Iterator[str]:
    """All names that stand in code."""
    for part in _codes(code):
        yield from part.co_names


def asked_of(code: types.CodeType) -> set[str]:
    """The names that code may look up by text that stands there (`getattr(config, "weight", 1.0)`, or one of the names
    that a loop goes over).
    """
    parts = [*_codes(code)]
    if not any(BY_TEXT & {*part.co_names} for part in parts):
        return set()
    constants = [constant for part in parts for constant in part.co_consts]
    constants += [each for one in constants if isinstance(one, (tuple, frozenset)) for each in one]
    return {one for one in constants if isinstance(one, str) and one.isidentifier()}


def globals_of(code: types.CodeType, *how: str) -> Iterator[str]:
    """Of the names in code, those of variables outside of all functions that are read and written, or used in a way."""
    for part in _codes(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname in (how or ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")):
                yield instruction.argval


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code, and that of functions within."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def needs_types(code: types.CodeType) -> bool:
    """Whether it may compare types by identity with one of `TYPES` (`type(x) is int`, `case float():`), or give one to
    torch (`x.to(float)`).
    """
    for part in _codes(code):
        named = {*part.co_names, *(name for one in part.co_consts if isinstance(one, tuple) for name in one)}
        instructions = [*dis.get_instructions(part)]
        for place, one in enumerate(instructions):
            if one.opname == "LOAD_GLOBAL" and one.argval in TYPES:
                is_called = bool((one.arg or 0) & 1)
                if not is_called and named & TAKES_TYPES:
                    return True
                near = {other.opname for other in instructions[place : place + 4]}
                if near & {"IS_OP", "MATCH_CLASS"}:
                    return True
    return False


def asks_for_nothing(value: Any) -> bool:
    """Whether a function has no parameters."""
    functions = functions_of(value)
    return bool(functions) and not inspect.signature(functions[-1]).parameters
