"""Random numbers drawn into DTensors, outside of the model: each its own, and the same on every rank that has it.

torch (2.11 to 2.13) draws the same numbers into every piece of a DTensor on CPUs, and where ranks are seeded
differently other ones into copies of one piece. Noise on gradients, weights that are initialised anew and dropped
connections are then no random numbers any more. Here the whole tensor is drawn on every rank as rank 0's generator
draws it, and cut: of equal seeds come the numbers of one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor

from autopar._compat import dtensor_handlers
from autopar.attach.tensors import is_elsewhere, over_pieces, whole_within
from autopar.emit.seeded import generator_on

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
    elsewhere, device = is_elsewhere(held), held.to_local().device
    given = {name: value for name, value in kwargs.items() if name != "memory_format"}
    whole = torch.zeros(held.shape, dtype=held.dtype, device=device) if elsewhere else whole_within(held.detach())
    with torch.no_grad(), _as_rank_zero(device, alone=mesh.size() == 1):
        drawn = op(whole, *args[1:], **given)
    if elsewhere:  # what the ranks of that stage have; generators go on alike
        return held if op._schema.is_mutable else _nothing(drawn, held)
    pieces = tuple(
        distribute_tensor(one, mesh, [*map(_own, placements)], src_data_rank=None)
        for one in (drawn if isinstance(drawn, tuple) else (drawn,))
    )
    if op._schema.is_mutable:
        held.to_local().copy_(pieces[0].to_local())
        return held
    return pieces if isinstance(drawn, tuple) else pieces[0]


@contextlib.contextmanager
def _as_rank_zero(device: torch.device, *, alone: bool) -> Iterator[None]:
    """Inside, numbers are those that rank 0's generator gives next. A rank whose own was in the same state goes on as
    rank 0's; any other goes on from where it was, a number later.
    """
    generator = generator_on(device)
    mine = generator.get_state()
    state = mine.to(device, copy=True)
    if not alone:
        dist.broadcast(state, 0)
    if torch.equal(state.cpu(), mine):
        yield
        return
    torch.randint(2**31, (), device=device)
    after = generator.get_state()
    generator.set_state(state.cpu())
    try:
        yield
    finally:
        generator.set_state(after)


def _nothing(drawn: Any, held: Any) -> Any:
    """What was drawn, with no elements, laid out as what it was drawn for."""
    if isinstance(drawn, tuple):
        return tuple(_nothing(one, held) for one in drawn)
    none = torch.zeros(0 if drawn.ndim else (), dtype=drawn.dtype, device=held.to_local().device)
    return over_pieces(none, drawn.shape, [*map(_own, held.placements)], held.device_mesh)


def _own(placement: Any) -> Any:
    """How a value of its own lies that stands beside one placed so: whole, where that is made of terms."""
    return Replicate() if placement.is_partial() else placement
