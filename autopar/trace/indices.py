"""Indices of which there are as many as a mask picks (`masked.Picked` of whole numbers): `nonzero`, and what is read
at them. They stand for all places, of which those count where the mask is true.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.trace.origins import Origins
from autopar.trace.places import refused
from autopar.trace.reshaped import beside
from autopar.trace.sharing import storage_of

Picked = Any  # of `autopar.trace.masked`, which calls what is here


def nonzero_of(kind: type, mask: Tensor, origins: Origins) -> Picked:
    """`mask.nonzero()`: rows of one index for each dim."""
    axes = [torch.arange(size, device=mask.device) for size in mask.shape]
    places = axes[0].unsqueeze(-1) if len(axes) == 1 else torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
    made = kind(places, mask.bool(), origins.of(mask), origins)
    made.places = axes[0] if len(axes) == 1 else None
    return made


def read_at(name: str, tensor: Tensor, *args: Any) -> Picked:
    """`tensor[rows]`, and `index_select` and `gather` along dim 0, at picked indices."""
    rows = args[-1]
    if rows.dtype not in (torch.int64, torch.int32):
        raise refused("an index of such rows")
    is_alike = tensor.ndim == rows.ndim if name == "gather" else not rows.row
    if name != "getitem" and (args[0] != 0 or not is_alike):
        raise refused(name)
    if is_alike and _is_each(rows) and len(tensor) == len(rows.mask) and (not rows.row or rows.row == tensor.shape[1:]):
        return rows.like(apart(tensor, rows.mask))  # each at its own place
    if name != "gather":
        return rows.like(tensor[rows.dense])
    made = torch.gather(tensor, 0, rows.dense.reshape(-1, *rows.row).long())
    return rows.like(made.reshape(rows.dense.shape))


def _is_each(rows: Picked) -> bool:
    """Whether they are the places themselves, in whatever shape, and nothing that is computed of them."""
    return rows.places is not None and storage_of(rows.dense) == storage_of(rows.places)


def apart(tensor: Tensor, mask: Tensor) -> Tensor:
    """The tensor with something harmless where the mask is not true."""
    neutral = 0.5 if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.where(beside(mask, tensor), tensor, torch.full((), neutral, dtype=tensor.dtype, device=tensor.device))


def expanded(rows: Picked, *sizes: Any) -> Picked:
    """`rows.expand(-1, 3)`; for -1 their own number may stand."""
    given: Sequence[Any] = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    if not given or not (isinstance(given[0], Tensor) or given[0] == -1):
        raise refused("expand")
    return rows.like(rows.dense.expand(*rows.mask.shape, *given[1:]))
