"""Collectives of `torch.distributed` that a script gives a DTensor: torch has none, and says so in words of its own."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch

from autopar._compat import dtensor_handlers

NAMES = (
    "_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_coalesced_", "allreduce_",
    "allreduce_coalesced_", "alltoall_", "alltoall_base_", "broadcast_", "gather_", "reduce_", "reduce_scatter_",
    "scatter_", "send",
)  # fmt: skip


@functools.cache
def mend_collectives() -> None:
    """From now on they say what to do."""
    for name in NAMES:
        dtensor_handlers.setdefault(getattr(torch.ops.c10d, name).default, _refused)


def _refused(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise RuntimeError(
        f"{op} was given a DTensor, of which each rank has a piece: a parameter of a parallel module, or what is made "
        "of some. Its gradients are complete behind backward: leave out what averages them, and "
        "DistributedDataParallel around what holds the module (Lightning adds it for Trainer(devices=N)). To send one, "
        "take p.to_local(), the piece that this rank has, or p.full_tensor()"
    )
