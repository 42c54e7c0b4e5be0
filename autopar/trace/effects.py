"""What code leaves behind besides what it returns and writes to tensors, as its source says: an attribute that it sets,
a list that it appends to. Of a function of the user's that is called in a branch nothing may stay.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType

from autopar.trace.reading import tree_of

_CHANGES = """
    append appendleft extend extendleft insert pop popleft popitem remove clear update discard setdefault write
    writelines send put put_nowait step backward register_buffer register_parameter register_module add_module
    register_hook register_forward_hook requires_grad_ zero_grad load_state_dict __setattr__ __setitem__ __delitem__
"""
CHANGES = frozenset(_CHANGES.split())
AS_STATEMENTS = frozenset(("add", "sort", "reverse", "subtract"))  # with tensors they give something
BUILTINS = frozenset(
    ("next", "setattr", "delattr", "exec", "eval", "input", "open", "locals", "globals", "vars", "print")
)
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Call)


@lru_cache(maxsize=4096)
def effect_of(code: CodeType) -> str | None:
    """What a call of a function leaves behind; None: nothing."""
    tree = tree_of(code.co_filename)
    found = [one for one in ast.walk(tree) if _is_of(one, code)] if tree is not None else []
    if not found:
        return "its source is not to be had"
    (one, *_) = found
    if isinstance(one, ast.Lambda):
        return effect_in([one.body], frozenset())
    assert isinstance(one, ast.FunctionDef)
    return effect_in(one.body, _own_containers(one))


def _is_of(one: ast.AST, code: CodeType) -> bool:
    if isinstance(one, ast.Lambda):
        return code.co_name == "<lambda>" and one.lineno == code.co_firstlineno
    if not isinstance(one, ast.FunctionDef) or one.name != code.co_name:
        return False
    return code.co_firstlineno in (one.lineno, *(decorator.lineno for decorator in one.decorator_list))


def _own_containers(function: ast.FunctionDef) -> frozenset[str]:
    """Names that hold what the function makes itself: no argument, nothing of another."""
    given: dict[str, list[ast.AST]] = {}
    for one in ast.walk(function):
        if isinstance(one, ast.Assign):
            for target in one.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        given.setdefault(name.id, []).append(one.value)
        elif isinstance(one, (ast.For, ast.AnnAssign, ast.NamedExpr)):
            value = one if isinstance(one, ast.For) or one.value is None else one.value
            for name in ast.walk(one.target):
                if isinstance(name, ast.Name):
                    given.setdefault(name.id, []).append(value)
    arguments = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
    return frozenset(
        name for name, values in given.items() if name not in arguments and all(isinstance(v, DISPLAYS) for v in values)
    )


def effect_in(parts: Sequence[ast.AST], own: frozenset[str], *, writes: bool = False) -> str | None:
    """What statements or expressions leave behind besides names; `own`: names of what they have made themselves;
    `writes`: what they write to by an index is known to be tensors.
    """
    every = (one for part in parts for one in ast.walk(part))
    looked = (one for one in every if not (writes and isinstance(one, ast.Subscript)))
    return next((told for one in looked if (told := _effect(one, own)) is not None), None)


def _effect(one: ast.AST, own: frozenset[str]) -> str | None:
    match one:
        case ast.Global(names) | ast.Nonlocal(names):
            return f"it assigns {names[0]}, which is not its own"
        case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()):
            return f"it sets .{name}"
        case ast.Subscript(value=base, ctx=ast.Store() | ast.Del()) if not _is_own(base, own):
            return f"it writes to {ast.unparse(base)}"
        case ast.AugAssign(target=ast.Name(name), value=ast.List() | ast.ListComp() | ast.Tuple() | ast.Dict()) if (
            name not in own
        ):
            return f"it adds to {name}"
        case ast.Expr(ast.Call(ast.Attribute(base, name))) if name in AS_STATEMENTS and not _is_own(base, own):
            return f"it calls .{name}()"
        case ast.Call(ast.Attribute(base, name)) if name in CHANGES and not _is_own(base, own):
            return f"it calls .{name}()"
        case ast.Call(ast.Name(name)) if name in BUILTINS:
            return f"it calls {name}()"
        case ast.Yield() | ast.YieldFrom() | ast.Await():
            return "it is a generator"
        case _:
            return None


def _is_own(base: ast.expr, own: frozenset[str]) -> bool:
    return isinstance(base, ast.Name) and base.id in own
