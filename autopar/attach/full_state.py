"""The state of a parallel module as whole tensors, in the names of the user's model: what that model loads, and what is
loaded from rank 0 alone.

One tensor after the other, and each piece by piece: a rank that does not keep the whole tensors holds one piece at a
time beside its own.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar.attach.agree import agreed, text_from
from autopar.attach.tensors import as_layout_of, layout_of, mesh_of, part_of, piece_as
from autopar.ir.layout import local_shape


def full_state(
    state: Mapping[str, Any], device_mesh: DeviceMesh, *, keep: bool, holders: Mapping[str, DeviceMesh] | None = None
) -> dict[str, Any]:
    """A state dict whose tensors are whole and on the host, copies of what they are now; {} where `keep` is false.
    `holders`: of a pipeline, the mesh of the stage from which each parameter is taken.

    All ranks have to call it, with the state dict that each of them has. What is one tensor under several names is one
    tensor under them again. Raises RuntimeError for a tensor without values, before anything is sent.
    """
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise RuntimeError(
                f"{name} is on the meta device and has no values to gather: call to_empty(device=...) on the parallel "
                "module, then load or initialise it"
            )
    made: OrderedDict[str, Any] = OrderedDict()
    wholes: dict[Any, Tensor | None] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            held_by = (holders or {}).get(name)
            key = (_memory_of(value) if held_by is None else None) or name
            if key not in wholes and held_by is not None and isinstance(value, DTensor):
                wholes[key] = _put_together(cast(DTensor, value.detach()), held_by, keep=keep)
            elif key not in wholes:
                wholes[key] = whole_on_host(value.detach(), device_mesh, keep=keep)
            value = wholes[key]
        if keep:
            made[name] = value
    if keep and hasattr(state, "_metadata"):
        made._metadata = state._metadata  # type: ignore[attr-defined]  # versions of modules, which loading asks for
    return made


def whole_on_host(held: Tensor, device_mesh: DeviceMesh, *, keep: bool) -> Tensor | None:
    """A copy of all of a tensor in memory of the host, None where `keep` is false. All ranks have to call it for a
    DTensor, whose pieces are sent over its mesh's devices, wherever they lie.
    """
    if not isinstance(held, DTensor):
        return held.to("cpu", copy=True) if keep else None
    if not any(isinstance(placement, Shard) for placement in held.placements):
        return held.to_local().to("cpu", copy=True) if keep else None
    return _put_together(held, device_mesh, keep=keep)


def _put_together(held: DTensor, device_mesh: DeviceMesh, *, keep: bool) -> Tensor | None:
    """`device_mesh`: whose ranks send their pieces, to all others."""
    layout, mesh, local = layout_of(held), mesh_of(device_mesh), held.to_local()
    shape = local_shape(tuple(held.shape), layout, mesh)
    assert shape is not None
    if device_mesh.get_coordinate() is None:
        local = torch.empty(shape, dtype=held.dtype)
    assert shape == tuple(local.shape), f"pieces of {list(held.shape)} are not even: {shape}, {list(local.shape)}"
    whole = torch.empty(held.shape, dtype=held.dtype, device="cpu") if keep else None
    splits = [isinstance(placement, Shard) for placement in held.placements]
    for coordinate in product(*(range(size if split else 1) for size, split in zip(mesh.sizes, splits, strict=True))):
        piece = _sent(local, _rank_at(coordinate, device_mesh), device_mesh)
        if whole is not None:
            part_of(whole, layout, mesh, coordinate).copy_(piece)
        del piece  # before the next one is received
    return whole


def _rank_at(coordinate: Sequence[int], device_mesh: DeviceMesh) -> int:
    found: Any = device_mesh.mesh.tolist()
    for index in coordinate:
        found = found[index]
    return found


def _sent(local: Tensor, owner: int, device_mesh: DeviceMesh) -> Tensor:
    """The local tensor of rank `owner` on the device of every rank."""
    if dist.get_rank() == owner:
        piece = local.to(device_mesh.device_type).contiguous()
    else:
        piece = torch.empty(local.shape, dtype=local.dtype, device=device_mesh.device_type)
    dist.broadcast(piece, src=owner)
    return piece


def _memory_of(value: Tensor) -> Any:
    """What two names of one tensor have in common; None for a tensor without elements, or memory of its own."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if not local.numel() or local.layout is not torch.strided:
        return None
    return local.data_ptr(), tuple(local.shape), local.stride(), local.dtype


# --- from rank 0 alone -----------------------------------------------------------------------------------------------


def received_state(
    given: Mapping[str, Any] | None, held: Mapping[str, Any], device_mesh: DeviceMesh
) -> OrderedDict[str, Any]:
    """Rank 0's state dict `given` on every rank (what others give is not read), for a module whose own is `held`: of a
    tensor that is split there, each rank gets its piece. All ranks have to call it.

    A rank holds one whole tensor at a time; names that `held` does not have, and other shapes than it has, stay whole.
    Raises ValueError on all ranks for what cannot be sent.
    """
    is_zero = dist.get_rank() == 0
    told = agreed(lambda: _header(given) if is_zero else None, device_mesh)
    header = json.loads(text_from(0, told, device_mesh))
    made: OrderedDict[str, Any] = OrderedDict()
    for name, shape, dtype in header["tensors"]:
        whole = torch.empty(shape, dtype=getattr(torch, dtype), device=device_mesh.device_type)
        if is_zero:
            assert given is not None
            whole.copy_(given[name].to_dense())
        dist.broadcast(whole, src=0)
        own = held.get(name)
        if isinstance(own, DTensor) and own.shape == whole.shape:
            made[name] = piece_as(whole, own)
        else:
            made[name] = as_layout_of(whole, own) if isinstance(own, Tensor) else whole
        del whole
    if header["metadata"] is not None:
        made._metadata = OrderedDict(header["metadata"])  # type: ignore[attr-defined]
    return made


def _header(given: Mapping[str, Any] | None) -> str:
    """Names, shapes and dtypes of what follows, as text: nothing is pickled."""
    if given is None:
        raise ValueError("rank 0 gave no state dict: load_full_state_dict sends the one that rank 0 has to all others")
    metadata = getattr(given, "_metadata", None)
    return json.dumps({"tensors": list(_described(given)), "metadata": metadata})


def _described(given: Mapping[str, Any]) -> Iterator[tuple[str, list[int], str]]:
    for name, value in given.items():
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.is_meta:
            kind = "a DTensor" if isinstance(value, DTensor) else f"a {type(value).__name__}"
            kind = "on the meta device" if isinstance(value, Tensor) and value.is_meta else kind
            raise ValueError(
                f"{name} of the state dict is {kind}, and load_full_state_dict sends whole tensors only; give every "
                "rank the state dict and call load_state_dict"
            )
        yield name, list(value.shape), str(cast(Tensor, value).dtype).removeprefix("torch.")
