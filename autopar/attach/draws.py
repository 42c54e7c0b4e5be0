"""Random numbers drawn into DTensors, outside of the model: each its own, and the same on every rank that has it.

torch (2.11 to 2.13) draws the same numbers into every piece of a DTensor on CPUs, and where ranks are seeded
differently other ones into copies of one piece. Noise on gradients, weights that are initialised anew and dropped
connections are then no random numbers any more. Here the whole tensor is drawn on every rank, from a seed that rank 0
draws, and cut.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor

from autopar._compat import dtensor_handlers
from autopar.attach.tensors import is_elsewhere, over_pieces, whole_within

_aten = torch.ops.aten
DRAWS = (
    _aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.exponential_.default,
    _aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from"), _aten.log_normal_.default,
    _aten.cauchy_.default, _aten.geometric_.default, _aten.randn_like.default, _aten.rand_like.default,
    _aten.randint_like.default, _aten.randint_like.low_dtype, _aten.bernoulli.default, _aten.bernoulli.p,
    _aten.native_dropout.default,
)  # fmt: skip


def draw_whole() -> None:
    """From now on random numbers in DTensors, in this process, are drawn as above. Every rank must draw them."""
    for op in DRAWS:
        dtensor_handlers[op] = _draw


def _draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    held: Any = args[0]
    mesh, placements = held.device_mesh, held.placements
    seed = torch.randint(2**31, (), device=held.to_local().device)
    if mesh.size() > 1:
        dist.broadcast(seed, 0)
    if is_elsewhere(held):  # drawn by the ranks of that stage, from a seed that is drawn here, too
        if op._schema.is_mutable:
            return held
        like = {name: value for name, value in kwargs.items() if name not in ("memory_format", "device")}
        return _nothing(op(torch.empty(held.shape, dtype=held.dtype, device="meta"), *args[1:], **like), held)
    whole = whole_within(held.detach())
    devices = [whole.get_device()] if whole.is_cuda else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(int(seed))
        drawn = op(whole, *args[1:], **{name: value for name, value in kwargs.items() if name != "memory_format"})
    pieces = tuple(
        distribute_tensor(one, mesh, [*map(_own, placements)], src_data_rank=None)
        for one in (drawn if isinstance(drawn, tuple) else (drawn,))
    )
    if op._schema.is_mutable:
        held.to_local().copy_(pieces[0].to_local())
        return held
    return pieces if isinstance(drawn, tuple) else pieces[0]


def _nothing(drawn: Any, held: Any) -> Any:
    """What was drawn, with no elements, laid out as what it was drawn for."""
    if isinstance(drawn, tuple):
        return tuple(_nothing(one, held) for one in drawn)
    none = torch.zeros(0 if drawn.ndim else (), dtype=drawn.dtype, device=held.to_local().device)
    return over_pieces(none, drawn.shape, [*map(_own, held.placements)], held.device_mesh)


def _own(placement: Any) -> Any:
    """How a value of its own lies that stands beside one placed so: whole, where that is made of terms."""
    return Replicate() if placement.is_partial() else placement
