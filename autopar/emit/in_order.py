"""Operators of torch some of whose kernels read operands as if they lay in memory in order and without gaps. In the
model they do; where layouts change, or a value comes from another rank, they need not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.ir.strides import contiguous

aten = torch.ops.aten


def _in_order(name: str, places: Sequence[int], ones: Sequence[int] = ()) -> Callable[..., Any]:
    """torch's operator of that name, whose kernels read what is at these places as if it lay without gaps, in order,
    and give wrong numbers, or fail, where it does not; `ones`: at these where a dim has one element, by its stride.
    """

    def lying(place: int, one: Any) -> Any:
        may_not = place in places or (place in ones and 1 in one.shape)
        is_other = may_not and one is not None and one.stride() != contiguous(tuple(one.shape))
        return aten.clone.default(one, memory_format=torch.contiguous_format) if is_other else one

    def operator(*args: Any) -> Any:
        return getattr(aten, name).default(*(lying(place, one) for place, one in enumerate(args)))

    told = name.removeprefix("native_").replace("_weight_norm_interface", "weight_norm")
    operator.__name__ = operator.__qualname__ = told
    return operator


# Found by tests/emit/test_strides.py.
batch_norm_backward = _in_order("native_batch_norm_backward", (5, 6), ones=(0, 1))
layer_norm_backward = _in_order("native_layer_norm_backward", (3, 4))
group_norm = _in_order("native_group_norm", (0,))
group_norm_backward = _in_order("native_group_norm_backward", (0, 1, 2, 3))
weight_norm = _in_order("_weight_norm_interface", (0,))
weight_norm_backward = _in_order("_weight_norm_interface_backward", (0, 1))
nll_loss2d_backward = _in_order("nll_loss2d_backward", (1,))
