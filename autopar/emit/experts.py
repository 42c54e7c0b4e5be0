"""Products of rows with the matrices of their experts: rows are sorted by expert, multiplied in groups, and put back.

The kernel is torch's grouped product where it takes the operands, else one product for each expert. Rows whose expert
is none of those that are here give zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

ALIGNED = 16  # bytes: strides of torch's grouped products


def sorted_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Places in the order of experts, those of no expert here last, and where each expert's end: int32 [experts]."""
    flat = ids.reshape(-1)
    ordered, order = flat.masked_fill((flat < 0) | (flat >= experts), experts).sort(stable=True)
    here = torch.arange(experts, dtype=flat.dtype, device=flat.device)
    return order, torch.searchsorted(ordered, here, right=True, out_int32=True)


def picked(rows: Tensor, order: Tensor, each: int) -> Tensor:
    """`rows` [tokens, `each` or 1, width] in an order of the places of [tokens, each]."""
    return rows.reshape(-1, rows.shape[2]).index_select(0, order if rows.shape[1] == each else order // each)


def products(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows [n, i] in groups, weight [experts, i, o] -> [n, o]; zeros behind the last group."""
    if not _takes(rows, weight):
        return torch.ops.autopar.products_in_turn(rows, weight, ends)
    made = grouped_mm(rows, weight, offs=ends)
    behind = torch.arange(len(rows), device=rows.device) >= ends[-1:]
    return made.masked_fill_(behind.unsqueeze(1), 0)


def weight_products(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """rows [n, i] and grad [n, o] in groups -> [experts, i, o]; zeros for those without rows."""
    if not _takes(rows, grad):
        return torch.ops.autopar.weight_products_in_turn(rows, grad, ends)
    made = grouped_mm(rows.t(), grad, offs=ends)
    empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
    return made.masked_fill_(empty[:, None, None], 0)


def _takes(*operands: Tensor) -> bool:
    """Whether torch has one kernel for them: bfloat16 on CUDA. Elsewhere it has a loop as ours, which lacks types."""
    if any(x.device.type != "cuda" or x.dtype != torch.bfloat16 for x in operands):
        return False
    return all(
        stride == 1 or not (stride * x.element_size()) % ALIGNED
        for x in operands for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1
    )  # fmt: skip


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, and which; their number is read on the host."""
    for expert, (first, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if end > first:
            yield expert, slice(first, end)


@torch.library.custom_op("autopar::products_in_turn", mutates_args=())
def products_in_turn(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`products`, one expert after the other."""
    made = rows.new_zeros(rows.shape[0], weight.shape[2])
    for expert, own in _groups(ends):
        torch.mm(rows[own], weight[expert], out=made[own])
    return made


@torch.library.custom_op("autopar::weight_products_in_turn", mutates_args=())
def weight_products_in_turn(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """`weight_products`, one expert after the other."""
    made = rows.new_zeros(ends.shape[0], rows.shape[1], grad.shape[1])
    for expert, own in _groups(ends):
        torch.mm(rows[own].t(), grad[own], out=made[expert])
    return made


@products_in_turn.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@weight_products_in_turn.register_fake
def _(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])
