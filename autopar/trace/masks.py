"""Masks of transformers that say no more than "causal" or "everything" are left out, as the library itself does outside
of a trace: no kernel of attention that takes a mask is as quick as one that takes none, and a mask of sequence x
sequence hides that half of the work is not there.

The library asks for masks through a table (`AttentionMaskInterface`), whose entry for scaled_dot_product_attention is
another one while a model is captured. It never leaves a mask out in a trace, as what it traces may meet other lengths;
a program meets the lengths of its inputs only.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.trace.origins import memory_of, writes_in_place

MODULE, ENTRIES = "transformers.masking_utils", ("sdpa", "eager")
# Functions that keep numbers rising by one along the last dim, where nothing but their shape is changed.
SHAPING = ["unsqueeze", "expand", "expand_as", "repeat", "view", "reshape", "to", "long", "int", "contiguous", "detach"]
WHOLE = (torch.int64, torch.int32)
NOTE = (
    "a padding mask (attention_mask) reaches attention, which reads a mask of {0} x {1} and computes what it hides; "
    "leave it out where nothing is padded"
)
PACKED = (
    "positions (position_ids) that may tell of packed sequences reach attention, which reads a mask of {0} x {1} and "
    "computes what it hides; leave them out where each sequence has its own row"
)

UNPACKED = (
    "positions (position_ids) reach a model with a key/value cache (config.use_cache), with which transformers looks "
    "for no packed sequences: set use_cache to False if they are packed"
)


class _Positions(TorchFunctionMode):
    """Sees which tensors hold the numbers of positions, one after the other, in each row, and which ones alone, as
    models make a padding mask of where they are given none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, Tensor] = {}
        self._ones: dict[int, Tensor] = {}

    def are(self, tensor: Tensor) -> bool:
        return id(tensor) in self._held

    def are_ones(self, tensor: Tensor) -> bool:
        return id(tensor) in self._ones

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = str(getattr(func, "__name__", ""))
        if writes_in_place(name, kwargs):
            written = [one for one in (*args[:1], kwargs.get("out")) if isinstance(one, Tensor)]
            if any(not one.is_floating_point() for one in written):  # perhaps through a view of one of them
                self._held.clear()
            others = {memory_of(one) for one in written}  # None: nobody knows which
            here = {key: one for key, one in self._ones.items() if memory_of(one) not in others}
            self._ones = {} if None in others else here
        elif isinstance(result, Tensor) and self._is_of_ones(name, args) and memory_of(result) is not None:
            self._ones[id(result)] = result
        elif isinstance(result, Tensor) and result.dtype in WHOLE and self._goes_on(name, args, kwargs, result):
            self._held[id(result)] = result
        return result

    def _is_of_ones(self, name: str, args: Any) -> bool:
        if name in ("ones", "new_ones", "ones_like"):
            return True
        looks = name in (*SHAPING, "bool", "float") or (name == "__getitem__" and not _tensors(args[1]))
        return looks and isinstance(args[0], Tensor) and self.are_ones(args[0])

    def _goes_on(self, name: str, args: Any, kwargs: Any, result: Tensor) -> bool:
        if name == "arange":
            step = kwargs.get("step", args[2] if len(args) > 2 else 1)
            return step == 1
        known = [arg for arg in args if isinstance(arg, Tensor) and self.are(arg)]
        if name.strip("_") in ("add", "radd"):
            others = [arg for arg in args if not (isinstance(arg, Tensor) and self.are(arg))]
            return len(known) == 1 and all(isinstance(arg, int) for arg in others) and not kwargs
        if name == "__getitem__":
            return bool(known) and all(part is None or part == slice(None) for part in _parts(args[1]))
        same_rows = bool(known) and result.dim() > 0 and result.shape[-1] == known[0].shape[-1]
        return name in SHAPING and same_rows


def _tensors(index: Any) -> bool:
    return any(isinstance(part, Tensor) for part in _parts(index))


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


@contextlib.contextmanager
def masks_left_out(notes: list[str], caches: bool = False) -> Iterator[None]:
    """Within it transformers makes no mask that attention knows by itself. `notes`: told there of masks that remain.
    `caches`: the model would have a key/value cache, with which transformers looks for no packed sequences. For one
    thread at a time, as `capture` sees to.
    """
    masking = sys.modules.get(MODULE)
    table = getattr(masking, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    packed = getattr(masking, "find_packed_sequence_indices", None)
    if masking is None or table is None or packed is None:
        yield
        return
    positions = _Positions()

    def looked_for(ids: Tensor) -> Tensor | None:
        if positions.are(ids):
            return None
        if caches and UNPACKED not in notes:
            notes.append(UNPACKED)
        return None if caches else packed(ids)

    local = dict(table._local_mapping)
    for entry in ENTRIES:
        if table[entry] is getattr(masking, f"{entry}_mask", None):  # else somebody's own, which means more
            table[entry] = _asked(table[entry], notes, positions.are_ones, keeps_causal=entry == "eager")
    masking.find_packed_sequence_indices = looked_for  # type: ignore[attr-defined]
    try:
        with positions:
            yield
    finally:
        masking.find_packed_sequence_indices = packed  # type: ignore[attr-defined]
        table._local_mapping.clear()
        table._local_mapping.update(local)


def _asked(
    make: Callable[..., Any], notes: list[str], are_ones: Callable[[Tensor], bool], *, keeps_causal: bool
) -> Callable[..., Any]:
    owner = threading.get_ident()

    def mask(*args: Any, **given: Any) -> Any:
        needed = ("q_length", "kv_length", "allow_is_causal_skip")
        if args or any(name not in given for name in needed) or threading.get_ident() != owner:
            return make(*args, **given)  # another version of the library, or a model that runs in another thread
        queries, keys = given["q_length"], given["kv_length"]
        window, padding = given.get("local_size"), given.get("attention_mask")
        padding = None if padding is not None and are_ones(padding) else padding
        starts = [given.get(name, 0) for name in ("q_offset", "kv_offset")]
        is_plain = padding is None and (window is None or keys < window) and all(isinstance(n, int) for n in starts)
        if is_plain and not keeps_causal and given["allow_is_causal_skip"] and queries == keys and not any(starts):
            return None
        if is_plain and given.get("allow_is_bidirectional_skip"):
            return None
        note = NOTE if padding is not None else PACKED if "packed" in _names(given.get("mask_function")) else ""
        if note and (told := note.format(queries, keys)) not in notes:
            notes.append(told)
        return make(**given)

    return mask


def _names(function: Any) -> str:
    """What a mask function is made of, by the names of the functions inside it."""
    inside = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    parts = [one for value in inside for one in (value if isinstance(value, tuple | list) else (value,))]
    return " ".join([getattr(function, "__qualname__", ""), *(_names(one) for one in parts if callable(one))])
