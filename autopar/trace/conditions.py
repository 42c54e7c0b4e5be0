"""What the condition of a branch asks: the answer to one of its questions with which it is true, or not."""

from __future__ import annotations

import ast

from autopar.trace.reading import holds

SEVERAL = (  # what may ask more than once, or not at all
    ast.BoolOp, ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda,
)  # fmt: skip
# Of `len(rows) > 0`: the truth of a number of rows where there are some.
OF_SOME = {(ast.Gt, 0): True, (ast.GtE, 1): True, (ast.NotEq, 0): True, (ast.Eq, 0): False, (ast.Lt, 1): False}


def wanted_of(test: ast.expr, asks: tuple[str, tuple[int, int]], truth: bool) -> bool | None:
    """The answer to a question, by which instruction it is asked and where, with which a condition has that truth; None
    where it asks more, or need not ask it.
    """
    opname, place = asks
    match test:
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
    if any(
        isinstance(part, SEVERAL) or (isinstance(part, ast.Compare) and len(part.ops) > 1) for part in ast.walk(test)
    ):
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
    match test:
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
