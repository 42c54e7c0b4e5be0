"""Numbers of parameters and gradients of all stages of a pipeline: what each rank has a part of, every rank gets whole.

Every rank has all parameters, and gradients of all, of no elements where they are of other stages. So what a script
computes of them by hand (a norm, a penalty, a step size that an optimizer finds) is asked for by all ranks alike, in
the same order, and each gets the number of the whole model; torch would give a rank what its own stage makes of it,
without a word. All ranks must ask, as for numbers of what is split.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar._compat import (
    distribute_tensors,
    dtensor_handlers,
    replace_distribute_tensors,
    replace_total_norm,
    total_norm,
)
from autopar.attach.foreach import mend_norms, without_terms
from autopar.attach.pipe import Pipe
from autopar.attach.tensors import device_of, is_elsewhere, over_pieces, whole_within
from autopar.ir.words import count_of

STACK = torch.ops.aten.stack.default
LARGER = (torch.ops.aten.maximum.default, torch.ops.aten.minimum.default)
_redistribute = DTensor.redistribute

# Of equal meshes the first one, in the order of compiles, and with the process group that it was made in. They are kept
# when their modules are gone: ranks collect garbage at different times, and all of them must find the same one.
_PIPES: list[tuple[Any, Pipe]] = []


def begin(pipe: Pipe) -> Pipe:
    """From now on numbers of this pipeline's parameters are of all its stages."""
    world = dist.group.WORLD
    _PIPES[:] = [(made_in, one) for made_in, one in _PIPES if made_in is world]  # else its groups are destroyed
    if not any(one.meshes == pipe.meshes for _, one in _PIPES):
        _PIPES.append((world, pipe))
    _mend()
    return pipe


@functools.cache
def _mend() -> None:
    """Once in a process."""
    mend_norms()
    dtensor_handlers.setdefault(STACK, _stacked)
    for op in LARGER:
        dtensor_handlers.setdefault(op, _larger)
    if DTensor.full_tensor is whole_within:
        DTensor.full_tensor = everywhere_whole  # type: ignore[method-assign]
    DTensor.redistribute = _whole_on_its_mesh  # type: ignore[method-assign]
    replace_distribute_tensors(_without_other_stages(distribute_tensors()))
    replace_total_norm(_over_stages(total_norm()))


def pipe_of(value: Any) -> Pipe | None:
    """The pipeline that a tensor is of. Equal meshes are one to torch, whichever module they were made for."""
    if not isinstance(value, DTensor) or not _PIPES:
        return None
    mesh: DeviceMesh = value.device_mesh
    return next((pipe for made_in, pipe in _PIPES if made_in is dist.group.WORLD and mesh in pipe.meshes), None)


def pipe_among(values: Iterable[Any]) -> Pipe | None:
    """That of the first tensor that is of one."""
    return next((pipe for value in values if (pipe := pipe_of(value)) is not None), None)


def everywhere(value: DTensor, pipe: Pipe, **kwargs: Any) -> Tensor:
    """The whole tensor, on every rank of the pipe, all of which ask. Gradients go to those that have a piece of it.
    `kwargs`: of `DTensor.full_tensor`.
    """
    if is_elsewhere(value):
        room = torch.zeros(value.shape, dtype=value.dtype, device=device_of(pipe.whole))
        return pipe.first_of(room, False)
    own = whole_within(value, **kwargs)
    pipe.first_of(own.detach().clone(), True)
    return own


@functools.wraps(whole_within)
def everywhere_whole(held: DTensor, **kwargs: Any) -> Tensor:
    """`DTensor.full_tensor`, on every rank of a pipeline, whichever stage it is of."""
    pipe = pipe_of(held)
    return whole_within(held, **kwargs) if pipe is None else everywhere(held, pipe, **kwargs)


@functools.wraps(_redistribute)
def _whole_on_its_mesh(
    held: DTensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Any] | None = None, **kwargs: Any
) -> DTensor:
    """What torch asks for where it puts state dicts together (`StateDictOptions(full_state_dict=True)`), and then takes
    the piece: of other stages, too, it is all of the tensor.
    """
    pipe = pipe_of(held) if device_mesh is not None and placements and all(map(_is_whole, placements)) else None
    if pipe is None or device_mesh != held.device_mesh:
        return _redistribute(held, device_mesh, placements, **kwargs)
    return over_pieces(everywhere(held, pipe), held.shape, placements or (), held.device_mesh)


