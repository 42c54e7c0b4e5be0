"""What the condition of a branch asks: the answer to one of its questions with which it is true, or not."""

from __future__ import annotations

import ast
import dis
from types import CodeType
from typing import TypeVar

from autopar.trace.reading import holds, tree_of

Node = TypeVar("Node", bound=ast.AST)

SEVERAL = (  # what may ask more than once, or not at all
    ast.BoolOp, ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda,
)  # fmt: skip
COMPARES = ("COMPARE_OP", "CONTAINS_OP", "IS_OP")
# Of `len(rows) > 0`: the truth of a number of rows where there are some.
OF_SOME = {(ast.Gt, 0): True, (ast.GtE, 1): True, (ast.NotEq, 0): True, (ast.Eq, 0): False, (ast.Lt, 1): False}


def wanted_of(test: ast.expr, asks: tuple[str, tuple[int, int]], truth: bool) -> bool | None:
    """The answer to a question, by which instruction it is asked and where, with which a condition has that truth; None
    where it asks more, or need not ask it.
    """
    opname, place = asks
    match linked(test):
        case ast.UnaryOp(ast.Not(), operand):
            return wanted_of(operand, asks, not truth)
        case ast.BoolOp(op, values) if isinstance(op, ast.And) == truth:
            return next((wanted_of(value, asks, truth) for value in values if holds(value, place)), None)
        case ast.BoolOp(values=values) if rest_of(test, place, truth) is not None:  # of which all others say nothing
            return next((wanted_of(value, asks, truth) for value in values if holds(value, place)), None)
        case ast.BoolOp(values=values) if holds(values[-1], place):  # as all others are such that it is asked
            return wanted_of(values[-1], asks, truth)
        case _:
            pass
    if any(isinstance(linked(part), SEVERAL) for part in ast.walk(test)):
        return None
    if "JUMP" in opname:
        return truth
    match test:
        case ast.Call(ast.Name("bool" | "len")) if place == (test.lineno, test.col_offset):
            return truth
        case ast.Compare(ast.Call(ast.Name("len")), [order], [ast.Constant(number)]):
            some = OF_SOME.get((type(order), number))
            return None if some is None else some == truth
        case _:
            return None


def rest_of(test: ast.expr, place: tuple[int, int], truth: bool) -> tuple[tuple[ast.expr, bool], ...] | None:
    """What a condition asks behind the part at a place, which alone does not settle that it has that truth (`a or b`):
    names of things that may be known, and their truths with which the part settles it. None: it asks other things.
    """
    match linked(test):
        case ast.UnaryOp(ast.Not(), operand):
            return rest_of(operand, place, not truth)
        case ast.BoolOp(op, values) if isinstance(op, ast.And) != truth:
            at = next((at for at, value in enumerate(values) if holds(value, place)), len(values) - 1)
            rest, inner = values[at + 1 :], rest_of(values[at], place, truth)
            are_names = all(isinstance(value, (ast.Name, ast.Attribute, ast.Constant)) for value in rest)
            return (*((value, not truth) for value in rest), *inner) if are_names and inner is not None else None
        case ast.BoolOp(values=values):
            inside = next((value for value in values if holds(value, place)), None)
            return () if inside is None else rest_of(inside, place, truth)
        case _:
            return ()


def linked(test: Node) -> Node | ast.BoolOp:
    """Of `a < v < b` what it asks, `a < v and v < b`: the second begins where `v` ends, which is not computed again.
    Other things as they are.
    """
    if not isinstance(test, ast.Compare) or len(test.ops) == 1:
        return test
    links = list[ast.expr]()
    left, begins = test.left, (test.lineno, test.col_offset)
    for order, right in zip(test.ops, test.comparators, strict=True):
        link = ast.copy_location(ast.Compare(left, [order], [right]), right)  # as it ends
        link.lineno, link.col_offset = begins
        links.append(link)
        left, begins = ast.Name(".computed", ast.Load()), (right.end_lineno or 0, right.end_col_offset or 0)
    return ast.copy_location(ast.BoolOp(ast.And(), links), test)


def asks_at(code: CodeType, at: int) -> tuple[ast.FunctionDef | None, str, tuple[int, int]]:
    """The function in which something is asked, by which instruction, and where it stands."""
    instructions = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    # Of a call of Python code it lies in what CPython keeps behind the instruction.
    number = max(number for number, one in enumerate(instructions) if one.offset <= at)
    asks = instructions[number]
    number -= "JUMP" in asks.opname  # which stands where all of the `if` does, in Python 3.11
    tree, where = tree_of(code.co_filename), instructions[number].positions
    if tree is None or where is None or where.lineno is None or where.col_offset is None:
        return None, asks.opname, (0, 0)
    place = where.lineno, where.col_offset
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and holds(one, place)]
    function = max(functions, key=lambda one: one.lineno, default=None)
    if instructions[number].opname in COMPARES and function is not None:
        before = sum(one.opname in COMPARES and one.positions == where for one in instructions[:number])
        place = _place_of(function, where, before) or place
    return function, asks.opname, place


def _place_of(function: ast.FunctionDef, where: dis.Positions, before: int) -> tuple[int, int] | None:
    """That of one of the comparisons that all stand there, `a < v < b`, behind so many of them."""
    for one in ast.walk(function):
        at = isinstance(one, ast.Compare) and (one.lineno, one.end_lineno, one.col_offset, one.end_col_offset)
        if at == tuple(where) and isinstance(links := linked(one), ast.BoolOp):
            link = links.values[before % len(links.values)]  # the condition of a loop stands in its code twice
            return link.lineno, link.col_offset
    return None
