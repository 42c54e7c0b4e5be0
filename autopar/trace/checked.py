"""Functions of torch that look at their operands' values before they give anything, and raise: in a program the same
without a look, and the look is one of those that each call takes (`Checks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.trace.checks import Checks
from autopar.trace.extremes import extreme, extreme_of_hidden
from autopar.trace.lines import line_here
from autopar.trace.numbers import made_of_tensors
from autopar.trace.origins import Looks

# torch has each without a check, too: `torch.linalg.inv_ex`.
FACTORING: dict[Any, str] = {
    **{getattr(torch.linalg, name): name for name in ("cholesky", "inv", "ldl_factor", "lu_factor", "solve")},
    **dict.fromkeys((torch.cholesky, torch.Tensor.cholesky), "cholesky"),
    **dict.fromkeys((torch.inverse, torch.Tensor.inverse), "inv"),
}
COUNTING = (torch.bincount, torch.Tensor.bincount)
NOT_POSITIVE = (
    "torch.linalg.cholesky{} is given a matrix that is not positive-definite, or not finite: add to its diagonal "
    "before (a program goes on by no except)"
)
SINGULAR = "torch.linalg.{}{} is given a singular matrix, or not a finite one: add to its diagonal before"

TOO_LARGE = (
    "torch.bincount{} counts numbers of {} or more, or negative ones, and a program always gives minlength of them, "
    "which is {}: pass a larger minlength"
)


def checked(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], checks: Checks) -> Callable[[], Any] | None:
    """What gives what `func` gives where it is one of them, or reads tensors in a list; None: it is neither."""
    if func is extreme:
        return lambda: extreme_of_hidden(checks, *args)
    if func in FACTORING and kwargs.get("out") is None:
        return lambda: _factored(FACTORING[func], args, kwargs, checks)
    if (
        func in COUNTING
        and isinstance(args[0], Tensor)
        and (least := kwargs.get("minlength", args[2] if len(args) > 2 else 0))
    ):
        return lambda: counted(args[0], kwargs.get("weights", args[1] if len(args) > 1 else None), least, checks)
    return made_of_tensors(func, args, kwargs)


def _factored(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], checks: Checks) -> Any:
    if name == "cholesky" and len(args) > 1:  # of `torch.cholesky`
        args, kwargs = args[:1], {"upper": args[1]}
    *made, info = getattr(torch.linalg, f"{name}_ex")(*args, **kwargs)
    told = NOT_POSITIVE.format(line_here()) if name == "cholesky" else SINGULAR.format(name, line_here())
    checks.add(told, info != 0)
    return made[0] if len(made) == 1 else getattr(torch.return_types, f"linalg_{name}")(made)


def counted(values: Tensor, weights: Tensor | None, least: int, checks: Looks, among: Tensor | bool = True) -> Tensor:
    """`torch.bincount(values, weights, least)`, of those `among` them."""
    is_there = (values >= 0) & (values < least)
    checks.add(TOO_LARGE.format(line_here(), least, least), ~is_there & among)
    is_there = is_there & among
    if weights is None:
        each = is_there.long()
    else:
        each = torch.where(is_there, weights if weights.dtype == torch.float32 else weights.double(), 0.0)
    counts = torch.zeros(least, dtype=each.dtype, device=values.device)
    return counts.index_add(0, values.clamp(0, least - 1).long(), each.detach())
