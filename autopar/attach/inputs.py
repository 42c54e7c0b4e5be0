"""Arguments of a call, cut to the layouts of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.attach.foreach import terms_in
from autopar.attach.results import refuse_batches
from autopar.attach.tensors import (
    as_dtensor,
    as_stored,
    device_of,
    is_whole,
    layout_of,
    piece_of,
    placements_of,
    relaid,
    whole_within,
)
from autopar.ir.graph import TensorType
from autopar.ir.layout import REPLICATE, Layout
from autopar.ir.mesh import Mesh


def type_of(value: Tensor) -> TensorType:
    return TensorType(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def local_input(value: Tensor, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh) -> Tensor:
    """This rank's piece of an argument. A plain tensor is the whole; a DTensor says where it lies. Where it requires
    grad, so does the piece, whose gradient lies as the piece does: it reaches the argument as that lies, which all
    ranks run backward for.
    """
    if isinstance(value, DTensor):
        value = _on(value, device_mesh)
        if terms_in(value):
            return as_stored(value.redistribute(placements=placements_of(layout)).to_local())
        return as_stored(relaid_with_gradient(value.to_local(), value.shape, layout_of(value), layout, device_mesh))
    if value.is_meta:
        raise ValueError(
            f"an argument {list(value.shape)} lies on meta, where tensors have no values; a step needs them (to plan "
            "without, give it as example_inputs=)"
        )
    if torch.is_grad_enabled() and value.requires_grad:
        return _Piece.apply(value, layout, mesh, device_mesh).to(device_of(device_mesh))
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    return piece_of(value.detach(), layout, mesh, coordinate).to(device_of(device_mesh))


def piece_with_gradient(whole: Tensor, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh) -> Tensor:
    """This rank's piece of a value that all have, whose gradient is that of the whole."""
    return whole if is_whole(layout) else _Piece.apply(whole, layout, mesh, device_mesh)


def whole_with_gradient(
    piece: Tensor, shape: Sequence[int], layout: Layout, mesh: Mesh, device_mesh: DeviceMesh
) -> Tensor:
    """What has these pieces, on each rank, as its gradient is there on each. All have to call it."""
    return piece if is_whole(layout) else _Whole.apply(piece, tuple(shape), layout, mesh, device_mesh)


def relaid_with_gradient(
    local: Tensor, shape: Sequence[int], before: Layout, after: Layout, device_mesh: DeviceMesh
) -> Tensor:
    """As `relaid`, between layouts without partial sums. (DTensors have no gradient of the gradient of that.)"""
    return local if before == after else _Relaid.apply(local, tuple(shape), before, after, device_mesh)


class _Relaid(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, shape: tuple[int, ...], before: Layout, after: Layout, device_mesh: DeviceMesh
    ) -> Tensor:
        ctx.like = shape, after, before, device_mesh
        ctx.set_materialize_grads(False)
        made = relaid(local.detach().contiguous(), shape, before, after, device_mesh)
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        refuse_batches(ctx.like[-1].size(), gradient)
        return None if gradient is None else relaid_with_gradient(gradient, *ctx.like), None, None, None, None


class _Piece(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh) -> Tensor:
        ctx.like = value.shape, layout, mesh, device_mesh
        ctx.set_materialize_grads(False)
        coordinate = device_mesh.get_coordinate()
        assert coordinate is not None
        piece = piece_of(value.detach(), layout, mesh, coordinate)
        return piece.view_as(piece)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        refuse_batches(ctx.like[-1].size(), gradient)
        return None if gradient is None else whole_with_gradient(gradient, *ctx.like), None, None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, piece: Tensor, shape: tuple[int, ...], layout: Layout, mesh: Mesh, device_mesh: DeviceMesh
    ) -> Tensor:
        ctx.like = layout, mesh, device_mesh
        ctx.set_materialize_grads(False)
        return whole_within(as_dtensor(piece.detach().contiguous(), shape, layout, device_mesh))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        refuse_batches(ctx.like[-1].size(), gradient)
        return None if gradient is None else piece_with_gradient(gradient, *ctx.like), None, None, None, None


def _on(value: DTensor, device_mesh: DeviceMesh) -> DTensor:
    """A DTensor of the devices along one axis, as it was made before the plan arranged them. Ranks are numbered
    row-major, so that pieces in the order of ranks are those of all axes.
    """
    ranks = value.device_mesh.size()
    if value.device_mesh == device_mesh or value.device_mesh.ndim != 1 or ranks != device_mesh.size():
        return value
    return as_dtensor(value.to_local(), value.shape, layout_of(value) * device_mesh.ndim, device_mesh)


def settled(reads: Iterable[tuple[int, Layout]]) -> dict[int, Layout]:
    """Number of a tensor -> the layout in which it is best given: that in which it is read, or whole where it is read
    in several, each of which is a part of that.
    """
    found: dict[int, Layout] = {}
    for number, layout in reads:
        same = found.setdefault(number, layout) == layout
        found[number] = layout if same else (REPLICATE,) * len(layout)
    return found
