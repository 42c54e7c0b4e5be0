"""JSON from a file, and its parts: each is what it has to be, or the place and the cause are told in one sentence."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from solver.problem import Array

T = TypeVar("T")

MOST = 2**31  # bytes of a file, unpacked
DEEPEST = 16  # lists in lists


def read_as(path: str | Path, make: Callable[[Any], T]) -> T:
    """What `make` makes of the parsed JSON in a .json or .json.gz file. Raises ValueError naming the file and what is
    wrong; OSError, also for a pipe or a device, which might never answer.
    """
    try:
        return make(_parsed(_content(path)))
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: {cut(error, 400)}") from error


def _content(path: str | Path) -> bytes:
    """What the file holds, unpacked."""

    def at_once(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with ExitStack() as stack:
        file = stack.enter_context(open(path, "rb", opener=at_once))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        unpacked = stack.enter_context(gzip.open(file)) if Path(path).suffix == ".gz" else file
        content = unpacked.read(MOST + 1)
    if len(content) > MOST:
        raise ValueError(f"it has more than {MOST:,} bytes, which no problem needs")
    return content


def _parsed(content: bytes) -> Any:
    try:
        document = json.loads(content, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is no problem file: lists lie too deep in each other") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    _check_depth(document)
    return document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a field stands twice among {sorted(name for name, _ in pairs)[:12]}")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits[:20]} is too large for a float")
    return number


def _check_depth(document: Any) -> None:
    level: list[Any] = [document]
    for _ in range(DEEPEST):
        level = [
            one
            for part in level
            if isinstance(part, dict | list)
            for one in (cast(dict[str, Any], part).values() if isinstance(part, dict) else cast(list[Any], part))
            if isinstance(one, dict | list)
        ]
    if level:
        raise ValueError(f"it is no problem file: more than {DEEPEST} lists lie in each other")


# --- parts -----------------------------------------------------------------------------------------------------------


def cut(value: object, most: int = 60) -> str:
    """As it stands in a message: on one line, and short."""
    if isinstance(value, int) and abs(value) >= 10**50:
        return f"a number of {value.bit_length()} bits"
    told = str(value) if isinstance(value, Exception) else repr(value)
    told = "".join(c if c.isprintable() else "?" for c in told)
    return told if len(told) <= most else f"{told[: most - 3]}..."


def fields(value: Any, what: str, needs: Collection[str], may: Collection[str] = ()) -> dict[str, Any]:
    """An object with all of `needs`, perhaps some of `may`, and no other field: a slip of the pen is no field less."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {cut(value)}, not an object")
    found = cast(dict[str, Any], value)
    if missing := [name for name in needs if name not in found]:
        raise ValueError(f"{what} has no field {missing[0]!r}")
    if unknown := sorted(found.keys() - {*needs, *may}):
        raise ValueError(f"{what} has the unknown field {cut(unknown[0])}")
    return found


def listed(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is {cut(value)}, not a list")
    return cast(list[Any], value)


def whole(value: Any, what: str) -> int:
    if type(value) is not int or abs(value) >= 2**63:
        raise ValueError(f"{what} has {cut(value)} where a whole number below 2^63 is needed")
    return value


def numbers(values: Any, what: str, *, most: float = 2.0**1023) -> Array:
    """A flat list of numbers, each at most `most`. No text and no truth is taken for one."""
    found = listed(values, what)
    for kind in {*map(type, found)} - {int, float}:
        wrong = next(value for value in found if type(value) is kind)
        raise ValueError(f"{what} have {cut(wrong)} where a number is needed")
    try:
        array = np.array(found, dtype=np.float64)
    except OverflowError:
        raise ValueError(f"{what} overflow: a number in them is too large for a float") from None
    if not (np.abs(array) <= most).all():
        raise ValueError(f"{what} overflow: a number beyond {most:g} is in them")
    return array
