"""Which names statements assign, and who reads them."""

from __future__ import annotations

import ast
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from autopar.trace.entries import is_entry
from autopar.trace.reading import holds

LATER = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.GeneratorExp)
READS_ALL = ("locals", "vars", "eval", "exec")
BLOCKS = ("body", "orelse", "finalbody", "handlers")


def stored_in(block: Sequence[ast.AST]) -> list[ast.Name]:
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
    appends: list[str] = field(default_factory=list[str])
    targets: list[ast.expr] = field(default_factory=list[ast.expr])
    writes: list[ast.expr] = field(default_factory=list[ast.expr])
    blocks: list[tuple[list[ast.stmt], set[str]]] = field(default_factory=list[Any])


def _read(one: ast.stmt, ends: Set[type], left: Left) -> _Statement | None:
    """None: nobody knows what it leaves behind."""
    match one:
        case ast.Continue() | ast.Break() | ast.Return() if type(one) in ends:
            return _Statement([one])
        case ast.Assign(targets):
            return _Statement([one], targets=[part for target in targets for part in _parts(target)])
        case ast.AnnAssign(target) | ast.AugAssign(target):
            return _Statement([one], targets=[target])
        case ast.Expr(ast.Call(ast.Attribute(base, method))) if method.endswith("_"):
            while isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute) and base.func.attr.endswith("_"):
                base = base.func.value  # `x.mul_(2).add_(1)`
            return _Statement([one], writes=[base])
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append"))) if name in left.lists:
            return _Statement([one], appends=[name])
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name)))) if name in left.own:  # `parts.append(x)`
            return _Statement([one])
        case ast.Expr(ast.Constant()) | ast.Pass() | ast.Assert():
            return _Statement([one])
        case ast.If(test, [*_, ast.Raise()], orelse):  # a check, as an assert is
            return _Statement([test], blocks=[(orelse, set())])
        case ast.If(test, body, orelse):
            return _Statement([test], blocks=[(body, set()), (orelse, set())])
        case ast.For(target, over, body, orelse):
            return _Statement([over], blocks=[(body, {name.id for name in stored_in([target])}), (orelse, set())])
        case ast.While(test, body, orelse):
            return _Statement([test], blocks=[(body, set()), (orelse, set())])
        case ast.With(items, body) if all(item.optional_vars is None for item in items):
            return _Statement([*items], blocks=[(body, set())])
        case _:
            return None


@dataclass
class Left:
    """What statements leave behind, of which `stored` are the names that they assign, `own` those of what they make
    themselves, `lists` of lists that may be appended to: `bases` gets what they write to, `early` names that may be
    read before they are assigned there, `appended` lists that they append to, `entries` what they assign of objects.
    """

    stored: Set[str]
    own: Set[str]
    lists: Set[str]
    bases: list[ast.expr] = field(default_factory=list[ast.expr])
    early: set[str] = field(default_factory=set[str])
    appended: set[str] = field(default_factory=set[str])
    entries: list[ast.expr] = field(default_factory=list[ast.expr])


def left_behind(block: Sequence[ast.stmt], known: Set[str], left: Left, ends: Set[type]) -> set[str] | str:
    """The names that are assigned behind statements; what would be seen behind them that is neither a name nor a write
    to a tensor. `known`: names that were assigned in this turn; `ends`: kinds of statements that end where these do.
    """
    known = {*known}
    for one in block:
        if (told := _read(one, ends, left)) is None:
            return f"{ast.unparse(one).splitlines()[0]!r} stands in it"
        for name in _loads(told.reads):
            if name.id in left.stored - known:
                left.early.add(name.id)
        behind = list[set[str]]()
        for statements, names in told.blocks:
            is_loop = isinstance(one, ast.For | ast.While) and statements is one.body
            within = {*ends, ast.Continue, ast.Break} if is_loop else ends
            if isinstance(names := left_behind(statements, known | names, left, within), str):
                return names
            behind.append(names)
        if behind and not isinstance(one, ast.For | ast.While):  # which may have no turn
            known |= set.intersection(*behind)
        for target in told.targets:
            match target:
                case ast.Name(name):
                    known.add(name)
                case ast.Subscript(ast.Name(name)) if name in known:
                    if name not in left.own:
                        return f"it writes to parts of {name!r}, which it makes itself"
                case ast.Subscript() | ast.Attribute() if is_entry(target, left.stored):
                    left.entries.append(target)
                case ast.Subscript(base):
                    left.bases.append(base)
                case _:
                    return f"it assigns {ast.unparse(target)}"
        left.appended |= {*told.appends} - known
        left.bases += [base for base in told.writes if not (isinstance(base, ast.Name) and base.id in known)]
    return known


def _loads(parts: Sequence[ast.AST]) -> list[ast.Name]:
    """Names that are read: `x += 1` reads one, too."""
    every = [one for part in parts for one in ast.walk(part)]
    read = [one for one in every if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
    return read + [one.target for one in every if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name)]


@dataclass
class Seen:
    """Names that are read, `later` in functions that are called whenever."""

    names: set[str]
    later: set[str]


def seen_outside(
    block: Sequence[ast.stmt], known: set[str], inside: Sequence[ast.stmt], stored: set[str], seen: Seen
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
        behind = [seen_outside(inner, known | own, inside, stored, seen) for inner in blocks]
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
    inner = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    return [part for one in inner for part in _parts(one)] if inner else [target]


def against(function: ast.FunctionDef, first: ast.stmt, stored: Set[str]) -> str | None:
    """What of the function around it stands against a branch that assigns these names."""
    for one in ast.walk(function):
        if (name := _asked_which(one, stored)) is not None:
            return f"the function asks which object {name!r} is, which it assigns"
        if isinstance(one, (ast.Global, ast.Nonlocal)) and stored & {*one.names}:
            return f"{min(stored & {*one.names})!r}, which it assigns, is no local variable"
        if isinstance(one, ast.Name) and one.id in READS_ALL:
            return f"the function calls {one.id}()"
        if isinstance(one, ast.Try) and one.handlers and holds(one, (first.lineno, first.col_offset)):
            return "it stands in a try, and what fails there may be caught"
    return None


def _asked_which(one: ast.AST, names: Set[str]) -> str | None:
    """Which of some names stands in `a is b`, beside another thing than None, or in `match a`."""
    sides: list[ast.expr] = []
    if isinstance(one, ast.Match):
        sides = [one.subject]
    elif isinstance(one, ast.Compare) and any(isinstance(order, (ast.Is, ast.IsNot)) for order in one.ops):
        sides = [one.left, *one.comparators]
    if any(isinstance(part, ast.Constant) and part.value is None for part in sides):
        return None
    return next((part.id for part in sides if isinstance(part, ast.Name) and part.id in names), None)


def of_a_class(block: Sequence[ast.stmt]) -> str | None:
    """A name in statements that only code within its class can read."""
    for one in (one for statement in block for one in ast.walk(statement)):
        name = one.id if isinstance(one, ast.Name) else one.attr if isinstance(one, ast.Attribute) else ""
        if name in ("super", "__class__") or (name.startswith("__") and not name.endswith("__")):
            return name
    return None
