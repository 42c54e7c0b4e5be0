"""Arrays of numpy that functions of torch are given. A program has what is in them there: each function gets a copy,
which nobody writes to behind it. Where a tensor would share its memory with an array, neither may be written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.trace.lines import line_here

SHARING = (torch.as_tensor, torch.asarray)  # and `torch.from_numpy`, which the first of them stands for
WRITTEN = (
    "forward writes to {}{}, which share their memory, and a program has none of numpy's: make it by torch.tensor(..), "
    "which copies"
)


def is_array(value: Any) -> bool:
    """Whether it is one itself, and none that stands for what is drawn."""
    return issubclass(type(value), np.ndarray)


class Arrays:
    """Those of one forward."""

    def __init__(self) -> None:
        self._shared: list[tuple[np.ndarray, np.ndarray, str]] = []  # itself, what was in it, and where
        self._tensors: list[tuple[Tensor, int, str]] = []  # made of one, and their versions then

    def taken(self, func: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """The arguments of a function of torch, with copies of arrays among these `leaves` of them."""
        if not any(map(is_array, leaves)):
            return args, kwargs
        copies = pytree.tree_map(lambda one: one.copy() if is_array(one) else one, (args, kwargs))
        if func in SHARING:
            pairs = zip(pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(copies), strict=True)
            self._shared += [(one, copy, line_here()) for one, copy in pairs if is_array(one)]
        return copies

    def made(self, func: Any, args: Any, result: Any) -> None:
        """A function of torch gave that; call it behind every one."""
        if func in SHARING and args and is_array(args[0]) and isinstance(result, Tensor):
            self._tensors.append((result, result._version, line_here()))

    def check(self) -> None:
        """Forward has ended. Raises TraceError where it has written to what is shared."""
        for array, was, line in self._shared:
            if array.tobytes() != was.tobytes():
                raise TraceError(WRITTEN.format("an array of numpy that it has made a tensor of", line))
        for tensor, version, line in self._tensors:
            if tensor._version != version:
                raise TraceError(WRITTEN.format("a tensor that it has made of an array of numpy", line))
