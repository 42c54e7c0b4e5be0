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
from torch.distributed.tensor import DTensor, Partial, Shard

from autopar._compat import dtensor_handlers
from autopar.attach.tensors import is_elsewhere, over_pieces, whole_within

REDUCE = ("norm", "max", "powsum")  # give numbers, and not lists of what they take
LISTS = ("_foreach_", "_fused_")
NORMS = torch.ops.aten._foreach_norm.Scalar


@functools.cache
def mend_lists() -> None:
    """From now on such operators do each rank's pieces, whatever stages they are of."""
    for op in _operators():
        dtensor_handlers.setdefault(op, _on_pieces)


def mend_norms() -> None:
    """From now on norms of a list are of each by itself, on its own mesh."""
    dtensor_handlers.setdefault(NORMS, _norms)


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
    first = cast("list[Any]", args[0])
    pieces = [_piece(one, None) for one in first]

    def local(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in cast("list[Any]", value)):
            pairs = [*zip(cast("list[Any]", value), first, strict=True)]
            for one, like in pairs:
                _check_alike(one, like, op)
            return [_piece(one, like) for one, like in pairs]
        return whole_within(value) if isinstance(value, DTensor) else value

    made = op(pieces, *map(local, args[1:]), **{key: local(value) for key, value in kwargs.items()})
    if made is None or op._schema.is_mutable:
        return None if made is None else first
    return [
        over_pieces(one, like.shape, like.placements, like.device_mesh) if isinstance(like, DTensor) else one
        for one, like in zip(made, first, strict=True)
    ]


def _check_alike(one: Any, other: Any, op: Any) -> None:
    """A whole tensor beside a piece of another would be another operator, without a word where one of them has a dim of
    size 1.
    """
    for piece, whole in ((one, other), (other, one)):
        if not isinstance(piece, DTensor) or not isinstance(whole, torch.Tensor) or isinstance(whole, DTensor):
            continue
        if whole.ndim and (is_elsewhere(piece) or any(isinstance(where, Shard) for where in piece.placements)):
            told = f"{op} got mixed torch.Tensor {[*whole.shape]} and DTensor {[*piece.shape]}"
            raise RuntimeError(f"{told}, of which each rank has a piece")


def _piece(held: Any, like: Any) -> Any:
    """This rank's piece of one of the list, laid out as its counterpart in the first list."""
    if not isinstance(held, DTensor):
        return held
    placements = (like if isinstance(like, DTensor) else held).placements
    if any(isinstance(one, Partial) for one in placements):
        raise RuntimeError(
            f"an operator on lists takes terms of a sum (a tensor {list(held.shape)}, {held.placements}); call "
            ".full_tensor() first"
        )
    return (held if held.placements == placements else held.redistribute(placements=placements)).to_local()
