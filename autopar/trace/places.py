"""Masks among what functions are given, and what to say of rows that they pick and of which nobody knows how many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.errors import TraceError
from autopar.trace.lines import line_here


def is_mask(part: Any) -> bool:
    """Whether it picks by its values: what is not zero, of bytes, too (an index of them is a mask to torch)."""
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) and part.ndim > 0


def refused(what: str) -> TraceError:
    return TraceError(
        f"how many rows a boolean mask picks depends on values, and {what} of such rows is not understood"
        f"{line_here()}; keep all rows, and put zero for those left out (torch.where), or weigh them with the mask"
    )
