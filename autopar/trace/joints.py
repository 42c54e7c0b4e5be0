"""Conditions that ask several things of values, `if a.any() or b.max() > 1:`. Each but the last is answered such that
the next one is asked, and the branch is taken by all of them together.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

import torch

from autopar.trace.bodies import Body, asks_at, body_of
from autopar.trace.conditions import SEVERAL, wanted_of
from autopar.trace.reading import holds

# What may be computed where the code of a script would not.
PLAIN = (
    ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.UnaryOp, ast.BinOp, ast.Subscript, ast.Slice, ast.Tuple,
    ast.operator, ast.unaryop, ast.cmpop, ast.expr_context,
)  # fmt: skip
MAY_FAIL = (ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)  # of numbers that the parts ahead of it may keep out


@dataclass(frozen=True)
class Part:
    """A part of a condition that is asked now. `place`: line and column of all of it; `number`: which it is, and
    `is_last`; `is_and`: they have to be true together; `truth`: the answer with which it is true.
    """

    place: tuple[int, int]
    number: int
    is_last: bool
    is_and: bool
    truth: bool

    @property
    def goes_on(self) -> bool:
        """The answer with which the next one is asked."""
        return self.truth == self.is_and


@lru_cache(maxsize=1024)
def part_of(code: CodeType, at: int) -> Part | None:
    """The part of a condition (of an `if`, or of `x if .. else y`) that asks several things; None where it asks one, or
    where a part cannot be computed unless those ahead of it are as they are.
    """
    function, opname, place = asks_at(code, at)
    choices = (ast.If, ast.IfExp)
    tests = [one.test for one in ast.walk(function) if isinstance(one, choices)] if function is not None else []
    test = next((one for one in tests if holds(one, place)), None)
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    if not isinstance(test, ast.BoolOp):
        return None
    number = next((number for number, value in enumerate(test.values) if holds(value, place)), len(test.values))
    parts = test.values[number:]
    if not parts or not all(map(_may_be_asked, parts[1:])):
        return None
    truth = (
        None
        if any(isinstance(one, SEVERAL) for one in ast.walk(parts[0]))
        else wanted_of(parts[0], (opname, place), True)
    )
    if truth is None:
        return None
    return Part((test.lineno, test.col_offset), number, len(parts) == 1, isinstance(test.op, ast.And), truth)


def is_needed(code: CodeType, at: int) -> bool:
    """Whether no branch begins with that part alone."""
    body = body_of(code, at)
    return not isinstance(body, Body) or (bool(body.other) and not body.is_last)


def _may_be_asked(part: ast.expr) -> bool:
    return all(
        _is_method(one) if isinstance(one, ast.Call) else isinstance(one, PLAIN) and not isinstance(one, MAY_FAIL)
        for one in ast.walk(part)
    )


def _is_method(call: ast.Call) -> bool:
    """Whether it is one of a tensor, or a function of torch, that changes nothing."""
    match call.func:
        case ast.Attribute(attr=name):
            return not name.endswith("_") and (hasattr(torch.Tensor, name) or hasattr(torch, name))
        case ast.Name("len" | "abs" | "float" | "int" | "bool"):
            return True
        case _:
            return False
