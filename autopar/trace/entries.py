"""Entries of dicts and lists, and attributes, that a branch by hidden values assigns: `losses["box"] = f(x[mask])`."""

from __future__ import annotations

import ast
from collections import OrderedDict, defaultdict
from collections.abc import Set
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn

from autopar.trace.modules import REGISTERED
from autopar.trace.values import MISSING

HOLDERS = (dict, OrderedDict, defaultdict, list)
NO_BASE = "it writes to {}, which is no tensor that is there as a whole"
NOT_AHEAD = "{}, which it assigns, is no tensor that this call has made ahead of it"


@dataclass
class Entry:
    """One, as its source is told, in an object that has it by a key or as an attribute. `is_either_way`: an else has
    it too. `old`: what it is ahead of the branch, `otherwise`: behind one that is not taken; MISSING: it is not there.
    """

    told: str
    holder: Any
    key: Any
    is_attribute: bool
    is_either_way: bool
    old: Any = MISSING
    otherwise: Any = MISSING
    lies: int | None = None  # its `place` where the branch is not taken, and something else is done

    def __post_init__(self) -> None:
        self.old = self.otherwise = self._held() if self.is_either_way else self.now()

    @property
    def same(self) -> tuple[int, bool, Any]:
        """Equal for one that stands under several names."""
        return id(self.holder), self.is_attribute, self.key

    @property
    def place(self) -> int:
        """In which order it lies among others of its dict."""
        return [*self.holder].index(self.key) if isinstance(self.holder, dict) and self.key in self.holder else 0

    def _held(self) -> Any:
        """What it is, for who puts it back. Nothing hangs on what a module has from its last call, and so none is said
        to read it.
        """
        if not (self.is_attribute and isinstance(self.holder, nn.Module)):
            return self.now()
        held = object.__getattribute__(self.holder, "__dict__")
        return self.now() if any(self.key in held[kept] for kept in REGISTERED) else held.get(self.key, MISSING)

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
    key = target.slice if isinstance(target, ast.Subscript) else None
    parts = (ast.Name, ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.UnaryOp, ast.USub, ast.expr_context)
    is_known = key is None or all(isinstance(one, parts) for one in ast.walk(key))
    return is_known and not any(isinstance(one, ast.Name) and one.id in stored for one in ast.walk(target))


def entry_of(target: ast.expr, frame: FrameType, either_way: Set[str]) -> Entry | str | None:
    """It, in code of that frame; why it is none; None where it is a part of a tensor. `either_way`: what an else has,
    as its source is told.
    """
    assert isinstance(target, ast.Subscript | ast.Attribute)
    told, holder = ast.unparse(target), value_of(target.value, frame)
    of_two = told in either_way
    if told.split(".")[-1].startswith("__dict__"):
        return f"it writes to {ast.unparse(target.value)}"
    if isinstance(target, ast.Attribute):
        is_computed = hasattr(getattr(type(holder), target.attr, None), "__set__") or isinstance(holder, dict)
        sets = f"it sets .{target.attr}"
        return sets if holder is None or is_computed else Entry(told, holder, target.attr, True, of_two)
    if isinstance(holder, Tensor):
        return None
    if type(holder) not in HOLDERS:
        return NO_BASE.format(ast.unparse(target.value))
    code = compile(ast.Expression(target.slice), frame.f_code.co_filename, "eval")
    key = eval(code, frame.f_globals, frame.f_locals)
    if isinstance(holder, list) and not (isinstance(key, int) and -len(holder) <= key < len(holder)):
        return NO_BASE.format(ast.unparse(target.value))
    return Entry(told, holder, key % len(holder) if isinstance(holder, list) else key, False, of_two)


def value_of(base: ast.expr, frame: FrameType) -> Any:
    """What a name, or an attribute of one, is there now; None where that is not known."""
    match base:
        case ast.Name(name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value, name):
            return getattr(value_of(value, frame), name, None)
        case _:
            return None
