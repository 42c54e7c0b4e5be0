"""Entries of dicts and lists, and attributes, that a branch by hidden values assigns: `losses["box"] = f(x[mask])`."""

from __future__ import annotations

import ast
from collections import OrderedDict, defaultdict
from collections.abc import Set
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from autopar.trace.values import MISSING

HOLDERS = (dict, OrderedDict, defaultdict, list)
NO_TENSOR = "it writes to {}, which is no tensor that is there as a whole"
NOT_AHEAD = "{}, which it assigns, is no tensor that this call has made ahead of it"


@dataclass
class Entry:
    """One, as its source is told, in an object that has it by a key or as an attribute. `old`: what it is ahead of the
    branch, `otherwise`: behind one that is not taken; MISSING: it is not there.
    """

    told: str
    holder: Any
    key: Any
    is_attribute: bool
    old: Any = MISSING
    otherwise: Any = MISSING

    def __post_init__(self) -> None:
        self.old = self.otherwise = self.now()

    def now(self) -> Any:
        if self.is_attribute:
            return getattr(self.holder, self.key, MISSING)
        is_there = isinstance(self.holder, list) or self.key in self.holder
        return self.holder[self.key] if is_there else MISSING

    def put(self, value: Any) -> None:
        if self.is_attribute and value is MISSING:
            delattr(self.holder, self.key)
        elif self.is_attribute:
            setattr(self.holder, self.key, value)
        elif value is MISSING:
            del self.holder[self.key]
        else:
            self.holder[self.key] = value


def is_entry(target: ast.expr, stored: Set[str]) -> bool:
    """Whether that may be one which is the same behind statements as ahead of them, that assign `stored` names."""
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Slice | ast.Tuple):
        return False
    parts = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.expr_context)
    every = [*ast.walk(target)]
    return all(isinstance(one, parts) and not (isinstance(one, ast.Name) and one.id in stored) for one in every)


def entry_of(target: ast.expr, frame: FrameType) -> Entry | str | None:
    """It, in code of that frame; why it is none; None where it is a part of a tensor."""
    assert isinstance(target, ast.Subscript | ast.Attribute)
    told, holder = ast.unparse(target), value_of(target.value, frame)
    if isinstance(target, ast.Attribute):
        is_computed = hasattr(getattr(type(holder), target.attr, None), "__set__")
        return f"it sets .{target.attr}" if holder is None or is_computed else Entry(told, holder, target.attr, True)
    if isinstance(holder, Tensor):
        return None
    if type(holder) not in HOLDERS:
        return NO_TENSOR.format(ast.unparse(target.value))
    code = compile(ast.Expression(target.slice), frame.f_code.co_filename, "eval")
    key = eval(code, frame.f_globals, frame.f_locals)
    if isinstance(holder, list) and not (isinstance(key, int) and -len(holder) <= key < len(holder)):
        return NO_TENSOR.format(ast.unparse(target.value))
    return Entry(told, holder, key, False)


def value_of(base: ast.expr, frame: FrameType) -> Any:
    """What a name, or an attribute of one, is there now; None where that is not known."""
    match base:
        case ast.Name(name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value, name):
            return getattr(value_of(value, frame), name, None)
        case _:
            return None
