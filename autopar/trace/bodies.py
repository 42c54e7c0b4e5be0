"""Which branches of the user's code leave nothing behind but writes to tensors, as its source says."""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any, TypeVar

from autopar.trace.effects import effect_in
from autopar.trace.reading import tree_of

Kind = TypeVar("Kind", bound=ast.stmt)
NOTHING = frozenset[str]()
SEVERAL = (  # what may ask more than once, or not at all
    ast.BoolOp, ast.IfExp, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda,
)  # fmt: skip
LATER = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.GeneratorExp)
READS_ALL = ("locals", "vars", "eval", "exec")
BLOCKS = ("body", "orelse", "finalbody", "handlers")
ASKS_MORE = "its condition asks several things"
NO_SOURCE = "its source is not to be had"
# Of `len(rows) > 0`: the truth of a number of rows where there are some.
OF_SOME = {(ast.Gt, 0): True, (ast.GtE, 1): True, (ast.NotEq, 0): True, (ast.Eq, 0): False, (ast.Lt, 1): False}


@dataclass(frozen=True)
class Body:
    """Where a branch stands in its file (line, column), and the answer that leads there. `bases`: what it writes to;
    `goes_over`: what loops in it go over.
    """

    first: tuple[int, int]
    last: tuple[int, int]
    wanted: bool
    bases: tuple[ast.expr, ...] = field(compare=False)
    goes_over: tuple[ast.expr, ...] = field(compare=False)


@lru_cache(maxsize=1024)
def body_of(code: CodeType, at: int) -> Body | str:
    """The branch whose condition is asked at this place of the code, of which nothing stays but writes; or why it is
    none. Of `len(rows)` what is asked is whether there are any.
    """
    function, opname, place = _asks(code, at)
    if function is None:
        return NO_SOURCE
    for around, block, branch in _statements(function, ast.If):
        if place == (branch.lineno, branch.col_offset) or _holds(branch.test, place):  # as Python 3.11 and 3.12 have it
            wanted = _wanted(branch.test, opname, place)
            return ASKS_MORE if wanted is None else _of(branch, around, block, function, wanted)
    return "no if asks it"


@lru_cache(maxsize=1024)
def turn_of(code: CodeType, at: int) -> Body | str:
    """Likewise the body of the loop that begins at this place of the code."""
    function, opname, place = _asks(code, at)
    if function is None or opname != "GET_ITER":
        return NO_SOURCE if function is None else "no for goes over them alone"
    for _, _, loop in _statements(function, ast.For):
        if any(isinstance(part, SEVERAL) for part in ast.walk(loop.iter)):
            continue
        if place in ((loop.lineno, loop.col_offset), (loop.iter.lineno, loop.iter.col_offset)):
            return _body(loop.body, function, is_turn=True, known={name.id for name in _stored([loop.target])})
    return "no for goes over them alone"


def _asks(code: CodeType, at: int) -> tuple[ast.FunctionDef | None, str, tuple[int, int]]:
    """The function in which something is asked, by which instruction, and where it stands."""
    asks = next(one for one in dis.get_instructions(code) if one.offset == at)
    tree, where = tree_of(code.co_filename), asks.positions
    if tree is None or where is None or where.lineno is None or where.col_offset is None:
        return None, asks.opname, (0, 0)
    place = where.lineno, where.col_offset
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and _holds(one, place)]
    return max(functions, key=lambda one: one.lineno, default=None), asks.opname, place


