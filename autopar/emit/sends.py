"""Sends from rank to rank: what the loops of patterns pass on (`autopar.rules.looped.Shift`) runs as.

A functional all-to-all with empty pieces for all but one peer does it on gloo and, as grouped sends and receives, on
NCCL; it is launched here and waited for by `wait_tensor`, as other collectives are. They are operators of torch: which
pieces are empty differs from rank to rank, and emitted code does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar._compat import functional_collectives, group_named

assert functional_collectives  # imported for what it registers


@torch.library.custom_op("autopar::shift", mutates_args=())
def shift(x: Tensor, group: str) -> Tensor:
    """Begin to pass `x`, which is contiguous, on to the next rank of the group, the last one to the first; what the one
    before passes on is what is made.
    """
    return begun(x, group, *peers("shift", group)).view(x.shape)


@torch.library.custom_op("autopar::mirror", mutates_args=())
def mirror(x: Tensor, group: str) -> Tensor:
    """Begin to exchange `x`, which is contiguous, with the rank that lies as far from the other end of the group."""
    return begun(x, group, *peers("mirror", group)).view(x.shape)


def peers(send: str, group: str) -> tuple[int, int, int]:
    """How many ranks there are, to which this one sends, and from which it receives."""
    of = group_named(group)
    rank, ranks = of.rank(), of.size()
    return (ranks, (rank + 1) % ranks, (rank - 1) % ranks) if send == "shift" else (ranks, *[ranks - 1 - rank] * 2)


def begun(x: Tensor, group: str, ranks: int, to: int, source: int) -> Tensor:
    """What comes from `source`, flat; it is not there before it is waited for."""
    given, taken = [0] * ranks, [0] * ranks
    given[to] = taken[source] = x.numel()
    return torch.ops._c10d_functional.all_to_all_single(x.view(-1), taken, given, group)


def arrived(flat: Tensor, like: Tensor) -> Tensor:
    """What `begun` has made of something that is `like` it, once it is there."""
    return torch.ops._c10d_functional.wait_tensor(flat).view(like.shape)


@shift.register_fake
@mirror.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
