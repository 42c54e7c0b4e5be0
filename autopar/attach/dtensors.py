"""What DTensors do otherwise than tensors, without a word (torch 2.11 to 2.13), and from the first compile on do not.

A sum, norm or maximum over a DTensor that is split is a DTensor whose ranks each hold a term. Its `item()` gives each
rank its own term: optimizers that adapt their step by one number over all parameters (D-Adaptation, Prodigy, LARS,
L-BFGS) then step otherwise on each rank. Here the terms are put together first.

`parameter.data = value` changes the wrapper and not the piece that it holds: the parameter keeps its old values. So do
averages of weights that are swapped in, clamped weights, and SGD by hand. Here the piece is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar._compat import dtensor_handlers

ITEM = torch.ops.aten._local_scalar_dense.default
DATA: Any = torch.Tensor.data


def mend_dtensors() -> None:
    """From now on DTensors of this process give the whole tensor's number, which every rank must ask for, and take
    what their `data` is set to.
    """
    dtensor_handlers[ITEM] = _item
    DTensor.data = property(DATA.__get__, _set_data)  # type: ignore[assignment, method-assign]


def _item(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> int | float | complex | bool:
    (number,) = args
    return op(number.full_tensor())


def _set_data(held: DTensor, value: torch.Tensor) -> None:
    """A value of the same shape in the layout of what held it; any other as it is."""
    with torch.no_grad():
        mesh, placements = held.device_mesh, held.placements
        if not isinstance(value, DTensor):
            value = distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
        elif value.shape == held.shape and value.device_mesh == mesh and value.placements != placements:
            value = value.redistribute(placements=placements)
    DATA.__set__(held, value)
    held._local_tensor, held._spec = value._local_tensor.detach(), value._spec
