"""Plain numbers and DTensors in one operator, where autograd would send the one's gradient to the other.

`loss + penalty` becomes plain (`dtensors`): that is Python's operator of DTensors. `loss += penalty`, `torch.add` and
`torch.stack` are the plain tensor's, and end in an assertion without a word, or in backward, in an operator that nobody
wrote. Here they say what to write.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._compat import wrap_dtensor_dispatch

WRITE = "write it with +, -, *, / (loss = loss + penalty), or put the other together first: penalty.full_tensor()"


@functools.cache
def mend_mixed() -> None:
    """From now on in this process."""
    wrap_dtensor_dispatch(_beside, _given)


def _beside(plain: Any, op: Any, number: Tensor, *rest: Any) -> Any:
    """Before a plain number counts as one that all ranks have."""
    if torch.is_grad_enabled() and number.requires_grad:
        raise RuntimeError(
            f"{op} got mixed torch.Tensor and DTensor (a number made of parameters of a parallel module), and the "
            f"gradient of the plain one would come back as a DTensor: {WRITE}"
        )
    return plain(op, number, *rest)


def _given(plain: Any, op: Any, args: tuple[Any, ...], *rest: Any) -> Any:
    """Behind what ranks have made of their pieces."""
    if op._schema.is_mutable and isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
        raise RuntimeError(
            f"{op} changes a plain tensor in place by a DTensor (a number made of parameters of a parallel module): "
            f"{WRITE}"
        )
    return plain(op, args, *rest)
