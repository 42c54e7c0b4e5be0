"""Parts of functions, as their source has them: what may give a value, and statements that stand in their place."""

from __future__ import annotations

import ast
import dis
import itertools
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType

ROOTS = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Compare)  # what gives something new, if they do
IN_TURN = ("sum", "max", "min", "any", "all", "map", "reduce", "list", "tuple", "sorted", "divmod")


def may_end(loop: ast.While, branch: ast.If | ast.While) -> bool:
    """Whether something else than that branch, whose condition is asked, may end a loop."""
    if (
        isinstance(loop.test, ast.BoolOp)
        or isinstance(branch.test, ast.BoolOp)
        or not (loop is branch or isinstance(loop.test, ast.Constant))
    ):
        return True
    ends = (one for one in ast.walk(loop) if isinstance(one, ast.Break | ast.Return))
    return any(one is not branch.body[-1] for one in ends)


def is_root(one: ast.expr) -> bool:
    """Whether one operator of torch may give it: what Python computes by several has no place where it is whole."""
    return isinstance(one, ROOTS) and not (
        isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id in IN_TURN
    )


def is_name(one: ast.expr) -> bool:
    return isinstance(one, ast.Name)


def are_names(target: ast.expr) -> bool:
    """Whether it is a name, or a tuple of such."""
    return all(map(are_names, target.elts)) if isinstance(target, ast.Tuple | ast.List) else is_name(target)


def assignment(name: str, value: ast.expr) -> ast.stmt:
    """A statement that stands where the value does."""
    target = ast.copy_location(ast.Name(name, ast.Store()), value)
    return ast.copy_location(ast.Assign([target], value), value)


def nothing(ahead_of: ast.stmt) -> ast.stmt:
    at, column = ahead_of.lineno, ahead_of.col_offset
    return ast.Pass(lineno=at, col_offset=column, end_lineno=at, end_col_offset=column)


def calls_of(code: CodeType, part: ast.expr) -> frozenset[int]:
    """Where code may be while it calls what gives the value of an expression: the last that it does for that."""
    first, last = (part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0)
    found, end = list[dis.Instruction](), 0
    for one, behind in itertools.pairwise(dis.get_instructions(code)):
        at = one.positions
        if at is None or at.lineno is None or "JUMP" in one.opname:
            continue
        if first <= (at.lineno, at.col_offset or 0) and (at.end_lineno or 0, at.end_col_offset or 0) <= last:
            found, end = [*found[-1:], one], behind.offset
    return frozenset(while_doing(found, end))


@lru_cache(maxsize=1024)
def returned_in(code: CodeType) -> frozenset[int]:
    """Where code may be while it calls what gives the value that it returns as it is."""
    found, last = set[int](), list[dis.Instruction]()
    for one in dis.get_instructions(code):
        if one.opname == "RETURN_VALUE":
            found.update(while_doing(last, one.offset))
        last = [*last[-1:], one]
    return frozenset(found)


def while_doing(last: Sequence[dis.Instruction], end: int) -> range:
    """Where code may be while it does the last of these instructions, behind which the next one begins at `end`: there,
    at what CPython 3.11 does ahead of a call, or at what it keeps behind an instruction.
    """
    return range(next(one.offset for one in last if one is last[-1] or one.opname == "PRECALL"), end, 2)


def statements_in(function: ast.FunctionDef) -> list[ast.stmt]:
    """All of them, those in others, too."""
    return [one for one in ast.walk(function) if isinstance(one, ast.stmt)]
