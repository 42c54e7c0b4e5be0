"""Between whole tensors and what one rank holds: parameters as DTensors, inputs cut to their layout, outputs put
together.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.attach.agree import agreed
from autopar.emit.moves import host_like
from autopar.ir import layout as plain
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh

# All of a tensor, put together by the ranks of its own mesh: in a pipeline those of one place
# (`autopar.attach.over_stages`, which makes `full_tensor` that of all stages).
whole_within = DTensor.full_tensor


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """Our plain mesh. torch's unnamed axes are called axis0, axis1, ..."""
    sizes = tuple(int(device_mesh.size(i)) for i in range(device_mesh.ndim))
    names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(len(sizes)))
    return Mesh(tuple(names), sizes)


def device_of(device_mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    kind = device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def placements_of(layout: Layout) -> list[Placement]:
    made: list[Placement] = []
    for placement in layout:
        match placement:
            case plain.Shard(dim):
                made.append(Shard(dim))
            case plain.Partial(op):
                made.append(Partial(op))
            case plain.Replicate():
                made.append(Replicate())
    return made


def as_stored(value: Tensor) -> Tensor:
    """The tensor with its values in memory as they are read, of which collectives and views of bits make use: a view
    that torch has marked as conjugate or negative becomes a tensor of its own.
    """
    return value.resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value


def piece_of(value: Tensor, layout: Layout, mesh: Mesh, coordinate: Sequence[int]) -> Tensor:
    """This rank's piece of a whole tensor, with storage of its own if it is smaller than the whole."""
    value = as_stored(value)
    piece = part_of(value, layout, mesh, coordinate)
    return piece if piece is value else piece.clone(memory_format=torch.contiguous_format)


def part_of(value: Tensor, layout: Layout, mesh: Mesh, coordinate: Sequence[int]) -> Tensor:
    """The part of a whole tensor that the rank at `coordinate` has a piece of: a view."""
    for placement, size, index in zip(layout, mesh.sizes, coordinate, strict=True):
        if isinstance(placement, plain.Shard):
            value = value.chunk(size, placement.dim)[index]
    return value


def as_dtensor(local: Tensor, shape: Sequence[int], layout: Layout, device_mesh: DeviceMesh) -> DTensor:
    """A DTensor over local pieces, without any communication."""
    return over_pieces(local, shape, placements_of(layout), device_mesh)


def over_pieces(local: Tensor, shape: Sequence[int], placements: Sequence[Any], device_mesh: DeviceMesh) -> DTensor:
    """A DTensor over local pieces. A piece on the host stays there, whatever the mesh is of, as torch's FSDP has it
    with CPUOffloadPolicy. A rank that is not in the mesh keeps what it is given, which torch would throw away.
    """
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= max(size, 1)
    is_here = local.is_meta or local.device.type == device_mesh.device_type
    is_here = is_here and device_mesh.get_coordinate() is not None
    made = DTensor.from_local(
        local if is_here else local.to("meta"), device_mesh, placements, run_check=False,
        shape=torch.Size(shape), stride=tuple(stride),
    )  # fmt: skip
    return made if is_here else DTensor(local, made._spec, requires_grad=False)


def piece_like(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor over a piece that lies as that of another one, of whose spec it is made: `DTensor.from_local` takes a
    step 0.1 ms for each parameter.
    """
    if local.dtype != like.dtype:
        return over_pieces(local, like.shape, like.placements, like.device_mesh)
    return DTensor(local, copy.copy(like._spec), requires_grad=False)


def parameter_on(
    mesh: Mesh, device_mesh: DeviceMesh, whole: nn.Parameter, layout: Layout, *, on_host: bool = False
) -> nn.Parameter:
    """The parameter as a DTensor. Rank 0's values win, as they do under DDP; a meta parameter stays on meta. Where
    there is no memory for it on one rank, it is left as it is on all.
    """
    value = whole.detach()
    if isinstance(value, DTensor):  # in pieces where an earlier call had no memory for those behind it
        if layout_of(value) == layout and not is_whole(layout) and is_on_host(value) == on_host:
            return whole
        value = value.to_local() if is_whole(layout_of(value)) else whole_within(value)
    if value.is_meta:
        shape = plain.local_shape(tuple(value.shape), layout, mesh)
        assert shape is not None
        local = torch.empty(shape, dtype=value.dtype, device="meta")
    else:
        local = piece_from_rank_zero(value, layout, mesh, device_mesh, on_host=on_host)
    made = as_dtensor(local, whole.shape, layout, device_mesh)
    return nn.Parameter(made, requires_grad=whole.requires_grad)


def is_on_host(held: DTensor) -> bool:
    """Whether a parameter of a device lies in the memory of the host; where the two are one, none does."""
    return held.to_local().device.type != held.device_mesh.device_type


def piece_from_rank_zero(
    value: Tensor, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh, *, on_host: bool
) -> Tensor:
    """This rank's piece of rank 0's values, with storage of its own.

    Cut where the whole lies: rank 0 puts one piece after the other on its device, all ranks receive each, and those
    that it is not for take the next one into the same room. So no device holds more than two pieces, whatever the whole
    would take. It goes through devices also to hosts, as a group may have no other way. Room is taken before anything
    is sent; where there is none on one rank, all raise.
    """
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    cuts = _cuts(layout, mesh)
    here = tuple(index if len(cut) > 1 else 0 for cut, index in zip(cuts, coordinate, strict=True))

    def taken() -> tuple[Tensor, Tensor, Tensor]:
        mine = piece_of(value, layout, mesh, coordinate).to(device_of(device_mesh))
        if mine is value:
            mine = mine.clone()  # the user's model keeps its own values
        largest = part_of(value, layout, mesh, (0,) * len(cuts)).numel() if math.prod(map(len, cuts)) > 1 else 0
        return mine, mine.new_empty(largest), host_like(mine) if on_host and mine.is_cuda else mine

    mine, room, home = agreed(taken, device_mesh)
    if dist.get_world_size() > 1:
        for at in product(*cuts):
            part = part_of(value, layout, mesh, at)
            sent = mine if at == here else room.narrow(0, 0, part.numel()).view(part.shape)
            if at != here and dist.get_rank() == 0:
                sent.copy_(part)
            dist.broadcast(sent, src=0)
    return home if home is mine else home.copy_(mine)


def take_part(value: Tensor, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh) -> None:
    """What a rank does while others call `piece_from_rank_zero`, of a value of which it has no piece."""
    cuts = _cuts(layout, mesh)

    def taken() -> Tensor:
        largest = part_of(value, layout, mesh, (0,) * len(cuts)).numel()
        return torch.empty(largest, dtype=value.dtype, device=device_of(device_mesh))

    room = agreed(taken, device_mesh)
    for at in product(*cuts):
        part = part_of(value, layout, mesh, at)
        sent = room.narrow(0, 0, part.numel()).view(part.shape)
        if dist.get_rank() == 0:
            sent.copy_(part)
        dist.broadcast(sent, src=0)


def _cuts(layout: Layout, mesh: Mesh) -> list[range]:
    """Of each axis the places of different pieces."""
    return [
        range(size) if isinstance(one, plain.Shard) else range(1) for one, size in zip(layout, mesh.sizes, strict=True)
    ]


# In a hook: what is plain and stands beside a gradient is cut, for which no rank has to ask others for their pieces.
by_piece = ContextVar("by_piece", default=False)


def beside(value: Tensor, held: DTensor) -> Tensor:
    """A plain whole tensor as a DTensor lies that it is an operand of; a number as it is."""
    return piece_as(value.expand(held.shape), held) if value.ndim else value


def to_host(local: Tensor) -> Tensor:
    """The piece in memory of the host, from which a device can fetch it while it computes."""
    return host_like(local).copy_(local) if local.is_cuda else local


def local_of(parameter: Tensor) -> Tensor:
    """The piece that this rank holds, as it is: within an autograd function, which gives it its gradient."""
    assert not torch.is_grad_enabled(), "with gradients, DTensor.to_local has a gradient of its own"
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def gradient_of(parameter: Tensor, local: Tensor | None) -> Tensor | None:
    """A piece of a gradient as its parameter lies. Where the program leaves it strided, as products of transposed
    values are, it is copied, which autograd would do when it accumulates.
    """
    if local is None or not isinstance(parameter, DTensor):
        return local
    return piece_like(local.contiguous(), parameter)


def relaid(local: Tensor, shape: Sequence[int], before: Layout, after: Layout, device_mesh: DeviceMesh) -> Tensor:
    """A piece of a whole value of this shape in one layout -> this rank's piece in another."""
    if before == after:
        return local
    whole = as_dtensor(local, shape, before, device_mesh)
    return whole.redistribute(placements=placements_of(after)).to_local()


def from_rank_zero(value: Tensor, device_mesh: DeviceMesh) -> Tensor:
    """Rank 0's values, on this rank's device; where there is no memory for them on one rank, all raise."""
    if dist.get_world_size() == 1:
        return value.to(device_mesh.device_type).contiguous()
    sent = agreed(lambda: value.to(device_mesh.device_type).contiguous().clone(), device_mesh)
    dist.broadcast(sent, src=0)
    return sent


def as_layout_of(dense: Tensor, held: Tensor) -> Tensor:
    """The values in a tensor that is sparse where `held` is."""
    return dense if held.layout is torch.strided else dense.to_sparse(layout=held.layout)


def refuse_pieces_of_others(name: str, value: Any, held: Any) -> None:
    """Raises RuntimeError for a DTensor that came out of a file with the piece of the rank that has written it; `held`
    is the parameter that it is for.
    """
    if isinstance(held, DTensor) and isinstance(value, DTensor) and held.device_mesh is value.device_mesh:
        return  # no file brings the mesh of this process
    is_here = isinstance(held, DTensor) and not is_elsewhere(held)
    if is_here and isinstance(value, DTensor) and (is_elsewhere(value) or _is_empty(value)):
        raise RuntimeError(
            f"{name} has no elements here: it was saved by a rank of another pipeline stage, as torch.save writes what "
            "that rank holds, or is a copy of such a rank's state. Save or load parallel.full_state_dict(), let all "
            "ranks write with torch.distributed.checkpoint, or load behind the first call, on the same stages"
        )
    if not isinstance(value, DTensor) or not any(isinstance(placement, Shard) for placement in value.placements):
        return
    mesh = value.device_mesh
    here = [*np.argwhere(np.array(mesh.mesh.tolist()) == dist.get_rank()).flatten()]
    if mesh.size() <= dist.get_world_size() and list(mesh.get_coordinate() or ()) == here:
        return
    raise RuntimeError(
        f"{name} holds the piece of one rank among {mesh.size()}, and not of this one: torch.save of a state dict on "
        "one rank leaves out what the others have. Save parallel.full_state_dict() (for an optimizer, torch's "
        "get_optimizer_state_dict with full_state_dict=True), or let all ranks write with torch.distributed.checkpoint"
    )


def is_elsewhere(held: Any) -> bool:
    """Whether a tensor is one of another stage, of which this rank has no elements."""
    return isinstance(held, DTensor) and held.device_mesh.get_coordinate() is None


def _is_empty(value: DTensor) -> bool:
    whole = all(placement.is_replicate() for placement in value.placements)
    return whole and value.numel() > 0 and value.to_local().numel() == 0


def piece_as(value: Tensor, held: DTensor) -> DTensor:
    """A whole tensor as a DTensor laid out like `held`."""
    mesh, device_mesh = mesh_of(held.device_mesh), held.device_mesh
    layout, coordinate = layout_of(held), device_mesh.get_coordinate()
    if coordinate is None:  # of another stage
        nothing = torch.zeros_like(held.to_local(), dtype=value.dtype)
        return over_pieces(nothing, value.shape, held.placements, device_mesh)
    local = piece_of(value.detach(), layout, mesh, coordinate).to(held.to_local().device)
    return as_dtensor(local, value.shape, layout, device_mesh)


def is_whole(layout: Layout) -> bool:
    """Whether every rank holds all of a tensor in this layout."""
    return all(placement == plain.REPLICATE for placement in layout)


def layout_of(held: DTensor) -> Layout:
    """Our layout of a parameter (which is never partial)."""
    return tuple(
        plain.Shard(placement.dim) if isinstance(placement, Shard) else plain.REPLICATE for placement in held.placements
    )


def exchange(one: Tensor, other: Tensor) -> bool:
    """Let each hold what the other has held, in place, with no more memory: by exclusive or of their bytes. False where
    they do not lie in a row, or are of several kinds; then they are as they were.
    """
    if isinstance(one, DTensor) or isinstance(other, DTensor) or (one.dtype, one.device) != (other.dtype, other.device):
        return False
    if not (one.is_contiguous() and other.is_contiguous()):
        return False
    first, second = (tensor.view(-1).view(torch.uint8) for tensor in (one, other))
    first.bitwise_xor_(second)
    second.bitwise_xor_(first)
    first.bitwise_xor_(second)
    return True
