"""Tensors that are as long as a mask picks rows: `torch.ones(len(rows))`, `torch.zeros(mask.sum().item(), 8)`. They are
rows of that mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.trace.builtin import math_of_numbers, replaced
from autopar.trace.masked import Picked
from autopar.trace.numbers import Number
from autopar.trace.windows import rolling_by_numbers

MAKING = ("zeros", "ones", "full", "empty")


@contextlib.contextmanager
def taking_numbers() -> Iterator[None]:
    """Inside, Python's `math`, and functions of torch that ask for numbers before anybody sees that, take those of each
    call.
    """
    with math_of_numbers(), rolling_by_numbers(), replaced(torch, MAKING, _made_of_rows):
        yield


def _made_of_rows(name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
    is_filled = name == "full"

    def function(*args: Any, **kwargs: Any) -> Any:
        size = kwargs["size"] if "size" in kwargs else args[0] if args else ()
        is_one = isinstance(size, (tuple, list))
        listed, filled = (size, args[1:]) if is_one else (() if is_filled else args, ())
        rows = _counted(*listed[:1])
        is_known = all(type(one) is int for one in listed[1:]) and (is_filled or not filled)
        if rows is None or not is_known or kwargs.get("requires_grad"):
            return whole(*args, **kwargs)
        mask, number, origins = rows
        named = {key: one for key, one in kwargs.items() if key != "size"}
        return Picked(whole((*mask.shape, *listed[1:]), *filled, **named), mask, number, origins)

    return function


def _counted(many: Any = None) -> tuple[Tensor, int, Any] | None:
    """The mask that picks so many rows, its number, and where it comes from."""
    if type(many) is not Number or (rows := many._checks.counted(many.tensor)) is None:
        return None
    return *rows, many._checks.origins
