"""What code leaves behind besides what it returns and writes to tensors, as its source says: an attribute that it sets,
a list that it appends to. Of a function of the user's that is called in a branch nothing may stay.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from types import CodeType

from autopar.trace.reading import tree_of

_CHANGES = """
    append appendleft extend extendleft insert pop popleft popitem remove clear update discard setdefault write rotate
    islice difference_update intersection_update symmetric_difference_update move_to_end heappush heappop heapify
    writelines send put put_nowait step backward register_buffer register_parameter register_module add_module
    register_hook register_forward_hook requires_grad_ zero_grad load_state_dict __setattr__ __setitem__ __delitem__
    setitem delitem iadd iconcat insort insort_left insort_right
"""
CHANGES = frozenset(_CHANGES.split())
HANDED_ON = frozenset(("append", "appendleft", "extend", "insert", "popleft", "setdefault"))  # as a function
AS_STATEMENTS = frozenset(("add", "sort", "reverse", "subtract"))  # with tensors they give something
BUILTINS = frozenset(
    ("next", "setattr", "delattr", "exec", "eval", "input", "open", "locals", "globals", "vars", "print", "islice")
)
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAKERS = frozenset(("list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict", "clone"))
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
MADE = ("zeros", "ones", "empty", "full", "new_", "rand", "arange")  # how names of functions that make tensors begin


@dataclass(frozen=True)
class Effect:
    """What code leaves behind that runs these lines."""

    first: float
    last: float
    told: str


@lru_cache(maxsize=4096)
def effects_of(code: CodeType, made: str | None = None) -> tuple[Effect, ...]:
    """What a call of a function may leave behind. `made`: an argument that is of this call alone."""
    found = functions_of(code)
    if not found:
        return (Effect(-inf, inf, "its source is not to be had"),)
    return tuple(effect for one in found for effect in _effects_of(one, made))


def _effects_of(one: ast.AST, made: str | None) -> Iterator[Effect]:
    if isinstance(one, ast.Lambda):
        told = effect_in([one.body], frozenset())
        return iter(() if told is None else (Effect(-inf, inf, told),))
    assert isinstance(one, ast.FunctionDef)
    own = own_of(one.body, {part.arg for part in ast.walk(one.args) if isinstance(part, ast.arg)})
    own |= {one.args.kwarg.arg} if one.args.kwarg is not None else frozenset()
    lines = _lines_of(one)
    return (
        Effect(*lines.get(id(node), (-inf, inf)), told)
        for node, told in _effects_in(one.body, own)
        if made is None or not (isinstance(node, ast.Attribute) and ast.unparse(node.value) == made)
    )


def _lines_of(function: ast.FunctionDef) -> dict[int, tuple[float, float]]:
    """Id of what stands in a function -> the lines of its statement that run if it does."""
    found = dict[int, tuple[float, float]]()
    for statement in (one for one in ast.walk(function) if isinstance(one, ast.stmt) and one is not function):
        has_blocks = isinstance(getattr(statement, "body", None), list)
        blocks = (part for name in BLOCKS for part in getattr(statement, name, ())) if has_blocks else ()
        inner = {id(part) for one in blocks for part in ast.walk(one)}
        own = [part for part in ast.walk(statement) if id(part) not in inner and part is not statement]
        lines = [part.lineno for part in own if isinstance(part, ast.expr)] if has_blocks else [statement.lineno]
        ends = [part.end_lineno or 0 for part in own if isinstance(part, ast.expr)] if has_blocks else []
        if isinstance(statement, (ast.Global, ast.Nonlocal)) or not lines:
            continue
        reach = min(lines), max((*ends, *lines)) if has_blocks else (statement.end_lineno or 0)
        found |= {id(part): reach for part in (statement, *own)}
    return found


@lru_cache(maxsize=4096)
def added_to(code: CodeType) -> frozenset[str]:
    """Arguments of a function that it adds to in place (`x += y`): a list would be another one for who calls it."""
    adds = (part for one in functions_of(code) for part in ast.walk(one) if isinstance(part, ast.AugAssign))
    names = {part.target.id for part in adds if isinstance(part.target, ast.Name)}
    return frozenset(names & {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]})


def functions_of(code: CodeType) -> list[ast.AST]:
    """A function in its file; several, where lambdas stand on one line; none without a file."""
    tree = tree_of(code.co_filename)
    return [one for one in ast.walk(tree) if _is_of(one, code)] if tree is not None else []


def _is_of(one: ast.AST, code: CodeType) -> bool:
    if isinstance(one, ast.Lambda):
        return code.co_name == "<lambda>" and one.lineno == code.co_firstlineno
    if not isinstance(one, ast.FunctionDef) or one.name != code.co_name:
        return False
    return code.co_firstlineno in (one.lineno, *(decorator.lineno for decorator in one.decorator_list))


def own_of(body: Sequence[ast.stmt], arguments: set[str]) -> frozenset[str]:
    """Names that hold what statements make themselves: no argument, nothing of another."""
    given: dict[str, list[ast.AST]] = {}
    for one in (one for statement in body for one in ast.walk(statement)):
        if isinstance(one, ast.Assign):
            for target in one.targets:
                for name, value in pairs_of(target, one.value):
                    given.setdefault(name, []).append(value)
        elif isinstance(one, (ast.For, ast.AnnAssign, ast.NamedExpr)):
            value = one if isinstance(one, ast.For) or one.value is None else one.value
            for name, _ in pairs_of(one.target, value):
                given.setdefault(name, []).append(value)
    return frozenset(name for name, values in given.items() if name not in arguments and all(map(_is_made, values)))


def pairs_of(target: ast.expr, value: ast.AST) -> list[tuple[str, ast.AST]]:
    """Names that are assigned, and what they get."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return [pair for one, part in zip(target.elts, value.elts, strict=True) for pair in pairs_of(one, part)]
    stored = (name for name in ast.walk(target) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))
    return [(name.id, value) for name in stored]


