"""Tensors of a model that look at the memory of its parameters and buffers, and are none themselves.

    self.scale = self.layer.weight.data
    self.first = self.queue[:1]

A copy of a model has other parameters and buffers, of which such tensors know nothing. So in a copy each has a note of
what it looks at (`MARK`); a trace lets it be that look, at what is there in each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.ir.graph import Graph
from autopar.trace.modules import REGISTERED, tensors_by_name
from autopar.trace.sharing import Look, lies_somewhere, storage_of

MARK = "autopar_looks_at"  # an attribute of a tensor: (name, how it lies in the memory of what has that name)


def mark_looks(model: nn.Module, copy: nn.Module) -> None:
    """Note in a copy of a model what its tensors look at in the model.

    Raises ValueError where a parameter that trains, and something else that is registered, are two tensors in one
    memory: a copy would have two.
    """
    parameters, buffers = tensors_by_name(model)
    registered = {**parameters, **buffers}
    by_memory: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in registered.items():
        if lies_somewhere(tensor):
            by_memory.setdefault(storage_of(tensor), []).append((name, tensor))
    copies = {**dict(copy.named_parameters(remove_duplicate=False)), **dict(copy.named_buffers(remove_duplicate=False))}
    for name, tensor in registered.items():
        if (found := _looks_at(tensor, by_memory)) is None:
            continue
        (other, base), how = found
        if any(isinstance(one, nn.Parameter) and one.requires_grad for one in (tensor, base)):
            raise ValueError(
                f"{name} and {other} are two tensors in one memory (.data of one was set to that of the other, or "
                "registered), and would be two in the parallel module: tie them (a.weight = b.weight), or clone() one"
            )
        setattr(copies[name], MARK, (other, how))
    own_attributes = dict(_attributes(copy))
    for place, value in _attributes(model):
        leaves, own = pytree.tree_leaves(value), pytree.tree_leaves(own_attributes.get(place))
        for leaf, one in zip(leaves, own, strict=False):
            if not isinstance(leaf, Tensor) or one is leaf:
                continue
            _refuse_more_than_one(place, leaf, by_memory)
            if (found := _looks_at(leaf, by_memory)) is not None:
                (other, _), how = found
                setattr(one, MARK, (other, how))


def looks_in(model: nn.Module) -> dict[int, tuple[str, Look]]:
    """Id of each tensor that an attribute holds, and that looks at a parameter or buffer -> its name, and how."""
    leaves = (leaf for _, value in _attributes(model) for leaf in pytree.tree_leaves(value))
    return {id(leaf): getattr(leaf, MARK) for leaf in leaves if isinstance(leaf, Tensor) and hasattr(leaf, MARK)}


def as_looks(looks: Mapping[int, tuple[str, Look]], now: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Those tensors, of what is there now by these names."""
    made = {number: how.at(now[name]) for number, (name, how) in looks.items() if name in now}
    return {number: look for number, look in made.items() if look is not None}


def refuse_overlaps(model: nn.Module, graph: Graph) -> None:
    """Raise TraceError where forward writes to one of two buffers that were in one memory."""
    written = {result.target for result in graph.results if result.kind == "buffer"}
    for name, buffer in model.named_buffers():
        other, _ = getattr(buffer, MARK, ("", None))
        if other and written & {name, other}:
            raise TraceError(
                f"forward writes to one of {name} and {other}, which were in one memory, and are two buffers in the "
                f"parallel module: read {name} from {other} in forward, or clone() one"
            )


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in model.named_modules():
        for name, value in vars(part).items():
            if name not in REGISTERED and (isinstance(value, (Tensor, list, tuple, dict))):
                yield f"{path}.{name}", value


def _looks_at(
    tensor: Tensor, by_memory: Mapping[int, list[tuple[str, Tensor]]]
) -> tuple[tuple[str, Tensor], Look] | None:
    """The first other tensor, registered under a name, at whose memory this one looks."""
    if not lies_somewhere(tensor) or (there := by_memory.get(storage_of(tensor))) is None:
        return None
    for name, base in there:
        if tensor is base:
            return None
        if base.dtype == tensor.dtype and _is_within(tensor, base):
            offset = int(tensor.storage_offset()) - int(base.storage_offset())
            return (name, base), Look(tuple(tensor.shape), tensor.stride(), offset, base.stride())
    return None


def _refuse_more_than_one(place: str, tensor: Tensor, by_memory: Mapping[int, list[tuple[str, Tensor]]]) -> None:
    """Raise ValueError where a tensor has the memory of a parameter that trains, and more."""
    there = by_memory.get(storage_of(tensor), ()) if lies_somewhere(tensor) else ()
    for name, base in there:
        (first, behind), (begin, end) = _places(tensor), _places(base)
        trains = isinstance(base, nn.Parameter) and base.requires_grad and tensor is not base
        if trains and first < end and begin < behind and not _is_within(tensor, base):
            raise ValueError(
                f"self.{place.removeprefix('.')} has the memory of {name} in it, which the parallel module has "
                "elsewhere: make the parameter of a clone()"
            )


def _is_within(one: Tensor, other: Tensor) -> bool:
    (first, behind), (begin, end) = _places(one), _places(other)
    return begin <= first and behind <= end


def _places(tensor: Tensor) -> tuple[int, int]:
    """The first element in memory, and the one behind the last."""
    first = int(tensor.storage_offset())
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + reach + 1
