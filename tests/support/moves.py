"""Copies between device and host as a machine makes them that is as late as it may be, and a log of what was done."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar._compat import TorchDispatchMode, pytree
from autopar.emit import moves

assert moves  # imported for the operators that it registers
STORE, FETCH, WAIT = (getattr(torch.ops.autopar, name).default for name in ("store", "fetch", "wait_copy"))


class Late(TorchDispatchMode):
    """Inside, a copy is made when it is waited for, from what stands in its source by then.

    `log`: (what, name) in order: store, fetch, wait. `early`: operators that read what had not arrived.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str]] = []
        self.early: list[str] = []
        self.under_way: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (STORE, FETCH):
            self.check(func, args[0])
            made = func(*args)
            made.fill_(float("nan") if made.is_floating_point() else 1)
            self.log.append(("store" if func is STORE else "fetch", args[-1]))
            self.under_way[made.untyped_storage().data_ptr()] = made
            return made
        if func is WAIT:
            made, source, name = args
            del self.under_way[made.untyped_storage().data_ptr()]
            self.check(func, source)
            made.copy_(source)
            self.log.append(("wait", name))
            return func(*args)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.check(func, leaf)
        return func(*args, **(kwargs or {}))

    def check(self, func: Any, read: Tensor) -> None:
        if read.untyped_storage().data_ptr() in self.under_way:
            self.early.append(str(func))
