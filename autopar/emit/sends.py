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
    of = group_named(group)
    return _exchanged(x, group, (of.rank() + 1) % of.size(), (of.rank() - 1) % of.size())


@torch.library.custom_op("autopar::mirror", mutates_args=())
def mirror(x: Tensor, group: str) -> Tensor:
    """Begin to exchange `x`, which is contiguous, with the rank that lies as far from the other end of the group."""
    of = group_named(group)
    other = of.size() - 1 - of.rank()
    return _exchanged(x, group, other, other)


def _exchanged(x: Tensor, group: str, to: int, source: int) -> Tensor:
    ranks = group_named(group).size()
    given, taken = [0] * ranks, [0] * ranks
    given[to] = taken[source] = x.numel()
    made = torch.ops._c10d_functional.all_to_all_single(x.view(-1), taken, given, group)
    return made.view(x.shape)


@shift.register_fake
@mirror.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
