"""An infinity in one rank's piece of one gradient is one for all ranks: `torch.amp.GradScaler` with our parameters.

GradScaler asks one operator for all gradients of a dtype whether they are finite. Its DTensor form (torch 2.11 to 2.13)
tells the other ranks only where the first gradient of the list is split; else some ranks make the step, and others skip
it. In a module of ours parameters lie in any layout, so the form below asks all gradients where they are split.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._compat import dtensor_handlers
from autopar.attach.over_stages import pipe_among
from autopar.attach.tensors import is_elsewhere

CHECK = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def share_infinities() -> None:
    """From now on GradScaler, in this process, looks for infinities as above."""
    dtensor_handlers[CHECK] = _check_and_unscale


def _check_and_unscale(op: Any, args: tuple[list[Tensor], Tensor, Tensor], kwargs: dict[str, Any]) -> None:
    """Divide gradients by the scale, and set `found` (one number, of this rank) to 1 where any rank has an infinity."""
    gradients, found, inverse_scale = args
    op([_local(gradient) for gradient in gradients], found, inverse_scale, **kwargs)
    split = {
        (gradient.device_mesh, axis): None  # in the order in which they come, the same on every rank
        for gradient in gradients
        if isinstance(gradient, DTensor) and not is_elsewhere(gradient)
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    }
    for mesh, axis in split:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if (pipe := pipe_among(gradients)) is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=pipe.group)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
