"""Forwards that tell by `is` whether two of their arguments are one (`if context is x`). In a trace those are two, so
that one plan serves both kinds of calls (`model(ids, labels=ids)`), but where the model asks that.
"""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from autopar.errors import TraceError
from autopar.trace.code import functions_of
from autopar.trace.values import SCALARS, is_torchs

OF_TENSORS = ("LOAD_FAST", "LOAD_DEREF", "BINARY_SUBSCR")  # what may give one, ahead of `is`
BY_NAME = {"id", "is_"}


@functools.cache
def _compared(code: CodeType) -> tuple[str, str, int] | None:
    """Two arguments that it compares by `is`, and the line."""
    given = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    found = [*dis.get_instructions(code)]
    for left, right, asks in zip(found, found[1:], found[2:], strict=False):
        names = {left.argval, right.argval} if left.opname == right.opname == "LOAD_FAST" else set[str]()
        if asks.opname == "IS_OP" and len(names) == 2 and names <= given and asks.positions is not None:
            return left.argval, right.argval, asks.positions.lineno or code.co_firstlineno
    return None


def asks_which(kinds: Iterable[type]) -> bool:
    """Whether a forward of these may ask of tensors which they are: by `is`, of local names and entries, or by `id`."""
    return any(map(_asks, _codes_of(kinds)))


@functools.cache
def _asks(code: CodeType) -> bool:
    found = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    if any(asks.opname == "IS_OP" and before.opname in OF_TENSORS for before, asks in itertools.pairwise(found)):
        return True
    return bool(BY_NAME & {*code.co_names}) or any(_asks(one) for one in code.co_consts if isinstance(one, CodeType))


def refuse_one_for_two(kinds: Iterable[type], given: Iterable[Any]) -> None:
    """Raises TraceError where two of these are one, and a forward of those classes asks that of its arguments."""
    ids = [id(one) for one in given if not isinstance(one, SCALARS)]
    if len({*ids}) == len(ids):
        return
    for code in _codes_of(kinds):
        if (found := _compared(code)) is None:
            continue
        left, right, line = found
        raise TraceError(
            f"forward asks whether {left} is {right} at {code.co_filename}:{line}, and this call passes one thing "
            "under two names, which are two in a trace: have forward take None, or a flag, where they are one"
        )


def _codes_of(kinds: Iterable[type]) -> Iterator[CodeType]:
    """Of the users' forwards of these."""
    for kind in dict.fromkeys(kinds):
        for function in functions_of(kind.forward):  # type: ignore[attr-defined]
            if not is_torchs(function.__code__.co_filename):
                yield function.__code__
