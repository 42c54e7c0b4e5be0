"""Writes at places that forward counts: `self.queue[:, ptr:ptr + n] = keys.T`, `self.bank[self.step % 8] = h`.

Where a slice begins is a tensor of the program; how long it is has to be known, and is asked before each call. So a
ring that is filled turn by turn needs one program, and another one where its end is met. What is read at such a place
is a look at the same memory, to which forward may write: that is at a number of Python's, with a program for each.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from autopar._compat import pytree
from autopar.trace.formulas import Counted, computed, is_large
from autopar.trace.numbers import MADE, Number


def with_counted_places(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `x[index] = y`, with a tensor in the place of the one number or slice in it that is counted; of
    other indices such numbers are Python's. Lists of numbers of each call are tensors, and such numbers where something
    is written.
    """
    name = getattr(func, "__name__", "")
    if name not in ("__getitem__", "__setitem__") or not isinstance(args[0], Tensor):
        return args
    if name == "__setitem__" and (found := _with_a_tensor(args)) is not None:
        return found
    index = pytree.tree_map(lambda part: part.pinned() if type(part) is Counted else part, args[1])
    parts = index if isinstance(index, tuple) else (index,)
    if name == "__setitem__":
        places = [place for place, part in enumerate(parts) if type(part) is Number and type(part.like) is int]
        made = {
            place: parts[place].tensor.reshape([1] * (len(places) > 1)) for place in places
        }  # torch looks at several
        parts = tuple(made.get(place, part) for place, part in enumerate(parts))
    parts = tuple(map(_of_list, parts))
    return args[0], parts if isinstance(index, tuple) else parts[0], *args[2:]


def _of_list(part: Any) -> Any:
    """A list of numbers of each call, as a tensor: what is picked by either is a copy."""
    if not isinstance(part, list) or not any(type(one) is Number for one in part):
        return part
    if not all(type(one.like if isinstance(one, Number) else one) is int for one in part):
        return part
    return MADE["tensor"](part)


def _with_a_tensor(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    parts = args[1] if isinstance(args[1], tuple) else (args[1],)
    counted = [place for place, part in enumerate(parts) if _is_number(part) or _is_slice(part)]
    if len(counted) != 1 or not all(_is_plain(part) for place, part in enumerate(parts) if place not in counted):
        return None
    (place,) = counted
    if Ellipsis in parts[:place]:
        dim = args[0].ndim - sum(part is not None for part in parts[place:])
    else:
        dim = sum(part is not None for part in parts[:place])
    if dim not in range(args[0].ndim):
        return None
    part, size, device = parts[place], args[0].shape[dim], args[0].device
    made = _of_slice(part, size, device) if isinstance(part, slice) else _of_number(part, size)
    value = args[2].as_given() if isinstance(args[2], Number) else args[2]
    value = value.tensor.to(args[0].dtype) if isinstance(value, Number) else value
    return args[0], (*parts[:place], made, *parts[place + 1 :]), value


def _is_number(part: Any) -> TypeGuard[Counted]:
    """Whether it is an integer that a program computes."""
    return type(part) is Counted and type(part.now) is int and part.made is not None and not is_large(part.now)


def _is_slice(part: Any) -> TypeGuard[slice]:
    ends = (part.start, part.stop) if isinstance(part, slice) and part.step in (None, 1) else ()
    return any(map(_is_number, ends)) and all(_is_number(end) or type(end) in (int, type(None)) for end in ends)


def _is_plain(part: Any) -> bool:
    ends = (part.start, part.stop, part.step) if isinstance(part, slice) else (part,)
    return all(end is None or end is Ellipsis or type(end) is int for end in ends)


def _of_number(part: Counted, size: int) -> Any:
    is_there = bool(part.of_two("ge", 0)) and bool(part.of_two("lt", size))
    return part.tensor if is_there else part.pinned()  # counted from the end, or an IndexError


def _of_slice(part: slice, size: int, device: torch.device) -> Any:
    ends = part.start, part.stop
    width = computed(lambda *ends: len(range(*slice(*ends).indices(size))), ends, None).pinned()
    if _is_number(part.start) and bool(part.start.of_two("ge", 0)):
        return part.start.tensor.to(device) + torch.arange(width, device=device)
    begin = computed(lambda *ends: slice(*ends).indices(size)[0], ends, None).pinned()
    return slice(begin, begin + width)
