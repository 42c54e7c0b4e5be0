"""From what one rank's program gives back to what the model returns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.attach.inputs import piece_with_gradient, relaid_with_gradient
from autopar.attach.late import Late
from autopar.attach.results import refuse_batches
from autopar.attach.tensors import as_dtensor, is_whole, whole_within
from autopar.attach.whole_values import averaged
from autopar.ir import layout as plain
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh


def whole_when_read(
    local: Tensor, shape: Sequence[int], layout: Layout, mesh: Mesh, device_mesh: DeviceMesh, *, averages: bool
) -> Tensor:
    """The whole value, a plain tensor on every rank, put together when somebody reads it (which all ranks must do).
    `averages`: ranks make gradients of rows of their own.
    """
    if is_whole(layout):
        return local
    return _WholeWhenRead.apply(local, tuple(shape), layout, mesh, device_mesh, averages)  # type: ignore[no-any-return]


class _WholeWhenRead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, shape: tuple[int, ...], layout: Layout, mesh: Mesh, device_mesh: DeviceMesh,
        averages: bool,
    ) -> Tensor:  # fmt: skip
        ctx.layout, ctx.mesh, ctx.device_mesh, ctx.averages = layout, mesh, device_mesh, averages
        ctx.set_materialize_grads(False)
        found: list[Tensor] = []

        def gather() -> Tensor:
            if not found:
                with torch.no_grad():
                    found.append(whole_within(as_dtensor(local.detach(), shape, layout, device_mesh)))
            return found[0]

        return Late(torch.empty(shape, dtype=local.dtype, device="meta"), gather, local.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if gradient is None:
            return (None,) * 6
        refuse_batches(ctx.device_mesh.size(), gradient)
        if ctx.averages:
            gradient = averaged(gradient, ctx.device_mesh)
        piece = piece_with_gradient(gradient, ctx.layout, ctx.mesh, ctx.device_mesh)
        return piece, None, None, None, None, None


def hooks_of(value: Tensor) -> Mapping[int, Any]:
    """Where torch keeps the hooks of an output, also when nobody has that any more."""
    if value._backward_hooks is None:
        value._backward_hooks = OrderedDict[int, Any]()
        if value.grad_fn is not None:
            value.grad_fn._register_hook_dict(value)  # as `register_hook` does for the first of them
    return value._backward_hooks


def is_by_rows(layout: Layout, dim: int) -> bool:
    """Whether each rank holds its own rows, in rank order."""
    return all(one == plain.Shard(dim) for one in layout)


def own_rows(local: Tensor, shape: Sequence[int], layout: Layout, device_mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's rows of an output, along `dim`, in rank order, as `from_local` takes inputs. What a rank computes of
    its rows counts as DDP has it: the gradients of all ranks are averaged.
    """
    rows = relaid_with_gradient(local, shape, layout, (plain.Shard(dim),) * device_mesh.ndim, device_mesh)
    return _Averaged.apply(rows, local, device_mesh.size())  # type: ignore[no-any-return]


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, held: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        ctx.set_materialize_grads(False)
        looks = StorageWeakRef(rows.untyped_storage()) == StorageWeakRef(held.untyped_storage())
        return rows.view_as(rows) if looks else rows.data  # what is no view may be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        return None if gradient is None else gradient / ctx.ranks, None, None
