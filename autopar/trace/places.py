"""Where a boolean mask is true, as tensors of indices: their number depends on values, so the mask stands for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import TraceError
from autopar.trace.lines import line_here


@dataclass(frozen=True)
class Places:
    """One of the tensors of indices that `nonzero(as_tuple=True)` or `where(mask)` gives."""

    mask: Tensor
    place: int

    def __len__(self) -> int:
        raise refused("how many there are")

    def __getattr__(self, name: str) -> Any:
        raise refused(f".{name}")


def with_masks(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an indexing, where what `where(mask)` gave stands in the index, with the mask itself there.
    Raises TraceError where only some of it is there.
    """
    if getattr(func, "__name__", "") not in ("__getitem__", "__setitem__") or not isinstance(args[0], Tensor):
        return args
    parts = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not any(isinstance(part, Places) for part in parts):
        return args
    if not isinstance(parts[0], Places):
        raise refused("a mask among other indices")
    mask = parts[0].mask
    given, rest = parts[: mask.ndim], parts[mask.ndim :]
    if [isinstance(p, Places) and p.mask is mask and p.place for p in given] != list(range(mask.ndim)):
        raise refused("an index of some of its dims")
    return args[0], (mask, *rest) if rest else mask, *args[2:]


def is_mask(part: Any) -> bool:
    """Whether it picks by its values: what is not zero, of bytes, too (an index of them is a mask to torch)."""
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) and part.ndim > 0


def refused(what: str) -> TraceError:
    return TraceError(
        f"how many rows a boolean mask picks depends on values, and {what} of such rows is not understood"
        f"{line_here()}; keep all rows, and put zero for those left out (torch.where), or weigh them with the mask"
    )
