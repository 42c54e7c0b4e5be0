"""Conditions that ask several things of values, `if a.any() or b.max() > 1:`. Each but the last is answered such that
the next one is asked, and the branch is taken by all of them together.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from types import CodeType
from typing import Any

from torch import Tensor

from autopar.trace.bodies import Body, body_of
from autopar.trace.conditions import SEVERAL, asks_at, linked, wanted_of
from autopar.trace.converted import DRAWN
from autopar.trace.effects import effect_in
from autopar.trace.reading import holds

# What may be computed where the code of a script would not.
PLAIN = (
    ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.UnaryOp, ast.BinOp, ast.Subscript, ast.Slice, ast.Tuple,
    ast.operator, ast.unaryop, ast.cmpop, ast.expr_context, ast.Call, ast.keyword, ast.Starred,
)  # fmt: skip
MAY_FAIL = (ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)  # of numbers that the parts ahead of it may keep out


@dataclass(frozen=True)
class Part:
    """A part of a condition that is asked now. `place`: line and column of all of it; `number`: which part it is;
    `truth`: the answer with which it is true; `goes_on`: the one with which the next part is asked; `settles`: of the
    last one, the answer with which all is true then; `whole`: how parts are put together; `later`: where those behind
    this one stand.
    """

    place: tuple[int, int]
    number: int
    truth: bool
    goes_on: bool
    settles: bool | None
    whole: Any
    later: tuple[Body, ...]

    @property
    def is_last(self) -> bool:
        return self.settles is not None

    def together(self, truths: Mapping[int, Tensor]) -> Tensor:
        """The truth of all parts, of those that were asked: the others are as the next one needs them."""
        made = _together(self.whole, truths)
        assert isinstance(made, Tensor)  # which the last one decides
        return made

    def asked(self, truths: Mapping[int, Tensor]) -> Iterator[tuple[Body, Tensor]]:
        """Each later part, and the truth with which it is the next one that is asked."""
        for number, body in enumerate(self.later, self.number + 1):
            ahead = [(_together(one, truths), truth) for one, truth in _ahead_of(number, self.whole)]
            tensors = [made if truth else made.logical_not() for made, truth in ahead if isinstance(made, Tensor)]
            if tensors:  # else it is asked in any case
                yield body, reduce(operator.and_, tensors)


def _together(one: Any, truths: Mapping[int, Tensor]) -> Tensor | bool:
    name, *inner = one
    if name == "part":
        number, goes_on = inner
        return truths.get(number, goes_on)
    found = [_together(part, truths) for part in inner]
    if name == "not":
        return not found[0] if isinstance(found[0], bool) else found[0].logical_not()
    settles, tensors = name == "or", [made for made in found if not isinstance(made, bool)]
    if settles in [made for made in found if isinstance(made, bool)]:
        return settles
    return reduce(operator.or_ if settles else operator.and_, tensors) if tensors else not settles


def _ahead_of(number: int, one: Any) -> Iterator[tuple[Any, bool]]:
    """What is asked ahead of a part, and the truth of each with which that is asked."""
    name, *inner = one
    for part in inner if name != "part" else ():
        if number <= _last_in(part):
            yield from _ahead_of(number, part)
            return
        yield part, name == "and"


def _last_in(one: Any) -> int:
    """The number of its last part."""
    return one[1] if one[0] == "part" else _last_in(one[-1])


@lru_cache(maxsize=1024)
def part_of(code: CodeType, at: int) -> Part | None:
    """The part of a condition (of an `if`, or of `x if .. else y`) that asks several things; None where it asks one, or
    where a part cannot be computed unless those ahead of it are as they are.
    """
    function, opname, place = asks_at(code, at)
    choices = (ast.If, ast.IfExp)
    every = [one for one in ast.walk(function) if isinstance(one, choices)] if function is not None else []
    choice = next((one for one in every if holds(one.test, place)), None)
    if isinstance(choice, ast.If) and isinstance(choice.body[-1], ast.Raise):  # a check
        return None
    test = choice and choice.test
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    test = linked(test) if test is not None else None
    if not isinstance(test, ast.BoolOp):
        return None
    parts = list[tuple[ast.expr, bool]]()
    whole = _parts(test, True, parts)
    number = next((number for number, (value, _) in enumerate(parts) if holds(value, place)), len(parts))
    rest = parts[number:]
    if not rest or not all(_may_be_asked(value) for value, _ in rest[1:]):
        return None
    value, goes_on = rest[0]
    is_one = not any(isinstance(one, SEVERAL) for one in ast.walk(value))
    truth = wanted_of(value, (opname, place), True) if is_one else None
    if truth is None:
        return None
    settles = wanted_of(test, (opname, place), True) if len(rest) == 1 else None
    if len(rest) == 1 and settles is None:
        return None
    lines = test.lineno, test.end_lineno or 0
    later = tuple(
        Body((one.lineno, one.col_offset), (one.end_lineno or 0, one.end_col_offset or 0), True, (), (), *lines,
            is_part=True) for one, _ in rest[1:]
    )  # fmt: skip
    return Part((test.lineno, test.col_offset), number, truth, truth == goes_on, settles, whole, later)


def _parts(test: ast.expr, goes_on: bool, parts: list[tuple[ast.expr, bool]]) -> Any:
    """`Part.whole`. `parts`: gets those of this one, each with the truth with which the next one is asked; `goes_on`:
    that of the last.
    """
    match linked(test):
        case ast.UnaryOp(ast.Not(), operand) if isinstance(linked(operand), ast.BoolOp):
            return "not", _parts(operand, not goes_on, parts)
        case ast.BoolOp(op, values):
            is_and = isinstance(op, ast.And)
            return "and" if is_and else "or", *(
                _parts(value, goes_on if value is values[-1] else is_and, parts) for value in values
            )
        case _:
            parts.append((test, goes_on))
            return "part", len(parts) - 1, goes_on


def is_needed(code: CodeType, at: int) -> bool:
    """Whether no branch begins with that part alone."""
    body = body_of(code, at)
    return not isinstance(body, Body) or (bool(body.other) and not body.is_last)


def _may_be_asked(part: ast.expr) -> bool:
    kinds = all(isinstance(one, PLAIN) and not isinstance(one, MAY_FAIL) for one in ast.walk(part))
    functions = (one.func for one in ast.walk(part) if isinstance(one, ast.Call))
    names = [one.attr for one in functions if isinstance(one, ast.Attribute)]
    draws = any(name.endswith("_") or DRAWN.fullmatch(name) for name in names)
    return kinds and not draws and effect_in([part], frozenset()) is None
