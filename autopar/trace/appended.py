"""Which lists may be appended to in branches by hidden values, as the source of a function says."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence, Set

from autopar.trace.effects import pairs_of
from autopar.trace.rows import CATS

KNOWN = frozenset((*CATS, "sum", "len"))  # functions that may be given one (`autopar.trace.gathered`)


def lists_of(function: ast.FunctionDef) -> frozenset[str]:
    """Names of lists that a function makes, and does nothing else with than append to them, ask how many are there, add
    them up, or put them together by torch.
    """
    stored, read, known = dict[str, list[ast.AST | None]](), list[ast.Name](), set[int]()
    for one in ast.walk(function):
        match one:
            case ast.Assign(targets, value):  # of `a = b = []` both are one list
                for name, given in (pair for target in targets for pair in pairs_of(target, value)):
                    stored.setdefault(name, []).append(given if len(targets) == 1 else None)
            case ast.AnnAssign(ast.Name(name), value=value):
                stored.setdefault(name, []).append(value)
            case ast.Expr(ast.Call(ast.Attribute(ast.Name() as name, "append"), [_], [])):
                known.add(id(name))
            case ast.Call(ast.Attribute(attr=called) | ast.Name(called), [ast.Name() as name, *_]) if called in KNOWN:
                known.add(id(name))
            case ast.If(test) | ast.IfExp(test):
                known |= set(map(id, _asked_in(test)))
            case _:
                pass
        if isinstance(one, (ast.AugAssign, ast.For, ast.comprehension, ast.NamedExpr)):
            stored |= {part.id: [None] for part in ast.walk(one.target) if isinstance(part, ast.Name)}
        if isinstance(one, ast.withitem) and one.optional_vars is not None:
            stored |= {part.id: [None] for part in ast.walk(one.optional_vars) if isinstance(part, ast.Name)}
        if isinstance(one, (ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.GeneratorExp)) and one is not function:
            stored |= {part.id: [None] for part in ast.walk(one) if isinstance(part, ast.Name)}  # called whenever
        if isinstance(one, (ast.Global, ast.Nonlocal)):
            stored |= {name: [None] for name in one.names}
        if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Store):
            read.append(one)
    made = {name for name, values in stored.items() if all(map(_is_list, values))}
    return frozenset(made - {one.id for one in read if id(one) not in known})


def appended_to(block: Sequence[ast.stmt], known: Set[str]) -> str | None:
    """A name of a list that statements append to, and that is none of the `known` ones."""
    for one in (one for statement in block for one in ast.walk(statement)):
        match one:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append"))) if name not in known:
                return name
            case _:
                pass
    return None


def _asked_in(test: ast.expr) -> Iterator[ast.Name]:
    """Names whose own truth a condition asks."""
    match test:
        case ast.Name():
            yield test
        case ast.UnaryOp(ast.Not(), inner) | ast.Call(ast.Name("bool"), [inner]):
            yield from _asked_in(inner)
        case ast.BoolOp(values=values):
            for value in values:
                yield from _asked_in(value)
        case _:
            pass


def _is_list(value: ast.AST | None) -> bool:
    match value:
        case ast.List() | ast.Call(ast.Name("list"), [], []):
            return True
        case _:
            return False
