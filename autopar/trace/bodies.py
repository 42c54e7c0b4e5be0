"""Which branches of the user's code leave nothing behind but tensors, as its source says: writes to some, and names
that tensors are assigned to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import CodeType
from typing import TypeVar

from autopar.trace.appended import appended_to, lists_of
from autopar.trace.assigned import BLOCKS, Left, Seen, against, left_behind, of_a_class, seen_outside, stored_in
from autopar.trace.conditions import SEVERAL, asks_at, linked, rest_of, wanted_of
from autopar.trace.effects import effect_in, own_of
from autopar.trace.reading import holds
from autopar.trace.statements import are_names, assignment, calls_of, is_name, is_root, may_end, nothing, statements_in
from autopar.trace.values import is_own

Kind = TypeVar("Kind", bound=ast.stmt)
NOTHING = frozenset[str]()
VALUE = ".value"  # a name that nobody has
OF_A_FRAME = (ast.Continue, ast.Break, ast.Return, ast.Yield, ast.YieldFrom, ast.Await)
ASKS_MORE = (
    "its condition asks several things, one of which is known, draws, divides, assigns or goes over several (any(..)): "
    "let an if of its own ask that"
)
RAISES = "its condition asks several things: ask them in one, `if torch.logical_and(a, b): raise`, or an if each"
RETURNS = "it returns out of a loop, with or try: return behind that"
LATER = "its condition assigns {!r} behind something that it asks, and what reads that stands outside of it"
NO_IF = "no if asks it"
NO_ROOT = "neither side is what one function gives: have it be a statement, in a line of its own (y = a if .. else b)"
MORE = (
    "it appends to {!r}, with which the function does more than ask for len(), add it up by sum(), or put it together "
    "by torch.stack or cat, or which it does not make itself"
)
NO_SOURCE = "its source is not to be had"


@dataclass(frozen=True)
class Body:
    """Where a branch stands in its file (line, column), and the answer that leads there.
    `bases`: what it writes to; `goes_over`: what loops in it go over; `assigned`: names that it assigns and others
    read, or that are what they were where it is not taken; `other`: statements of its else, and `of_other` the names
    that these assign; `is_joint`: its condition asks something else, too, `is_last` ahead of this. `gives`: where its
    code computes what is chosen in the place of `VALUE`; `is_rest`: the function returns elsewhere, too;
    `appended`: lists that it appends to; `entries`: of dicts, lists and objects, which it assigns; `local`: names of
    what the function makes itself; `rest`: what its condition asks behind this, and the truths of these with which this
    one settles it. `breaks`: it is the rest of a loop that ends where it is not taken; `is_part`: a later part of a
    condition. Its `if`, or that loop, stands in that `line`, and what is behind it behind the line `until`.
    """

    first: tuple[int, int]
    last: tuple[int, int]
    wanted: bool
    bases: tuple[ast.expr, ...] = field(compare=False)
    goes_over: tuple[ast.expr, ...] = field(compare=False)
    line: int = 0
    until: int = 0
    assigned: frozenset[str] = NOTHING
    other: tuple[ast.stmt, ...] = field(default=(), compare=False)
    of_other: frozenset[str] = NOTHING
    is_joint: bool = False
    is_last: bool = True
    gives: frozenset[int] = frozenset()
    is_rest: bool = False
    appended: frozenset[str] = NOTHING
    entries: tuple[ast.expr, ...] = field(default=(), compare=False)
    local: frozenset[str] = NOTHING
    rest: tuple[tuple[ast.expr, bool], ...] = field(default=(), compare=False)
    breaks: bool = False
    is_part: bool = False

    @property
    def place(self) -> tuple[int, ...]:
        """No other in its file has that: one within another may begin, or end, where that does."""
        return *self.first, *self.last

    @property
    def leaves(self) -> bool:
        """Whether it leaves more behind than what is written to tensors."""
        return bool(self.assigned or self.appended or self.entries)

    @property
    def is_watched(self) -> bool:
        """Whether something is to be done when its code goes on behind it."""
        return bool(self.leaves or self.gives or self.is_joint or self.is_rest or self.is_part)


@lru_cache(maxsize=1024)
def body_of(code: CodeType, at: int) -> Body | str:
    """The branch whose condition is asked at this place of the code, of which nothing stays but tensors; or why it is
    none. Of `len(rows)` what is asked is whether there are any.
    """
    function, opname, place = asks_at(code, at)
    if function is None or is_own(code.co_filename):  # what is in the place of `max`
        return NO_SOURCE if function is None else NO_IF
    for branch in _statements(function, ast.If):
        if holds(branch.test, place):
            return _of(branch, function, code, (opname, place))
    for loop in _statements(function, ast.While):
        if holds(loop.test, place):
            return _of_loop(loop, loop, [], function, (opname, place))
    choices = [one for one in ast.walk(function) if isinstance(one, ast.IfExp) and holds(one.test, place)]
    if not choices:
        return NO_IF
    return _of_choice(max(choices, key=lambda one: (one.lineno, one.col_offset)), function, code, (opname, place))


@lru_cache(maxsize=1024)
def turn_of(code: CodeType, at: int) -> Body | str:
    """Likewise the body of the loop that begins at this place of the code."""
    function, opname, place = asks_at(code, at)
    if function is None or opname != "GET_ITER":
        return NO_SOURCE if function is None else "no for goes over them alone"
    for loop in _statements(function, ast.For):
        if any(isinstance(part, SEVERAL) for part in ast.walk(loop.iter)):
            continue
        if place in ((loop.lineno, loop.col_offset), (loop.iter.lineno, loop.iter.col_offset)):
            known = {name.id for name in stored_in([loop.target])}
            return _body(loop.body, [], function, ends={ast.Continue}, known=known)
    return "no for goes over them alone"


@lru_cache(maxsize=1024)
def places_of(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Where each instruction of a code stands in its file: (line, column)."""
    return tuple((line or 0, column or 0) for line, _, column, _ in code.co_positions())