@lru_cache(maxsize=1024)
def places_of(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Where each instruction of a code stands in its file: (line, column)."""
    return tuple((line or 0, column or 0) for line, _, column, _ in code.co_positions())


def _holds(part: ast.expr | ast.stmt, place: tuple[int, int]) -> bool:
    return (part.lineno, part.col_offset) <= place < (part.end_lineno or 0, part.end_col_offset or 0)


def _statements(function: ast.FunctionDef, kind: type[Kind]) -> Iterator[tuple[ast.AST, list[ast.stmt], Kind]]:
    """Those of one kind in a function, each behind what it stands in and the statements there."""
    waiting: list[ast.AST] = [function]
    while waiting:
        one = waiting.pop()
        for name in BLOCKS:
            block: list[Any] = getattr(one, name, [])
            for inner in block:
                if isinstance(inner, kind):
                    yield one, block, inner
                if not isinstance(inner, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                    waiting.append(inner)


def _wanted(test: ast.expr, opname: str, place: tuple[int, int]) -> bool | None:
    """The answer with which a condition is true that asks at that place; None where it asks more."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _wanted(test.operand, opname, place)
        return None if inner is None else not inner
    if any(
        isinstance(part, SEVERAL) or (isinstance(part, ast.Compare) and len(part.ops) > 1) for part in ast.walk(test)
    ):
        return None
    if "JUMP" in opname:
        return True
    match test:
        case ast.Call(ast.Name("bool" | "len")) if place == (test.lineno, test.col_offset):
            return True
        case ast.Compare(ast.Call(ast.Name("len")), [order], [ast.Constant(number)]):
            return OF_SOME.get((type(order), number))
        case _:
            return None


def _of(branch: ast.If, around: ast.AST, block: list[ast.stmt], function: ast.FunctionDef, wanted: bool) -> Body | str:
    if any(not isinstance(one, ast.Pass) for one in branch.orelse):
        return "it has an else"
    behind = block[block.index(branch) + 1 :]
    is_turn = False
    match branch.body:
        case [ast.Continue()] if isinstance(around, (ast.For, ast.While)):
            inside, wanted, is_turn = behind, not wanted, True
        case [ast.Return(value) as ends] if around is function and (
            value is None or isinstance(value, (ast.Name, ast.Constant))
        ):
            last = behind[-1] if behind else None
            is_same = ast.dump(last) == ast.dump(ends) if isinstance(last, ast.Return) else value is None
            if not is_same:
                return "it returns something else than the function does at its end"
            inside, wanted = behind[:-1] if isinstance(last, ast.Return) else behind, not wanted
        case _:
            inside = branch.body
    return _body(inside, function, wanted, is_turn=is_turn)


def _body(
    inside: list[ast.stmt], function: ast.FunctionDef, wanted: bool = True, *, is_turn: bool, known: Set[str] = NOTHING
) -> Body | str:
    """Of these statements; `known`: names that are assigned ahead of them; `is_turn`: they are the rest of a loop's."""
    if not inside:
        return "nothing stands in it"
    stored = {one.id for one in _stored(inside)} - known
    try:
        _seen_outside(function.body, set(), inside, stored | known)
    except _Seen as seen:
        return f"{seen.args[0]!r}, which it assigns, may be read outside of it"
    for one in ast.walk(function):
        if isinstance(one, (ast.Global, ast.Nonlocal)) and stored & {*one.names}:
            return f"{min(stored & {*one.names})!r}, which it assigns, is no local variable"
        if isinstance(one, ast.Name) and one.id in READS_ALL:
            return f"the function calls {one.id}()"
        if isinstance(one, ast.Try) and one.handlers and any(part is inside[0] for part in ast.walk(one)):
            return "it stands in a try, and what fails there may be caught"
    if (effect := effect_in(inside, NOTHING, writes=True)) is not None:
        return effect
    bases = list[ast.expr]()
    names = _left(inside, known, stored, bases, is_turn=is_turn)
    if isinstance(names, str):
        return names
    first, last = (inside[0].lineno, inside[0].col_offset), (inside[-1].end_lineno or 0, inside[-1].end_col_offset or 0)
    loops = (one for statement in inside for one in ast.walk(statement))
    over = [one.iter for one in loops if isinstance(one, (ast.For, ast.comprehension))]
    over += [part for one in over if isinstance(one, ast.Call) for part in one.args]
    return Body(first, last, wanted, tuple(bases), tuple(over))


def _stored(block: Sequence[ast.AST]) -> list[ast.Name]:
    """Names that are assigned, but for those of comprehensions."""
    found, waiting = list[ast.Name](), [*block]
    while waiting:
        one = waiting.pop()
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.append(one)
        waiting += [one.iter, *one.ifs] if isinstance(one, ast.comprehension) else ast.iter_child_nodes(one)
    return found


@dataclass
class _Statement:
    """What one does: expressions that it reads, what it assigns and writes to, and the statements in it, each block
    with names that are assigned ahead of it.
    """

    reads: list[ast.AST]
    targets: list[ast.expr] = field(default_factory=list[ast.expr])
    writes: list[ast.expr] = field(default_factory=list[ast.expr])
    blocks: list[tuple[list[ast.stmt], set[str]]] = field(default_factory=list[Any])


def _read(one: ast.stmt, *, is_turn: bool) -> _Statement | None:
    """None: nobody knows what it leaves behind."""
    match one:
        case ast.Continue() if is_turn:
            return _Statement([])
        case ast.Assign(targets):
            return _Statement([one], [part for target in targets for part in _parts(target)])
        case ast.AnnAssign(target) | ast.AugAssign(target):
            return _Statement([one], [target])
        case ast.Expr(ast.Call(ast.Attribute(base, method))) if method.endswith("_"):
            return _Statement([one], writes=[base])
        case ast.Expr(ast.Constant()) | ast.Pass() | ast.Assert():
            return _Statement([one])
        case ast.If(test, body, orelse):
            return _Statement([test], blocks=[(body, set()), (orelse, set())])
        case ast.For(target, over, body, []):
            return _Statement([over], blocks=[(body, {name.id for name in _stored([target])})])
        case ast.With(items, body) if all(item.optional_vars is None for item in items):
            return _Statement([*items], blocks=[(body, set())])
        case _:
            return None


def _left(
    block: Sequence[ast.stmt], known: Set[str], stored: Set[str], bases: list[ast.expr], *, is_turn: bool
) -> set[str] | str:
    """The names that are assigned behind statements; what would be seen behind them that is no write to a tensor.
    `known`: names that were assigned in this turn, of the `stored` ones; `bases`: gets what is written to; `is_turn`:
    these end where a turn of a loop does.
    """
    known = {*known}
    for one in block:
        if (told := _read(one, is_turn=is_turn)) is None:
            return f"{ast.unparse(one).splitlines()[0]!r} stands in it"
        for name in _loads(told.reads):
            if name.id in stored - known:
                return f"{name.id!r} may be read there before it is assigned"
        behind = list[set[str]]()
        for statements, names in told.blocks:
            of_loop = is_turn or isinstance(one, ast.For)
            if isinstance(names := _left(statements, known | names, stored, bases, is_turn=of_loop), str):
                return names
            behind.append(names)
        if behind and not isinstance(one, ast.For):  # which may have no turn
            known |= set.intersection(*behind)
        for target in told.targets:
            match target:
                case ast.Name(name):
                    known.add(name)
                case ast.Subscript(ast.Name(name)) if name in known:
                    return f"it writes to parts of {name!r}, which it makes itself"
                case ast.Subscript(base):
                    bases.append(base)
                case _:
                    return f"it assigns {ast.unparse(target)}"
        bases += [base for base in told.writes if not (isinstance(base, ast.Name) and base.id in known)]
    return known


def _loads(parts: Sequence[ast.AST]) -> list[ast.Name]:
    """Names that are read: `x += 1` reads one, too."""
    every = [one for part in parts for one in ast.walk(part)]
    read = [one for one in every if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
    return read + [one.target for one in every if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name)]


class _Seen(Exception):
    """Of a name."""


def _seen_outside(block: Sequence[ast.stmt], known: set[str], inside: Sequence[ast.stmt], stored: set[str]) -> set[str]:
    """The names that statements have certainly assigned, of `known` ones and those that they assign themselves. Raises
    _Seen where one of the `stored` names may be read that those `inside` have assigned.
    """
    for one in block:
        if one in inside:
            known = known - stored
            continue
        blocks = [part for name in BLOCKS if (part := getattr(one, name, None)) and name != "handlers"]
        blocks += [part.body for name in ("handlers", "cases") for part in getattr(one, name, ())]
        of_blocks = {id(part) for inner in blocks for statement in inner for part in ast.walk(statement)}
        is_around = any(part is inside[0] for part in ast.walk(one))
        before = known
        known = known - stored if is_around else known  # as it may have left them, there or in the turn before
        later = [part for part in ast.walk(one) if isinstance(part, LATER)]
        read = {part.id for part in _loads([one]) if id(part) not in of_blocks}
        read -= before if isinstance(one, (ast.If, ast.With)) else known
        read |= {part.id for part in _loads(later)}  # whenever that is called
        if read & stored:
            raise _Seen(min(read & stored))
        own = {part.id for target in _targets(one) for part in ast.walk(target) if isinstance(part, ast.Name)}
        behind = [_seen_outside(inner, known | own, inside, stored) for inner in blocks]
        if isinstance(one, ast.With):
            known = behind[0]
        elif isinstance(one, ast.If):
            known = set.intersection(*behind) if len(behind) > 1 else known & behind[0]
        elif blocks:
            known = known.intersection(*behind)
        else:
            known = known | own
    return known


def _targets(one: ast.stmt) -> list[ast.expr]:
    """What a statement certainly assigns, but for its blocks."""
    match one:
        case ast.Assign(targets):
            return targets
        case ast.AugAssign(target) | ast.For(target):
            return [target]
        case ast.AnnAssign(target, value=ast.expr()):
            return [target]
        case ast.With(items):
            return [item.optional_vars for item in items if item.optional_vars is not None]
        case _:
            return []


def _parts(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
