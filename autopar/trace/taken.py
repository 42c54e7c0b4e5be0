"""Numbers that functions of torch take out of tensors (`item`, `tolist`, `numpy`): left open where they may be
(`autopar.trace.numbers.Number`), known at once where arguments tell them, or else refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar._compat import FakeTensor, outside_modes
from autopar.trace.checks import DECIDES, Checks
from autopar.trace.numbers import Array, Number, hangs, needed_now, written
from autopar.trace.reading import is_for_reading, is_identity_asked

WRITES = ("__format__", "__repr__")
TAKES_OUT = frozenset(
    ("item", "tolist", "__int__", "__float__", "__index__", "__complex__", "numpy", *WRITES, *DECIDES)
)
BY_METHOD: dict[str, Callable[[Any], Any]] = {
    "__int__": int, "__index__": operator.index, "__float__": float, "__complex__": complex,
    **dict.fromkeys(("item", "tolist"), lambda known: known),
}  # fmt: skip
IDENTITY = " (Ask for the truth itself, and not whether it is True.)"
MOST = 64  # numbers of one tolist()


def takes_out(func: Any, args: Sequence[Any]) -> bool:
    """Whether a function of torch takes numbers out of a tensor without values."""
    is_one = getattr(func, "__name__", "") in TAKES_OUT
    return is_one and isinstance(args[0], FakeTensor) and args[0].constant is None


def taken_out(func: Any, args: Sequence[Any], checks: Checks) -> Any:
    """What such a function gives. Raises TraceError where they are to be known at once."""
    name = getattr(func, "__name__", "")
    if name in DECIDES:  # and `Checks` has no answer
        raise hangs(checks.instead)
    tensor: Tensor = args[0].detach()
    if name in WRITES:
        known = None if is_for_reading() else checks.of_arguments(args[0])
        if known is None:
            return written(checks)
        with outside_modes():
            return func(torch.tensor(known, dtype=tensor.dtype), *args[1:])
    if name == "numpy" or (name in ("item", "tolist") and not tensor.is_complex() and tensor.numel() <= MOST):
        if not checks.arguments.at_once and not (tensor.dtype == torch.bool and is_identity_asked()):
            return _left_open(name, args[0], checks)
        known = checks.of_arguments(args[0])
        if known is None and tensor.dtype == torch.bool and is_identity_asked():
            raise hangs(IDENTITY)
        if known is None:
            return _left_open(name, args[0], checks)
        made = _at_hand(name, known, tensor.dtype)
        if name == "numpy":
            checks.origins.has_array(args[0], made)
        return made
    if (known := checks.known(args[0])) is None:
        raise needed_now()
    return _at_hand(name, known, tensor.dtype)


def _left_open(name: str, given: Tensor, checks: Checks) -> Any:
    """What stands for the numbers of a tensor."""
    checks.arguments.is_lazy, tensor = True, given.detach()
    if name == "numpy":
        return None if given.requires_grad else Array(tensor, checks)  # torch says what to do
    tensor = tensor.clone()  # it may be written to behind this
    return Number(tensor.reshape(()), checks) if name == "item" else _listed(tensor, checks)


def _at_hand(name: str, known: Any, dtype: torch.dtype) -> Any:
    if name != "numpy":
        return BY_METHOD[name](known)
    made = np.array(known, str(dtype).removeprefix("torch."))
    made.flags.writeable = False  # with torch it would be the tensor's own memory
    return made


def _listed(tensor: Tensor, checks: Checks) -> Any:
    return [_listed(part, checks) for part in tensor.unbind()] if tensor.ndim else Number(tensor, checks)