def _is_whole(placement: Any) -> bool:
    return isinstance(placement, Replicate)


def _without_other_stages(put: Any) -> Any:
    """Whole values that are put into parameters: other stages' ranks take those of theirs."""

    @functools.wraps(put)
    def into(state: dict[str, Any], keys: Sequence[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            pair = state.get(key)
            if isinstance(pair, tuple) and pipe_of(pair[0]) is not None and is_elsewhere(pair[0]):
                state[key] = pair[0]  # as it is; what is no pair is passed over
        put(state, keys, *args, **kwargs)

    return into


def _stacked(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Numbers of any stages as one plain tensor."""
    (given, *dim) = args
    if all(one.ndim == 0 for one in given) and pipe_among(given) is not None:
        return op([*map(_everywhere_plain, given)], *dim, **kwargs)
    return torch.cat([one.unsqueeze(*dim or (0,)) for one in given], *dim)


def _larger(op: Any, args: tuple[Tensor, Tensor], kwargs: dict[str, Any]) -> Tensor:
    """The larger of two numbers of any stages, or the smaller; of others, piece by piece where they lie alike."""
    one, other = args
    if isinstance(one, DTensor) and isinstance(other, DTensor) and one.ndim and _lie_alike(one, other):
        made = op(one.to_local(), other.to_local(), **kwargs)
        return over_pieces(made, one.shape, one.placements, one.device_mesh)
    return op(*map(_everywhere_plain, args), **kwargs)


def _lie_alike(one: DTensor, other: DTensor) -> bool:
    """Whether ranks hold the same pieces of both, and no terms."""
    return one._spec == other._spec and not any(place.is_partial() for place in one.placements)


def _everywhere_plain(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


# --- norms -----------------------------------------------------------------------------------------------------------


def _over_stages(plain: Any) -> Any:
    @functools.wraps(plain)
    def norm_of(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        pipe = pipe_among(given)
        if pipe is None:
            return plain(given, norm_type, error_if_nonfinite, foreach)
        with torch.no_grad():
            norm = torch.linalg.vector_norm(_norms(given, float(norm_type), pipe), norm_type)
            norm = norm.to(max((one.dtype for one in given), key=lambda dtype: torch.finfo(dtype).bits))
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. To disable "
                "this error and scale the gradients by the non-finite norm anyway, set error_if_nonfinite=False"
            )
        return norm

    return norm_of


def _norms(given: Sequence[Tensor], p: float, pipe: Pipe) -> Tensor:
    """The norm of each tensor, in float64, the same on all ranks. What several stages hold is taken where it is first.

    Of a piece |x|_p ** p, or the largest; these are put together within a place, then over places.
    """
    if p < 0:
        raise ValueError(f"the norm of order {p:g} of gradients in pipeline stages is not built; use one from 0 to inf")
    pipe.together(f"norms of {count_of(len(given), 'gradient')}")
    found = torch.zeros(2, len(given), dtype=torch.float64, device=device_of(pipe.whole))  # norms; which are here
    pieces: dict[int, Tensor] = {}
    for number, one in enumerate(given):
        if isinstance(one, DTensor):
            if (coordinate := one.device_mesh.get_coordinate()) is None:
                continue
            one = without_terms(one)
            repeats = any(at for at, place in zip(coordinate, one.placements, strict=True) if place.is_replicate())
            one = one.to_local()
        else:
            repeats = pipe.rank_within > 0
        found[1, number] = 1.0
        if one.numel() and not repeats:
            pieces[number] = one.detach()
    if pieces:
        norms = torch.stack([norm.double() for norm in torch.ops.aten._foreach_norm.Scalar([*pieces.values()], p)])
        found[0, [*pieces]] = norms if p in (0.0, float("inf")) else norms**p
    together = dist.ReduceOp.MAX if p == float("inf") else dist.ReduceOp.SUM
    for axis in range(pipe.here.ndim):
        norms = found[0].clone()
        dist.all_reduce(norms, together, group=pipe.here.get_group(axis))
        found[0] = norms
    if p not in (0.0, float("inf")):
        found[0] **= 1.0 / p
    places = [torch.empty_like(found) for _ in pipe.meshes]
    dist.all_gather(places, found, group=pipe.group)
    total = torch.zeros_like(found[0])
    for norms, is_here in reversed(places):
        total = torch.where(is_here > 0, norms, total)
    return total
