"""Arrays that numpy draws, while forward is traced: what numpy makes of them is a step (`autopar.trace.drawn`), and
other code sees nothing but their shapes.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.trace.ahead import INSTEAD
from autopar.trace.lines import line_here

IN_PLACE = ("sort", "fill", "put", "resize", "partition", "setflags", "byteswap", "setfield")
LOOKS = ("shape", "ndim", "dtype", "size", "itemsize", "nbytes", "strides")
MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class Drawn(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands for an array that is another one in each call. What numpy makes of it is a step; other code sees its
    shape, and no values.
    """

    def __init__(self, value: np.ndarray, number: int, draws: Any) -> None:
        self.value, self.number, self._draws = value, number, draws
        self._sharing: list[tuple[Tensor, int]] = []

    @property
    def __class__(self) -> Any:
        return np.ndarray

    def tensor(self, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
        """A tensor of its own, as `torch.tensor` makes one."""
        self.look()
        return self._draws.take(self.number).clone().to(dtype=dtype, device=device)

    def shared(self) -> Tensor:
        """A tensor in the same memory, as `torch.from_numpy` makes one."""
        self._sharing.append((made := self.tensor(), made._version))
        return made

    def look(self) -> None:
        """Raise TraceError where it was written to by a tensor in its memory."""
        if any(made._version != version for made, version in self._sharing):
            raise self._refused()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            raise self._refused()
        return self._draws.computed(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._draws.computed(func, args, kwargs)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise self._refused()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in LOOKS:
            return getattr(self.value, name)
        if name in IN_PLACE:
            raise self._refused()
        if not callable(getattr(self.value, name)):
            return self._draws.computed(getattr, (self, name), {})
        return lambda *args, **kwargs: self._draws.computed(_method, (self, name, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self._draws.computed(operator.getitem, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        raise self._refused()

    @staticmethod
    def asked_for_length(drawn: Drawn, _: Any) -> int:
        """In the place of `__len__`, by which torch would take it for a sequence of indices."""
        return len(drawn.value)

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self.value)))

    def __bool__(self) -> bool:
        return self.item().asked_by(sys._getframe(1))

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return operator.index(self.item())

    def __repr__(self) -> str:
        raise self._refused()

    def _refused(self) -> TraceError:
        return TraceError(
            f"forward does something to an array that numpy draws{line_here()} that no call can do ahead: {INSTEAD}"
        )


def _method(array: np.ndarray, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(array, name)(*args, **kwargs)


def of_drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """What a function of torch gives of arguments of which one is drawn."""
    if func in MAKERS and type(args[0]) is Drawn and len(args) == 1:
        return args[0].tensor(**kwargs)
    if func not in INDEXED:
        raise TraceError(
            f"forward computes with an array that numpy draws{line_here()} as if it were a tensor: make one of it "
            "first (torch.from_numpy)"
        )
    return func(*pytree.tree_map_only(Drawn, lambda one: one.tensor(), args))


def refuse_kept(values: Iterable[tuple[str, Any]]) -> None:
    """Raise TraceError where forward returns an array that stands for what is drawn, or keeps it. `values`: as what."""
    for name, value in values:
        if any(type(one) is Drawn for one in pytree.tree_leaves(value)):
            raise TraceError(f"forward {name} an array that numpy draws: make a tensor of it (torch.from_numpy)")
