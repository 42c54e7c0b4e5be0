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

from torch import Tensor
from torch.overrides import TorchFunctionMode

_lock = threading.RLock()
MODULE, ENTRY = "transformers.masking_utils", "sdpa"
# Functions that keep numbers rising by one along the last dim, where nothing but their shape is changed.
SHAPING = ("unsqueeze", "expand", "view", "reshape", "to", "long", "int", "contiguous", "detach", "expand_as")
NOTE = (
    "attention_mask is an argument of the call, so that every attention reads a mask of {0} x {1} and computes what it "
    "hides; leave it out where nothing is padded"
)
PACKED = (
    "position_ids are an argument of the call and may tell of packed sequences, so that every attention reads a mask "
    "of {0} x {1} and computes what it hides; leave them out where each sequence has its own row"
)


class _Positions(TorchFunctionMode):
    """Sees which tensors hold the numbers of positions, one after the other, in each row."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, Tensor] = {}

    def are(self, tensor: Tensor) -> bool:
        return id(tensor) in self._held

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and self._goes_on(str(getattr(func, "__name__", "")), args, kwargs, result):
            self._held[id(result)] = result
        return result

    def _goes_on(self, name: str, args: Any, kwargs: Any, result: Tensor) -> bool:
        if name == "arange":
            step = kwargs.get("step", args[2] if len(args) > 2 else 1)
            return step == 1 and not result.is_floating_point()
        known = [arg for arg in args if isinstance(arg, Tensor) and self.are(arg)]
        if name.strip("_") in ("add", "radd", "iadd"):
            others = [arg for arg in args if not (isinstance(arg, Tensor) and self.are(arg))]
            return len(known) == 1 and all(isinstance(arg, int) for arg in others) and not kwargs
        if name == "__getitem__":
            return bool(known) and all(part is None or part == slice(None) for part in _parts(args[1]))
        same_rows = bool(known) and result.dim() > 0 and result.shape[-1] == known[0].shape[-1]
        return name in SHAPING and same_rows and not result.is_floating_point()


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


@contextlib.contextmanager
def masks_left_out(notes: list[str]) -> Iterator[None]:
    """Within it transformers makes no mask that attention knows by itself. `notes`: told there of masks that remain."""
    masking = sys.modules.get(MODULE)
    table = getattr(masking, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    packed = getattr(masking, "find_packed_sequence_indices", None)
    if masking is None or table is None or packed is None:
        yield
        return
    positions = _Positions()
    with _lock:
        before, local = table[ENTRY], dict(table._local_mapping)
        table[ENTRY] = _asked(before, notes)
        masking.find_packed_sequence_indices = lambda ids: None if positions.are(ids) else packed(ids)  # type: ignore[attr-defined]
        try:
            with positions:
                yield
        finally:
            masking.find_packed_sequence_indices = packed  # type: ignore[attr-defined]
            table._local_mapping.clear()
            table._local_mapping.update(local)


def _asked(make: Callable[..., Any], notes: list[str]) -> Callable[..., Any]:
    def mask(*args: Any, **given: Any) -> Any:
        needed = ("q_length", "kv_length", "allow_is_causal_skip")
        if args or any(name not in given for name in needed):
            return make(*args, **given)  # another version of the library
        queries, keys = given["q_length"], given["kv_length"]
        window, padding = given.get("local_size"), given.get("attention_mask")
        starts = [given.get(name, 0) for name in ("q_offset", "kv_offset")]
        is_plain = padding is None and (window is None or keys < window) and all(isinstance(n, int) for n in starts)
        if is_plain and given["allow_is_causal_skip"] and queries == keys and not any(starts):
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
