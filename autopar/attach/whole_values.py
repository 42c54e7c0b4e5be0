"""Whole values of DTensors in scripts in which each rank has rows of its own (`inputs="local"`).

There each rank's loss is of its rows, and gradients are averages over the ranks, as under DDP. What a script makes of a
parameter beside the module (a weight of two losses, a scale of logits, a penalty) becomes a whole value on each rank,
and the gradient that arrives at it is of this rank's rows alone. torch takes such gradients to be equal on all ranks,
so that each would keep its own. Here they are averaged; of a pipeline, over the ranks of the parameter's stage, as
those of other stages have the same rows. So are gradients of outputs that each rank has whole. All ranks run backward.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.attach.over_stages import everywhere_whole


@functools.cache
def mend_whole_values() -> None:
    """From now on in this process."""
    DTensor.full_tensor = _averaging  # type: ignore[method-assign]


@functools.wraps(everywhere_whole)
def _averaging(held: DTensor, *, grad_placements: Any = None) -> Tensor:
    whole = everywhere_whole(held, grad_placements=grad_placements)
    if grad_placements is not None or not (torch.is_grad_enabled() and whole.requires_grad):
        return whole
    return _Averaged.apply(whole, held.device_mesh)


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: DeviceMesh) -> Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return averaged(gradient, ctx.ranks), None


def averaged(gradient: Tensor, ranks: DeviceMesh) -> Tensor:
    """Over all ranks of a mesh, which all call it."""
    if ranks.size() == 1:
        return gradient
    if torch.is_grad_enabled() and gradient.requires_grad:
        raise RuntimeError(
            "backward was called with create_graph=True, for an output that all ranks have whole, by a gradient that "
            'has one itself; with inputs="local" it is averaged over ranks, which has none: return rows, or put the '
            "model and what takes the gradient into one module, and compile that"
        )
    mean = gradient.contiguous() / ranks.size()  # first: a scaled loss may be as large as float16 goes
    for axis in range(ranks.ndim):
        dist.all_reduce(mean, group=ranks.get_group(axis))
    return mean


def of_whole_batch(
    gradients: Sequence[Tensor | None], places: Mapping[str, int], rows: Set[str], whole: Set[str], ranks: DeviceMesh
) -> list[Tensor | None]:
    """The gradients of outputs as one process makes them of the whole batch. `places`: index of an output -> place
    among them; `rows`: those of which each rank has its own rows; `whole`: those that each has whole.
    """
    found = [*gradients]
    for target, place in places.items():
        if (one := found[place]) is None:
            continue
        if target in rows:
            found[place] = one / ranks.size()
        elif target in whole:
            found[place] = averaged(one, ranks)
    return found
