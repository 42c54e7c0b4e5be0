"""Tensors whose values are there when they are read: an update under way, a whole value still in pieces.

Shape, dtype and device are there at once. Autograd sees an ordinary tensor, as torch's AsyncCollectiveTensor has it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar._compat import pytree

LOOKS = (torch.ops.aten.view.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # that read nothing


class Late(Tensor):
    """`arrive` gives the tensor with the values; `shown` says what it will be like, on `device` (default: its own)."""

    _shown: Tensor
    _arrive: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shown: Tensor, arrive: Callable[[], Tensor], device: torch.device | None = None) -> Late:
        made = Tensor._make_wrapper_subclass(
            cls, shown.shape, strides=shown.stride(), storage_offset=shown.storage_offset(), dtype=shown.dtype,
            device=device or shown.device,
        )  # fmt: skip
        made._shown, made._arrive = shown, arrive
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOOKS:
            (seen, *rest) = args
            return cls(func(seen._shown, *rest, **(kwargs or {})), lambda: func(seen._arrive(), *rest), seen.device)
        args, kwargs = pytree.tree_map_only(Late, Late.arrived, (args, kwargs or {}))
        return func(*args, **kwargs)

    def arrived(self) -> Tensor:
        """The tensor with its values."""
        return self._arrive()

    def numpy(self, *, force: bool = False) -> Any:
        return self.arrived().numpy(force=force)

    def tolist(self) -> Any:
        return self.arrived().tolist()

    def data_ptr(self) -> int:
        return self.arrived().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.arrived().untyped_storage()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.arrived(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.arrived().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.arrived())
