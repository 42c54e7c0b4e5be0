"""What a program really holds: the bytes of all live tensor storages, followed operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._compat import TorchDispatchMode, pytree


class LiveBytes(TorchDispatchMode):
    """Inside the context, every storage that an operator returns is counted until it is freed.

    `current`, `peak`: bytes; `peak_after`: the operator after which the peak was first reached. `watch` counts
    tensors that existed before. Storages are counted once, whatever the number of views of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.peak_after = ""
        self._known: dict[int, weakref.ref[Any]] = {}

    def watch(self, tree: Any) -> None:
        """Count the storages of all tensors in `tree`."""
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._count(leaf, "before")

    def _count(self, tensor: Tensor, after: str) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self._known.get(key)
        if held is not None and held() is storage:
            return
        nbytes = storage.nbytes()

        def gone(_: Any, key: int = key, nbytes: int = nbytes) -> None:
            self.current -= nbytes
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.current += nbytes
        if self.current > self.peak:
            self.peak, self.peak_after = self.current, after

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf, str(func))
        return result
