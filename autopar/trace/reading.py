"""What code does with values that it is given: whether text that it makes of them is for people to read (printed,
logged, told by an error), and no key that it goes on by; whether it asks which object a truth is.
"""

from __future__ import annotations

import ast
import dis
import itertools
import linecache
import sys
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType, FrameType

from autopar.trace.code import is_torchs_code

READ = frozenset((
    "print", "pprint", "debug", "info", "warning", "warn", "error", "critical", "exception", "log", "log_dict", "write",
    "set_description", "set_postfix", "set_postfix_str", "add_scalar", "add_text", "log_metric",
))  # fmt: skip
KEYED = frozenset(("get", "pop", "setdefault", "index", "getattr", "setattr", "hasattr", "delattr", "register_buffer"))


def is_for_reading() -> bool:
    """Of the text that the user's code makes now. Where there is no source, it may be a key."""
    frame = _users()
    return frame is not None and _is_read(frame.f_code, frame.f_lasti)


def is_identity_asked() -> bool:
    """Whether the user's code that is given a truth now has `is True` or `is False` in it."""
    frame = _users()
    return frame is None or _asks_identity(frame.f_code)


def is_asked() -> bool:
    """Whether the user's code compares what it makes now, or goes on by it."""
    frame = _users()
    return frame is not None and _is_asked(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=1024)
def _is_asked(code: CodeType, at: int) -> bool:
    line, _, column, _ = next(itertools.islice(code.co_positions(), at // 2, None))
    tree = tree_of(code.co_filename)
    if line is None or column is None or tree is None:
        return False
    return any(holds(part, (line, column)) for one in ast.walk(tree) for part in _going_on_by(one))


def _going_on_by(one: ast.AST) -> Sequence[ast.expr]:
    """What stands in it that is compared, or is a key or a name."""
    match one:
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            return [test]
        case ast.Compare():
            return [one]
        case ast.Subscript(slice=key):
            return [key]
        case ast.Dict(keys):
            return [key for key in keys if key is not None]
        case ast.DictComp(key):
            return [key]
        case ast.Call(ast.Attribute(attr=name) | ast.Name(name), args) if name in KEYED:
            return args
        case _:
            return []


def holds(part: ast.expr | ast.stmt, place: tuple[int, int]) -> bool:
    """Whether what is at that line and column stands in it."""
    return (part.lineno, part.col_offset) <= place < (part.end_lineno or 0, part.end_col_offset or 0)


def _users() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_torchs_code(frame.f_code):
        frame = frame.f_back
    return frame


@lru_cache(maxsize=1024)
def _asks_identity(code: CodeType) -> bool:
    pairs = itertools.pairwise(dis.get_instructions(code))
    return any(one.opname == "IS_OP" and isinstance(before.argval, bool) for before, one in pairs)


@lru_cache(maxsize=1024)
def _is_read(code: CodeType, at: int) -> bool:
    line, *_ = next(itertools.islice(code.co_positions(), at // 2, None))
    tree = tree_of(code.co_filename)
    if line is None or tree is None:
        return False
    around = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.stmt) and one.lineno <= line <= (one.end_lineno or one.lineno)
    ]
    match max(around, key=lambda one: (one.lineno, -(one.end_lineno or 0)), default=None):
        case ast.Raise() | ast.Assert():
            return True
        case ast.Expr(ast.Call(ast.Name(name) | ast.Attribute(attr=name))):
            return name in READ
        case _:
            return False


@lru_cache(maxsize=64)
def tree_of(file: str) -> ast.Module | None:
    """What stands in a source file; None where there is none."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # of another version of Python, or no Python
        return None