def _is_made(value: ast.AST) -> bool:
    match value:
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name)):
            return name in MAKERS or name.startswith(MADE)
        case _:
            return isinstance(value, DISPLAYS)


def effect_in(parts: Sequence[ast.AST], own: frozenset[str], *, writes: bool = False) -> str | None:
    """What statements or expressions leave behind besides names; `own`: names of what they have made themselves;
    `writes`: what they write to by an index, or set, is looked at elsewhere.
    """
    found = _effects_in(parts, own, writes=writes)
    return next((told for _, told in found), None)


def _effects_in(
    parts: Sequence[ast.AST], own: frozenset[str], *, writes: bool = False
) -> Iterator[tuple[ast.AST, str]]:
    every = [one for part in parts for one in ast.walk(part)]
    pairs = [
        pair for one in every if isinstance(one, ast.Assign) for to in one.targets for pair in pairs_of(to, one.value)
    ]
    aliases = {name for name, value in pairs if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript))}
    looked = (one for one in every if not (writes and _is_written(one)))
    return ((one, told) for one in looked if (told := _effect(one, own, aliases)) is not None)


def _is_written(one: ast.AST) -> bool:
    return isinstance(one, ast.Subscript | ast.Attribute) and isinstance(one.ctx, ast.Store)


def _effect(one: ast.AST, own: frozenset[str], aliases: set[str]) -> str | None:
    match one:
        case ast.Global(names) | ast.Nonlocal(names):
            return f"it assigns {names[0]}, which is not its own"
        case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()):
            return f"it sets .{name}"
        case ast.Subscript(value=base, ctx=ast.Store() | ast.Del()) if not _is_own(base, own):
            return f"it writes to {ast.unparse(base)}"
        case ast.AugAssign(target=ast.Name(name), value=value) if name not in own and isinstance(value, DISPLAYS):
            return f"it adds to {name}"
        case ast.AugAssign(ast.Name(name), op, value) if name in aliases:  # `x = h[0]; x += 1` adds to h
            instead = ast.unparse(ast.BinOp(ast.Name(name), op, value))
            return f"it changes {name} in place, which may be a part of something else: write {name} = {instead}"
        case ast.Expr(ast.Call(ast.Attribute(base, name))) if name in AS_STATEMENTS and not _is_own(base, own):
            return f"it calls .{name}()"
        case ast.Call(ast.Attribute(base, name)) if name in CHANGES and not _is_own(base, own):
            return f"it calls .{name}()"
        case ast.Attribute(base, name, ast.Load()) if name in HANDED_ON and not _is_own(base, own):
            return f"it hands .{name} on"
        case ast.Call(ast.Name(name)) if name in BUILTINS:
            return f"it calls {name}()"
        case ast.Yield() | ast.YieldFrom() | ast.Await():
            return "it is a generator"
        case _:
            return None


def _is_own(base: ast.expr, own: frozenset[str]) -> bool:
    return isinstance(base, ast.Name) and base.id in own
