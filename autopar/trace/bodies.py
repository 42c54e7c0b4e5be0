"""Which branches of the user's code leave nothing behind but tensors, as its source says: writes to some, and names
that tensors are assigned to.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
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
OF_A_FRAME = (ast.Continue, ast.Break, ast.Return, ast.Yield, ast.YieldFrom, ast.Await)
ASKS_MORE = "its condition asks several things"
NO_IF = "no if asks it"
NO_SOURCE = "its source is not to be had"
# Of `len(rows) > 0`: the truth of a number of rows where there are some.
OF_SOME = {(ast.Gt, 0): True, (ast.GtE, 1): True, (ast.NotEq, 0): True, (ast.Eq, 0): False, (ast.Lt, 1): False}


@dataclass(frozen=True)
class Body:
    """Where a branch stands in its file (line, column), its `if` in that `line`, and the answer that leads there.
    `bases`: what it writes to; `goes_over`: what loops in it go over; `assigned`: names that it assigns and others
    read, or that are what they were where it is not taken; `other`: statements of its else, and `of_other` the names
    that these assign; `is_joint`: its condition asks something else, too, `is_last` ahead of this.
    """

    first: tuple[int, int]
    last: tuple[int, int]
    wanted: bool
    bases: tuple[ast.expr, ...] = field(compare=False)
    goes_over: tuple[ast.expr, ...] = field(compare=False)
    line: int = 0
    assigned: frozenset[str] = NOTHING
    other: tuple[ast.stmt, ...] = field(default=(), compare=False)
    of_other: frozenset[str] = NOTHING
    is_joint: bool = False
    is_last: bool = True


@lru_cache(maxsize=1024)
def body_of(code: CodeType, at: int) -> Body | str:
    """The branch whose condition is asked at this place of the code, of which nothing stays but writes; or why it is
    none. Of `len(rows)` what is asked is whether there are any.
    """
    function, opname, place = _asks(code, at)
    if function is None:
        return NO_SOURCE
    for around, block, branch in _statements(function, ast.If):
        if _holds(branch.test, place):
            return _of(branch, around, block, function, (opname, place))
    return NO_IF


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
            return _body(loop.body, [], function, is_turn=True, known={name.id for name in _stored([loop.target])})
    return "no for goes over them alone"


def _asks(code: CodeType, at: int) -> tuple[ast.FunctionDef | None, str, tuple[int, int]]:
    """The function in which something is asked, by which instruction, and where it stands."""
    instructions = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    number = next(number for number, one in enumerate(instructions) if one.offset == at)
    asks = instructions[number]
    is_jump = "JUMP" in asks.opname  # which stands where all of the `if` does, in Python 3.11
    tree, where = tree_of(code.co_filename), instructions[number - is_jump].positions
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


def _wanted(test: ast.expr, asks: tuple[str, tuple[int, int]], truth: bool) -> bool | None:
    """The answer to a question, by which instruction it is asked and where, with which a condition has that truth; None
    where it asks more, or need not ask it.
    """
    opname, place = asks
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            return _wanted(operand, asks, not truth)
        case ast.BoolOp(op, values) if isinstance(op, ast.And) == truth:
            return next((_wanted(value, asks, truth) for value in values if _holds(value, place)), None)
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


def _of(
    branch: ast.If, around: ast.AST, block: list[ast.stmt], function: ast.FunctionDef, asks: tuple[str, tuple[int, int]]
) -> Body | str:
    other = [] if all(isinstance(one, ast.Pass) for one in branch.orelse) else branch.orelse
    behind = block[block.index(branch) + 1 :]
    is_turn, truth = False, True
    match branch.body:
        case [ast.Continue()] if isinstance(around, (ast.For, ast.While)):
            inside, truth, is_turn = behind, False, True
        case [ast.Return(value) as ends] if around is function and (
            value is None or isinstance(value, (ast.Name, ast.Constant))
        ):
            last = behind[-1] if behind else None
            is_same = ast.dump(last) == ast.dump(ends) if isinstance(last, ast.Return) else value is None
            if not is_same:
                return "it returns something else than the function does at its end"
            inside, truth = behind[:-1] if isinstance(last, ast.Return) else behind, False
        case _:
            inside = branch.body
    wanted = _wanted(branch.test, asks, truth)
    if wanted is None:
        return ASKS_MORE
    if other and (not truth or any(isinstance(part, OF_A_FRAME) for one in other for part in ast.walk(one))):
        return "it has an else that ends something"
    body = _body(inside, other, function, wanted, is_turn=is_turn)
    joint = [part for part in ast.walk(branch.test) if isinstance(part, ast.BoolOp)]
    if isinstance(body, str):
        return body
    is_last = all(not _holds(value, asks[1]) for part in joint for value in part.values[:-1])
    return replace(body, line=branch.lineno, is_joint=bool(joint), is_last=is_last)


def _body(
    inside: list[ast.stmt],
    other: list[ast.stmt],
    function: ast.FunctionDef,
    wanted: bool = True,
    *,
    is_turn: bool,
    known: Set[str] = NOTHING,
) -> Body | str:
    """Of these statements, and those of an else; `known`: names that are assigned ahead of them; `is_turn`: they are
    the rest of a loop's.
    """
    if not inside:
        return "nothing stands in it"
    both = [*inside, *other]
    stored = {one.id for one in _stored(both)} - known
    seen = _Seen(set(), set())
    _seen_outside(function.body, set(), both, stored | known, seen)
    if seen.later or seen.names & known:
        return f"{min(seen.later or seen.names & known)!r}, which it assigns, may be read outside of it"
    for one in ast.walk(function):
        if isinstance(one, (ast.Global, ast.Nonlocal)) and stored & {*one.names}:
            return f"{min(stored & {*one.names})!r}, which it assigns, is no local variable"
        if isinstance(one, ast.Name) and one.id in READS_ALL:
            return f"the function calls {one.id}()"
        if isinstance(one, ast.Try) and one.handlers and any(part is inside[0] for part in ast.walk(one)):
            return "it stands in a try, and what fails there may be caught"
    if (effect := effect_in(both, NOTHING, writes=True)) is not None:
        return effect
    if other and (own := _of_a_class(other)) is not None:
        return f"its else names {own}"
    bases, early = list[ast.expr](), set[str]()
    for block in (inside, other):
        names = _left(block, known, stored, bases, early, is_turn=is_turn)
        if isinstance(names, str):
            return names
    first, last = (inside[0].lineno, inside[0].col_offset), (inside[-1].end_lineno or 0, inside[-1].end_col_offset or 0)
    loops = (one for statement in both for one in ast.walk(statement))
    over = [one.iter for one in loops if isinstance(one, (ast.For, ast.comprehension))]
    over += [part for one in over if isinstance(one, ast.Call) for part in one.args]
    assigned, of_other = frozenset(seen.names | early), frozenset(one.id for one in _stored(other))
    return Body(first, last, wanted, tuple(bases), tuple(over), first[0], assigned, tuple(other), of_other & assigned)


def _of_a_class(block: Sequence[ast.stmt]) -> str | None:
    """A name in statements that only code within its class can read."""
    for one in (one for statement in block for one in ast.walk(statement)):
        name = one.id if isinstance(one, ast.Name) else one.attr if isinstance(one, ast.Attribute) else ""
        if name in ("super", "__class__") or (name.startswith("__") and not name.endswith("__")):
            return name
    return None


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
    block: Sequence[ast.stmt],
    known: Set[str],
    stored: Set[str],
    bases: list[ast.expr],
    early: set[str],
    *,
    is_turn: bool,
) -> set[str] | str:
    """The names that are assigned behind statements; what would be seen behind them that is neither a name nor a write
    to a tensor. `known`: names that were assigned in this turn, of the `stored` ones; `bases`: gets what is written to,
    `early` what may be read before it is assigned there; `is_turn`: these end where a turn of a loop does.
    """
    known = {*known}
    for one in block:
        if (told := _read(one, is_turn=is_turn)) is None:
            return f"{ast.unparse(one).splitlines()[0]!r} stands in it"
        for name in _loads(told.reads):
            if name.id in stored - known:
                early.add(name.id)
        behind = list[set[str]]()
        for statements, names in told.blocks:
            of_loop = is_turn or isinstance(one, ast.For)
            if isinstance(names := _left(statements, known | names, stored, bases, early, is_turn=of_loop), str):
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


@dataclass
class _Seen:
    """Names that are read, `later` in functions that are called whenever."""

    names: set[str]
    later: set[str]


def _seen_outside(
    block: Sequence[ast.stmt], known: set[str], inside: Sequence[ast.stmt], stored: set[str], seen: _Seen
) -> set[str]:
    """The names that statements have certainly assigned, of `known` ones and those that they assign themselves. `seen`:
    gets those of the `stored` ones that may be read where those `inside` have assigned them.
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
        seen.names |= read & stored
        seen.later |= {part.id for part in _loads(later)} & stored
        own = {part.id for target in _targets(one) for part in ast.walk(target) if isinstance(part, ast.Name)}
        behind = [_seen_outside(inner, known | own, inside, stored, seen) for inner in blocks]
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
