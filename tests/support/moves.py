"""Copies between device and host as a machine makes them that is as late as it may be, and a log of what was done."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._compat import TorchDispatchMode, pytree
from autopar.emit import moves

assert moves  # imported for the operators that it registers
STORE, FETCH, WAIT = (getattr(torch.ops.autopar, name).default for name in ("store", "fetch", "wait_copy"))


class Late(TorchDispatchMode):
    """Inside, a copy is made when it is waited for, from what stands in its source by then.

    `log`: (what, name) in order: store, fetch, wait. `nbytes`: of all that was stored, and fetched. `early`: operators
    that read what had not arrived.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str]] = []
        self.nbytes: Counter[str] = Counter()
        self.early: list[str] = []
        self.under_way: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (STORE, FETCH):
            self.check(func, args[0])
            made = func(*args)
            made.fill_(float("nan") if made.is_floating_point() else 1)
            what = "store" if func is STORE else "fetch"
            self.log.append((what, args[-1]))
            self.nbytes[what] += made.nbytes
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
        read = read._local_tensor if isinstance(read, DTensor) else read
        if read.untyped_storage().data_ptr() in self.under_way:
            self.early.append(str(func))
