"""Losses of DTensors whose mean torch (2.13) takes as the mean of the pieces' means.

Backward divides by the elements of a rank's piece there, and not by those of the tensor: gradients of `mse_loss` over
what is split are too large by the number of pieces; and where pieces differ in size, so does the loss. Here each rank
computes its elements, and they are averaged as any DTensor is. The cross-entropy of rows whose ignored labels lie
unevenly has right gradients there, and a mean of the pieces' means; here it is the sum over the sum of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from autopar._compat import dtensor_handlers
from autopar.attach.tensors import over_pieces, whole_within

LOSSES = ("mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
ELEMENTS, MEAN, SUM = 0, 1, 2  # what `reduction` says
NLL = torch.ops.aten.nll_loss_forward.default


def mend_losses() -> None:
    """From now on these are losses of the whole tensor."""
    for name in LOSSES:
        dtensor_handlers.setdefault(getattr(torch.ops.aten, name).default, _loss)
        dtensor_handlers.setdefault(getattr(torch.ops.aten, f"{name}_backward").default, _gradient)
    dtensor_handlers.setdefault(torch.ops.aten.binary_cross_entropy_with_logits.default, _loss)
    dtensor_handlers.setdefault(NLL, _of_labels)


def _loss(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = _given(op, args, kwargs)
    reduction, like = given.pop("reduction"), _laid_out(given)
    made = _over(op(**_pieces(given, like), reduction=ELEMENTS), like)
    return made if reduction == ELEMENTS else made.mean() if reduction == MEAN else made.sum()


def _gradient(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = _given(op, args, kwargs)
    reduction, gradient = given.pop("reduction"), given.pop("grad_output")
    like = _laid_out(given)
    pieces = _pieces(given, like)
    if reduction == ELEMENTS:
        of_each = _piece(gradient, like.device_mesh, like.placements)
    else:
        number = whole_within(gradient) if isinstance(gradient, DTensor) else gradient
        of_each = (number / like.numel() if reduction == MEAN else number).expand_as(pieces["self"])
    return _over(op(of_each, **pieces, reduction=ELEMENTS), like)


def _of_labels(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(loss, sum of the weights of the labels that count), of log-probabilities by rows, a class in each column."""
    given = _given(op, args, kwargs)
    scores, reduction = next(one for one in given.values() if isinstance(one, DTensor)), given.pop("reduction")
    by_rows = given["self"].ndim == 2
    rows = [one if by_rows and one == Shard(0) else Replicate() for one in scores.placements]
    whole = [Replicate()] * len(rows)
    mesh = scores.device_mesh
    weight = given.pop("weight")
    pieces = {name: _piece(value, mesh, rows) for name, value in given.items()}
    pieces["weight"] = _piece(weight, mesh, whole)
    of_pieces = [Partial() if one == Shard(0) else one for one in rows]
    loss, total = op(**pieces, reduction=ELEMENTS if reduction == ELEMENTS else SUM)
    total = DTensor.from_local(total, mesh, of_pieces, run_check=False).redistribute(placements=whole)
    if reduction == ELEMENTS:
        return over_pieces(loss, given["target"].shape, rows, mesh), total
    loss = DTensor.from_local(loss, mesh, of_pieces, run_check=False).redistribute(placements=whole)
    return (loss / total if reduction == MEAN else loss), total


def _given(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in op._schema.arguments]
    defaults = {one.name: one.default_value for one in op._schema.arguments if one.has_default_value()}
    return defaults | dict(zip(names, args, strict=False)) | kwargs


def _laid_out(given: dict[str, Any]) -> Any:
    """What says how all operands are to lie: the first DTensor without terms, whole where their shapes differ."""
    held = [one for one in given.values() if isinstance(one, Tensor)]
    shape = torch.broadcast_shapes(*(one.shape for one in held))
    like = next(one for one in held if isinstance(one, DTensor))
    alike = all(one.shape == shape for one in held)
    placements = [one if alike and not isinstance(one, Partial) else Replicate() for one in like.placements]
    return like.redistribute(placements=placements).expand(shape)


def _pieces(given: dict[str, Any], like: DTensor) -> dict[str, Any]:
    return {name: _piece(value, like.device_mesh, like.placements) for name, value in given.items()}


def _piece(value: Any, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not isinstance(value, DTensor):
        return distribute_tensor(value, device_mesh, placements, src_data_rank=None).to_local()
    return value.redistribute(placements=placements).to_local()


def _over(piece: Tensor, like: DTensor) -> DTensor:
    return over_pieces(piece, like.shape, like.placements, like.device_mesh)
