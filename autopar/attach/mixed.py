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

from autopar._compat import dtensor_dispatcher

WRITE = "write it with +, -, *, / (loss = loss + penalty), or put the other together first: penalty.full_tensor()"


@functools.cache
def mend_mixed() -> None:
    """From now on in this process; what torch 2.13 calls so, earlier ones may not have."""
    for name, by in (("_try_replicate_spec_for_scalar_tensor", _beside), ("_dispatch_fast_path_python_tail", _given)):
        if (plain := getattr(dtensor_dispatcher, name, None)) is not None:
            setattr(dtensor_dispatcher, name, functools.wraps(plain)(functools.partial(by, plain)))


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
