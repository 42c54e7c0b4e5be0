"""Lists of parameters in torch's operators on lists (`torch._foreach_*`), of all stages where there are some.

DTensors have no rule for some of them (`copy_`, `maximum`, `addcdiv` with numbers: optimizers beyond torch's own). And
torch takes the mesh of the first DTensor of a list for that of all, and where this rank is not in it, it does nothing
for the whole list: an average of weights would leave out every stage but the first parameter's. These operators work
element by element, so each rank does them to the pieces that it holds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autopar._compat import dtensor_handlers, replace_total_norm, total_norm
from autopar.attach.tensors import is_elsewhere, piece_like, whole_within

REDUCE = ("norm", "max", "powsum")  # give numbers, and not lists of what they take
LISTS = ("_foreach_", "_fused_adam", "_fused_adagrad", "_fused_sgd")
NORMS = torch.ops.aten._foreach_norm.Scalar


@functools.cache
def mend_lists() -> None:
    """From now on such operators do each rank's pieces, whatever stages they are of."""
    for op in _operators():
        dtensor_handlers.setdefault(op, _on_pieces)


def mend_norms() -> None:
    """From now on norms of a list are of each by itself, on its own mesh."""
    dtensor_handlers.setdefault(NORMS, _norms)


@functools.cache
def mend_total_norm() -> None:
    """From now on clipping takes plain gradients beside pieces: a parallel module may be part of what is trained."""
    replace_total_norm(_of_both(total_norm()))


def _of_both(plain: Any) -> Any:
    @functools.wraps(plain)
    def norm_of(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        pieces = [one for one in given if isinstance(one, DTensor)]
        if 0 < len(pieces) < len(given):
            others = [one for one in given if not isinstance(one, DTensor)]
            given = [
                plain(pieces, norm_type, False, foreach).full_tensor(), plain(others, norm_type, False, foreach)
            ]  # fmt: skip
        return plain(given, norm_type, error_if_nonfinite, foreach)

    return norm_of


def _operators() -> Iterator[Any]:
    for name in dir(torch):  # `dir(torch.ops.aten)` has only those that somebody used before
        kind = name.removeprefix("_foreach_").rstrip("_")
        if name.startswith(LISTS) and kind not in REDUCE:
            packet = getattr(torch.ops.aten, name)
            found = (getattr(packet, overload) for overload in packet.overloads() if "out" not in overload)
            yield from (op for op in found if _takes_lists(op))


def _takes_lists(op: Any) -> bool:
    """A list of tensors first: optimizers' fused steps among what is called fused."""
    return isinstance(op._schema.arguments[0].type, torch.ListType)


def _norms(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Of each by itself, on its own mesh."""
    given = dict(zip(("self", "ord", "dtype"), args, strict=False)) | kwargs
    return [torch.linalg.vector_norm(one, given.get("ord", 2), dtype=given.get("dtype")) for one in given["self"]]


def _on_pieces(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first, changes = cast("list[Any]", args[0]), op._schema.is_mutable
    if not changes:
        first = [without_terms(one) for one in first]
    elif any(terms_in(one) for one in first):
        raise RuntimeError(f"{op} would write to a DTensor whose ranks hold terms of a sum; call .full_tensor() first")

    def local(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in cast("list[Any]", value)):
            return [_piece(one, like, op) for one, like in zip(cast("list[Any]", value), first, strict=True)]
        return whole_within(value) if isinstance(value, DTensor) else value

    pieces = [one._local_tensor if isinstance(one, DTensor) else one for one in first]
    made = op(pieces, *map(local, args[1:]), **{key: local(value) for key, value in kwargs.items()})
    if made is None or changes:
        return None if made is None else first
    return [piece_like(one, like) if isinstance(like, DTensor) else one for one, like in zip(made, first, strict=True)]


def terms_in(held: Any) -> bool:
    """Asked of every tensor of a list at each step, so that no generator is made for each."""
    if isinstance(held, DTensor):
        for one in held._spec.placements:
            if isinstance(one, Partial):
                return True
    return False


def without_terms(held: Any) -> Any:
    """Put together, where ranks hold terms of it."""
    if not terms_in(held):
        return held
    return held.redistribute(placements=[Replicate() if isinstance(one, Partial) else one for one in held.placements])


def _piece(held: Any, like: Any, op: Any) -> Any:
    """This rank's piece of one of a list, as it belongs to its counterpart in the first list. A whole tensor beside a
    piece of another is refused: it would be another operator, without a word where one of them has a dim of size 1.
    """
    if isinstance(held, DTensor) and isinstance(like, DTensor):  # of optimizers nearly always, and lying alike
        ours, theirs = held._spec, like._spec
        if ours.placements == theirs.placements and ours.shape == theirs.shape:
            return held._local_tensor
    if not isinstance(held, torch.Tensor):
        return held
    if not isinstance(held, DTensor) or not isinstance(like, DTensor):
        piece, whole = (held, like) if isinstance(held, DTensor) else (like, held)
        if isinstance(piece, DTensor) and (whole.ndim or whole is like) and (is_elsewhere(piece) or _is_split(piece)):
            told = f"{op} got mixed torch.Tensor {[*whole.shape]} and DTensor {[*piece.shape]}"
            raise RuntimeError(f"{told}, of which each rank has a piece")
        return without_terms(held).to_local() if isinstance(held, DTensor) else held
    more = like.ndim - held.ndim
    if more < 0 or any(size not in (1, like.shape[more + dim]) for dim, size in enumerate(held.shape)):
        raise RuntimeError(f"{op} got DTensor {[*held.shape]} beside DTensor {[*like.shape]} in its first list")
    wanted = [
        Shard(one.dim - more)
        if isinstance(one, Shard) and one.dim >= more and held.shape[one.dim - more] == like.shape[one.dim]
        else Replicate()
        for one in like.placements
    ]
    return held.redistribute(placements=wanted).to_local()


def _is_split(held: DTensor) -> bool:
    return any(isinstance(one, Shard) for one in held.placements)