def _statements(function: ast.FunctionDef, kind: type[Kind]) -> Iterator[Kind]:
    """Those of one kind in a function."""
    waiting: list[ast.AST] = [function]
    while waiting:
        one = waiting.pop()
        for inner in (inner for name in BLOCKS for inner in getattr(one, name, [])):
            if isinstance(inner, kind):
                yield inner
            if not isinstance(inner, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                waiting.append(inner)


def _of(branch: ast.If, function: ast.FunctionDef, code: CodeType, asks: tuple[str, tuple[int, int]]) -> Body | str:
    other = [] if all(isinstance(one, ast.Pass) for one in branch.orelse) else branch.orelse
    loops = [one for kind in (ast.For, ast.While) for one in _statements(function, kind)]
    loop, turn = next(((one, rest) for one in loops if (rest := _behind(one.body, branch)) is not None), (None, None))
    match branch.body:
        case [*ahead, ast.Continue()] if turn is not None:
            inside, other, truth, ends = turn, ahead, False, {ast.Continue}
        case [*ahead, ast.Break()] if loop is not None:
            return _of_loop(loop, branch, ahead, function, asks)
        case [*ahead, ast.Return(value)] if (rest := _behind_all(branch, function)) is not None:
            return _rest(branch, ahead, value, rest, function, code, asks)
        case [*_, ast.Raise() | ast.Return() as last]:
            return RAISES if isinstance(last, ast.Raise) else RETURNS
        case _:
            inside, truth, ends = branch.body, True, set[type]()
    wanted = wanted_of(branch.test, asks, truth)
    if wanted is None:
        return ASKS_MORE
    if any(isinstance(part, OF_A_FRAME) for one in other for part in ast.walk(one)):
        return "it has an else that ends something"
    body = _body(inside, other, function, wanted, ends=ends)
    return body if isinstance(body, str) else _asked_in(body, branch.test, branch.lineno, asks, truth, function)


def _of_loop(
    loop: ast.For | ast.While,
    ends: ast.If | ast.While,
    ahead: list[ast.stmt],
    function: ast.FunctionDef,
    asks: tuple[str, tuple[int, int]],
) -> Body | str:
    """All that a loop does behind a condition that `ends` it, in its next turns, too: as if in a branch. `ahead`: what
    is done where it ends.
    """
    truth = ends is loop
    if truth and loop.orelse:
        return "the loop has an else, which is run then"
    wanted = wanted_of(ends.test, asks, truth)
    if wanted is None:
        return ASKS_MORE
    if isinstance(loop, ast.While) and not may_end(loop, ends):
        return "nothing but that ends the loop, and a program computes all turns: write `for _ in range(most):`"
    body = _body([loop], ahead, function, wanted, ends={ast.Break})
    if isinstance(body, str):
        return body
    body = _asked_in(body, ends.test, loop.lineno, asks, truth, function)
    return body if isinstance(body, str) else replace(body, breaks=True)


def _behind(block: Sequence[ast.stmt], branch: ast.If | ast.For) -> list[ast.stmt] | None:
    """What goes on behind a branch, or a loop, in these statements where that is not taken; None: it is in a loop
    there, or so.
    """
    for place, one in enumerate(block):
        if one is branch:
            return [*branch.orelse, *block[place + 1 :]]
        if isinstance(one, ast.If):
            for inner in (one.body, one.orelse):
                if (found := _behind(inner, branch)) is not None:
                    return [*found, *block[place + 1 :]]
    return None


def _behind_all(branch: ast.If, function: ast.FunctionDef) -> list[ast.stmt] | None:
    """Likewise of a function; of a loop in it all that this does, in its next turns, too."""
    if (found := _behind(function.body, branch)) is not None:
        return found
    for loop in _statements(function, ast.For):
        if not loop.orelse and holds(loop, (branch.lineno, branch.col_offset)):
            behind = _behind(function.body, loop)
            if behind is not None:
                return [loop, *behind]
    return None


def _asked_in(
    body: Body, test: ast.expr, line: int, asks: tuple[str, tuple[int, int]], truth: bool, function: ast.FunctionDef
) -> Body | str:
    joint = [part for part in map(linked, ast.walk(test)) if isinstance(part, ast.BoolOp)]
    if (name := _assigned_later(joint, asks[1], body, function)) is not None:
        return LATER.format(name)
    rest = rest_of(test, asks[1], truth) or ()
    is_last = all(not holds(value, asks[1]) for part in joint for value in part.values[: -1 - len(rest)])
    return replace(body, line=line, is_joint=bool(joint), is_last=is_last, rest=rest)


def _assigned_later(
    joint: Sequence[ast.BoolOp], place: tuple[int, int], body: Body, function: ast.FunctionDef
) -> str | None:
    """A name that a part of a condition behind that place assigns, and somebody reads who is neither in the condition
    nor in the branch.
    """
    later = list[ast.expr]()
    for one in joint:
        at = next((at for at, value in enumerate(one.values) if holds(value, place)), len(one.values))
        later += one.values[at + 1 :]
    names = {one.target.id for part in later for one in ast.walk(part) if isinstance(one, ast.NamedExpr)}
    for one in ast.walk(function) if names else ():
        if isinstance(one, ast.Name) and one.id in names and isinstance(one.ctx, ast.Load):
            at = one.lineno, one.col_offset
            if not body.first <= at < body.last and not any(holds(test, at) for test in joint):
                return one.id
    return None


def _rest(
    branch: ast.If,
    ahead: list[ast.stmt],
    value: ast.expr | None,
    behind: list[ast.stmt],
    function: ast.FunctionDef,
    code: CodeType,
    asks: tuple[str, tuple[int, int]],
) -> Body | str:
    """The rest of a function, of which a branch returns another `value` behind statements `ahead` of that."""
    wanted = wanted_of(branch.test, asks, False)
    if wanted is None:
        return ASKS_MORE
    last = behind[-1] if behind else None
    while isinstance(last, ast.If) and last.orelse:  # either way it ends there
        last = last.orelse[-1]
    last = last if isinstance(last, ast.Return) else None
    given, is_within = last and last.value, not behind or last is not behind[-1]
    inside = behind if is_within else behind[:-1]
    pairs, gives = list[tuple[ast.expr, ast.expr]](), frozenset[int]()
    match given, value:
        case (None, None) | (ast.Constant(None), None) | (None, ast.Constant(None)):
            pass
        case (None, _) | (_, None):
            return "it returns something, and the function nothing at its end, or the other way round"
        case (ast.Name() as name, ast.expr() as one):
            pairs = [(name, one)]
        case (ast.Tuple(names), ast.Tuple(values)) if len(names) == len(values) and all(map(is_name, names)):
            pairs = [*zip(names, values, strict=True)]
        case (ast.expr() as given, ast.expr() as one) if is_root(given):
            pairs, gives = [(ast.Name(VALUE), one)], calls_of(code, given)
        case _:
            return "the function returns neither names nor what a function of torch gives at its end"
    other = [*ahead, *(assignment(name.id, one) for name, one in pairs if isinstance(name, ast.Name))]
    if gives and given is not None:
        inside = [*inside, assignment(VALUE, given)]
    elif not inside:
        inside = [nothing(last or branch)]
    body = _body(inside, other, function, wanted, ends={ast.Return}, more=behind)
    if isinstance(body, str):
        return body
    names = frozenset(name.id for name, _ in pairs if isinstance(name, ast.Name))
    until = body.last[0] if gives or last is None or (behind[:-1] and not is_within) else last.lineno - 1
    body = replace(body, assigned=names - {VALUE}, of_other=names, gives=gives, is_rest=True, until=until)
    loop = behind[0] if behind and holds(behind[0], (branch.lineno, branch.col_offset)) else None
    body = _asked_in(body, branch.test, (loop or branch).lineno, asks, False, function)
    return body if isinstance(body, str) else replace(body, breaks=loop is not None)


def _of_choice(
    choice: ast.IfExp, function: ast.FunctionDef, code: CodeType, asks: tuple[str, tuple[int, int]]
) -> Body | str:
    """`a if mask.any() else b`, which a name may be assigned to; else that side is gone into whose value can be changed
    where it is computed.
    """
    if any(isinstance(part, ast.NamedExpr) for one in (choice.body, choice.orelse) for part in ast.walk(one)):
        return "it assigns a name there"
    if (named := _of_names(choice, function, asks)) is not None:
        return named
    sides = (True, choice.body, choice.orelse), (False, choice.orelse, choice.body)
    for truth, side, another in sides:
        if not is_root(side) or (wanted := wanted_of(choice.test, asks, truth)) is None:
            continue
        body = _body([assignment(VALUE, side)], [assignment(VALUE, another)], function, wanted, ends=set[type]())
        if isinstance(body, str):
            return body
        gives, until = calls_of(code, side), choice.end_lineno or 0
        body = replace(body, assigned=NOTHING, of_other=frozenset((VALUE,)), gives=gives, until=until)
        return _asked_in(body, choice.test, choice.lineno, asks, truth, function)
    return ASKS_MORE if any(is_root(side) for _, side, _ in sides) else NO_ROOT


def _of_names(choice: ast.IfExp, function: ast.FunctionDef, asks: tuple[str, tuple[int, int]]) -> Body | str | None:
    """`x = a if mask.any() else b`: the names can be others behind that, as behind an `if`. None: it is no such
    statement, its names are another function's, too, or another one stands in its line, where they would be read.
    """
    assigns = (one for one in statements_in(function) if isinstance(one, ast.Assign | ast.AnnAssign))
    whole = next((one for one in assigns if one.value is choice), None)
    targets: list[ast.expr] = (
        whole.targets if isinstance(whole, ast.Assign) else [] if whole is None else [whole.target]
    )
    outer = {name for one in ast.walk(function) if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
    if whole is None or not all(map(are_names, targets)) or outer & {name.id for name in stored_in([whole])}:
        return None
    line, *column = whole.end_lineno, whole.end_col_offset or 0
    if any(one.lineno == line and [one.col_offset] > column for one in statements_in(function)):
        return None
    wanted = wanted_of(choice.test, asks, True)
    if wanted is None:
        return ASKS_MORE
    inside, other = ([ast.copy_location(ast.Assign(targets, side), side)] for side in (choice.body, choice.orelse))
    body = _body(inside, other, function, wanted, ends=set[type]())
    if isinstance(body, str):
        return body
    names = frozenset(name.id for name in stored_in(inside))
    body = replace(body, assigned=names, of_other=names, until=line or 0)
    return _asked_in(body, choice.test, whole.lineno, asks, True, function)


def _body(
    inside: Sequence[ast.stmt],
    other: Sequence[ast.stmt],
    function: ast.FunctionDef,
    wanted: bool = True,
    *,
    ends: Set[type],
    known: Set[str] = NOTHING,
    more: Sequence[ast.stmt] = (),
) -> Body | str:
    """Of these statements, and those of an else; `known`: names that are assigned ahead of them; `ends`: kinds of
    statements that end where these do; `more`: others that are within it.
    """
    if not inside:
        return "nothing stands in it"
    both = [*inside, *other]
    stored = {one.id for one in stored_in(both)} - known
    seen = Seen(set(), set())
    seen_outside(function.body, set(), [*both, *more], stored | known, seen)
    if seen.later or seen.names & known:
        return f"{min(seen.later or seen.names & known)!r}, which it assigns, may be read outside of it"
    if (told := against(function, inside[0], stored)) is not None:
        return told
    own, lists = own_of(both, set()), lists_of(function)
    if (name := appended_to(both, own | lists)) is not None:
        return MORE.format(name)
    for block in (inside, other):
        if (effect := effect_in(block, own | lists, writes=True)) is not None:
            return effect
    if other and (private := of_a_class(other)) is not None:
        return f"what is done where it is not taken names {private}"
    left, count = Left(stored | known, own, lists), 0
    for block in (inside, other):
        count = len(left.entries)
        names = left_behind(block, known, left, ends)
        if isinstance(names, str):
            return names
    entries = {ast.unparse(one): one for one in left.entries}
    within = (ast.unparse(one.value) for one in left.entries if isinstance(one, ast.Subscript | ast.Attribute))
    if (base := next((told for told in within if told in entries), None)) is not None:
        return f"it assigns {base}, and what is in it"
    of_other_entries = frozenset(map(ast.unparse, left.entries[count:]))
    arguments = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
    first, last = (inside[0].lineno, inside[0].col_offset), (inside[-1].end_lineno or 0, inside[-1].end_col_offset or 0)
    loops = (one for statement in both for one in ast.walk(statement))
    over = [one.iter for one in loops if isinstance(one, (ast.For, ast.comprehension))]
    over += [part for one in over if isinstance(one, ast.Call) for part in one.args]
    assigned, of_other = frozenset(seen.names | left.early), frozenset(one.id for one in stored_in(other))
    bases, lines, of_other = tuple(left.bases), (first[0], last[0]), of_other & assigned
    made = Body(first, last, wanted, bases, tuple(over), *lines, assigned, tuple(other), of_other | of_other_entries)
    local = own_of(function.body, arguments)
    return replace(made, appended=frozenset(left.appended), entries=tuple(entries.values()), local=local)
