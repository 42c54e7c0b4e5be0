"""`max(a, b)` and `min(a, b)` of Python, of tensors of one value: which one it is hangs on values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from autopar.trace.checks import Checks
from autopar.trace.effects import functions_of
from autopar.trace.lines import line_here

IS_BEFORE: dict[str, Callable[[Any, Any], Any]] = {"max": operator.gt, "min": operator.lt}
NOT_FINITE = (
    "what forward does not take of {}(..){} is not finite in this call: gradients of zero would become NaN on their "
    "way back. Have torch.maximum or torch.minimum take one"
)


def may_be_left_open(given: Sequence[Any], code: CodeType) -> bool:
    """Whether they are tensors of one value, shape and dtype, among numbers that these could be; and the code that asks
    does not ask which object it gets.
    """
    tensors = [one for one in given if isinstance(one, Tensor)]
    if len({(one.shape, one.dtype, one.device) for one in tensors}) != 1 or tensors[0].numel() != 1:
        return False
    kinds = (int, float) if tensors[0].is_floating_point() else (int,)
    are_alike = all(isinstance(one, Tensor) or type(one) in kinds for one in given)
    return tensors[0].dtype != torch.bool and are_alike and not _asks_which(code)


@lru_cache(maxsize=1024)
def _asks_which(code: CodeType) -> bool:
    compared = (part for one in functions_of(code) for part in ast.walk(one) if isinstance(part, ast.Compare))
    return any(
        isinstance(order, ast.Is | ast.IsNot) and not any(isinstance(side, ast.Constant) for side in (one.left, other))
        for one in compared
        for order, other in zip(one.ops, one.comparators, strict=True)
    )


def extreme(name: str, *given: Any) -> Any:
    """The largest (`max`) or smallest one; of equal ones the first."""
    return {"max": max, "min": min}[name](given)


def extreme_of_hidden(checks: Checks, name: str, *given: Any) -> Any:
    """`extreme`, in a trace: what is known is asked for, and else a program takes the one or the other."""
    best, *others = given
    for one in others:
        is_before = IS_BEFORE[name](one, best)
        if not isinstance(is_before, Tensor) or checks.is_known(is_before):
            best = one if is_before else best
            continue
        truth = checks.branches.tensors.truth(is_before)
        like = one if isinstance(one, Tensor) else best
        one, best = (part if isinstance(part, Tensor) else torch.full_like(like, part) for part in (one, best))
        for left, is_left in ((one, truth.logical_not()), (best, truth)):
            if left.requires_grad:
                checks.add(NOT_FINITE.format(name, line_here()), left.detach().isfinite().logical_not() & is_left)
        best = checks.branches.tensors.one_of(one, best, truth)
    return best
