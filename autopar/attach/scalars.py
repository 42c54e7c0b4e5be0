"""The number of a tensor is the whole tensor's: `item()`, `float`, `int`, `bool` of sums over split parameters.

A sum, norm or maximum over a DTensor that is split is a DTensor whose ranks each hold a term. Its `item()` (torch
2.11 to 2.13) gives each rank its own term, without a word: optimizers that adapt their step by one number over all
parameters (D-Adaptation, Prodigy, LARS, L-BFGS) then step otherwise on each rank. The form below puts the terms
together first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar._compat import dtensor_handlers

ITEM = torch.ops.aten._local_scalar_dense.default


def share_numbers() -> None:
    """From now on a DTensor of one number, in this process, gives the whole tensor's. Every rank must ask for it."""
    dtensor_handlers[ITEM] = _item


def _item(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> int | float | complex | bool:
    (number,) = args
    return op(number.full_tensor())
