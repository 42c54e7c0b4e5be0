"""Functions of torch that take the size of what they give out of values: where these are known of arguments
(`autopar.trace.asked`), that size is said with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar._compat import pytree
from autopar.trace.places import is_mask

REPEATS = (torch.repeat_interleave, Tensor.repeat_interleave)
COUNTING = (torch.bincount, Tensor.bincount)
X_OF_MASK = (
    "rows that a boolean mask picks are understood where each is treated by itself, and summed or averaged: write "
    "x[mask]"
)
A_SIZE = "take sizes from shapes, or pass them as numbers of Python's"
OF_MASKS = ("__getitem__", "__setitem__", "nonzero", "argwhere", "where", "masked_select", "index_put_")
INSTEAD = {  # function -> what to write in its place
    "repeat_interleave": "say how long it becomes: output_size=, the sum of the repeats",
    "bincount": "say how many counts it gives: minlength=, more than the largest number",
}
SIZED_BY_VALUES = (*REPEATS, *COUNTING, functional.one_hot)

_INTEGERS_BEHIND_THE_FIRST = """
    interpolate roll chunk topk one_hot tril triu select unfold diagonal movedim transpose kthvalue rot90 flip fold
    avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d pixel_shuffle unflatten diag
"""
_INTEGERS_ALONE = "eye randint randperm hann_window hamming_window blackman_window bartlett_window kaiser_window"
# Functions that take integers, for which they also take tensors without dims: name -> from which place up to which.
INTEGERS = {
    **dict.fromkeys(_INTEGERS_BEHIND_THE_FIRST.split(), slice(1, None)),
    **dict.fromkeys(_INTEGERS_ALONE.split(), slice(None)),
    **{"full": slice(0, 1), "new_full": slice(1, 2), "linspace": slice(2, 3), "logspace": slice(2, 3)},
}
NO_INTEGERS = ("input", "fill_value", "start", "end", "out")  # among named ones


def takes_sizes(func: Any) -> bool:
    """Whether `with_sizes` has something to say of that function."""
    return func in SIZED_BY_VALUES or _integers_of(func) is not None


def with_sizes(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], of_arguments: Callable[[Tensor], Any]
) -> tuple[Any, dict[str, Any]]:
    """The arguments of `func` with numbers where it takes integers and is given tensors without dims, and with how much
    it gives among them. `of_arguments`: as `Origins.answer`.
    """
    if (places := _integers_of(func)) is not None:
        args, kwargs = _with_integers(places, args, kwargs, of_arguments)
    return _with_size(func, args, kwargs, of_arguments) if func in SIZED_BY_VALUES else (args, kwargs)


def _integers_of(func: Any) -> slice | None:
    return INTEGERS.get(getattr(func, "__name__", "").rstrip("_"))


def _with_integers(
    places: slice, args: Sequence[Any], kwargs: dict[str, Any], of_arguments: Callable[[Tensor], Any]
) -> tuple[Any, dict[str, Any]]:
    def known(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim or value.dtype == torch.bool:
            return value
        return value if (number := of_arguments(value)) is None else number

    begin, end, _ = places.indices(len(args))
    taken = pytree.tree_map(known, tuple(args[begin:end]))
    named = {name: one if name in NO_INTEGERS else pytree.tree_map(known, one) for name, one in kwargs.items()}
    return (*args[:begin], *taken, *args[end:]), named


def _with_size(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], of_arguments: Callable[[Tensor], Any]
) -> tuple[Any, dict[str, Any]]:
    if func in REPEATS and kwargs.get("output_size") is None and len(args) < 4:
        repeats = kwargs.get("repeats", args[min(1, len(args) - 1)])  # of one argument, it is the repeats themselves
        is_each = isinstance(repeats, Tensor) and (repeats.numel() > 1 or repeats is args[0])
        if is_each and (total := of_arguments(repeats.sum())) is not None:
            return args, {**kwargs, "output_size": total}
        if not is_each and isinstance(repeats, Tensor) and (each := of_arguments(repeats.sum())) is not None:
            others = args[2:] if "repeats" not in kwargs else args[1:]
            return (args[0], each, *others), {name: one for name, one in kwargs.items() if name != "repeats"}
    is_open = func in COUNTING and not kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    if is_open and args[0].numel() and (largest := of_arguments(args[0].max())) is not None:
        return args[:2], {**kwargs, "minlength": largest + 1}
    if func is functional.one_hot and kwargs.get("num_classes", args[1] if len(args) > 1 else -1) == -1:
        largest = of_arguments(args[0].max())
        return (args, kwargs) if largest is None else (args[:1], {**kwargs, "num_classes": largest + 1})
    return args, kwargs


def of_values(func: Any) -> str:
    """What to say where the shape of what it gives hangs on values; the line goes in between."""
    name = getattr(func, "__name__", str(func))
    instead = INSTEAD.get(name, X_OF_MASK if name in OF_MASKS else A_SIZE)
    return f"the shape of what {name.lstrip('_')} gives depends on values{{}}, and a program has one shape; {instead}"


def counted_now(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Callable[[Tensor], Any]], Any] | None:
    """What gives what `func` gives where that hangs on how many of a mask are true, or on how many values differ; it
    is given `of_arguments`, and gives None where that does not know. None: it is another function.
    """
    name = getattr(func, "__name__", "").strip("_")
    match name:
        case "getitem" | "setitem" if isinstance(args[0], Tensor) and any(map(is_mask, _parts(args[1]))):
            return lambda known: _at_masks(func, args, known)
        case "nonzero" | "argwhere" | "where" if len(args) == 1 and isinstance(args[0], Tensor):
            is_stacked = name != "where" and not kwargs.get("as_tuple")
            return lambda known: _nonzero(args[0], is_stacked, known)
        case "masked_select":
            picked = torch.broadcast_tensors(args[0], args[1] if len(args) > 1 else kwargs["mask"])
            return lambda known: _at_masks(Tensor.__getitem__, picked, known)
        case "unique" | "unique_consecutive" if kwargs.get("dim") is None and len(args) == 1:
            return lambda known: _unique(args[0], name == "unique", kwargs, known)
        case _:
            return None


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _places(mask: Tensor, of_arguments: Callable[[Tensor], Any]) -> list[Tensor] | None:
    """Where it is true: an index for each of its dims."""
    is_there = (mask != 0).flatten()
    if (number := of_arguments(is_there.sum())) is None:
        return None
    left = is_there.logical_not().to(torch.int8).argsort(stable=True)[:number]
    found = list[Tensor]()
    for size in reversed(mask.shape):
        found.insert(0, left % size)
        left = left // size
    return found


def _at_masks(func: Any, args: tuple[Any, ...], of_arguments: Callable[[Tensor], Any]) -> Any:
    """`x[.., mask, ..]`, or a write there."""
    index = list[Any]()
    for part in _parts(args[1]):
        places = _places(part, of_arguments) if is_mask(part) else [part]
        if places is None:
            return None
        index += places
    made = func(args[0], tuple(index), *args[2:])
    return args[0] if made is None else made


def _nonzero(tensor: Tensor, is_stacked: bool, of_arguments: Callable[[Tensor], Any]) -> Any:
    places = _places(tensor, of_arguments)
    return places if places is None else torch.stack(places, 1) if is_stacked else tuple(places)


def _unique(values: Tensor, is_sorted: bool, options: dict[str, Any], of_arguments: Callable[[Tensor], Any]) -> Any:
    if values.is_floating_point() and len(options) > options.get("sorted", 0):  # NaNs are all apart
        return None
    values = values.detach()
    given, values = values.dtype, values.byte() if values.dtype == torch.bool else values
    flat = values.flatten()
    flat = flat.sort()[0] if is_sorted else flat
    is_first = torch.cat([torch.ones_like(flat[:1], dtype=torch.bool), flat[1:] != flat[:-1]])
    places = _places(is_first, of_arguments)
    if places is None:
        return None
    found: list[Tensor] = [flat[places[0]].to(given)]
    run = is_first.cumsum(0) - 1
    if options.get("return_inverse"):
        found.append(torch.searchsorted(flat[places[0]], values) if is_sorted else run.reshape(values.shape))
    if options.get("return_counts"):
        found.append(torch.zeros_like(places[0]).index_add(0, run, torch.ones_like(run)))
    return found[0] if len(found) == 1 else tuple(found)
