"""Tensors that forward makes of Python's numbers alone, and of small buffers: points in time, lengths of levels,
strides of a convolution. What they are is no secret.

Solvers check that their points in time rise, and step from one to the next; a trace, whose tensors have no values,
could not say. Such tensors are computed beside the trace, and a question to one is answered. Buffers may be others in
the next call: what was answered of them is checked there (`autopar.trace.checks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from autopar._compat import outside_modes, pytree
from autopar.errors import TraceError
from autopar.trace.asked import on_cpu
from autopar.trace.beside import Beside
from autopar.trace.formulas import Place
from autopar.trace.lines import line_here
from autopar.trace.numpys import is_array
from autopar.trace.origins import PURE, tensors_in, writes_in_place
from autopar.trace.rows import ELEMENTWISE
from autopar.trace.sharing import storage_of
from autopar.trace.values import SCALARS

MOST, MOST_OF_BUFFER = 2**18, 64  # elements
MADE = frozenset(("tensor", "as_tensor", "arange", "linspace", "zeros", "ones", "full", "eye"))
_MORE = """
    unbind select diff flip cumsum mean prod cat stack triu tril t repeat repeat_interleave tile roll diag outer hstack
    vstack block_diag meshgrid movedim swapaxes narrow split chunk
"""
MORE = frozenset(_MORE.split())
# What these make is known of a tensor's shape alone.
LIKE = frozenset(("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"))
WRITES = frozenset(("setitem", "fill", "fill_diagonal", "zero", "copy", "scatter", "index_fill", "triu", "tril"))
FOLLOWED = MADE | PURE | ELEMENTWISE | MORE
# What these make may be the very memory of what they are given.
CASTS = frozenset(
    ("to", "type_as", "float", "double", "half", "bfloat16", "long", "int", "bool", "detach", "contiguous")
)
FRESH = ELEMENTWISE - CASTS - {"pos"}
_SIZED = """
    pad view reshape expand repeat tile unflatten narrow split as_strided new_zeros new_ones new_full new_empty
    __getitem__ __setitem__
"""
MADE_SO_LARGE = frozenset(("arange", "zeros", "ones", "empty", "rand", "randn"))
SIZED = frozenset(_SIZED.split()) | MADE_SO_LARGE
ASKS = frozenset(
    ("__bool__", "__int__", "__float__", "__index__", "__format__", "item", "tolist", "equal", "allclose", "is_nonzero")
)


class Literals:
    """What is known of one forward. What writes to such a tensor, or makes a tensor of one and is none of the functions
    that are followed (it may be a look at the same memory), makes all unknown that is made of the same buffers, or of
    the same tensors of numbers.
    """

    def __init__(self, beside: Beside) -> None:
        self._beside = beside
        self._names: dict[int, Place] = {}  # id of a buffer -> where it is
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # id -> the tensor of the trace, and what it is
        # id -> what it is made of: ids of buffers, and for each tensor that is made of numbers alone a number below 0
        self._made_of: dict[int, frozenset[int]] = {}
        self._roots = 0
        self._asked: dict[int, str] = {}  # id of a buffer -> the line that asks for something made of it

    def know(self, name: str, buffer: Tensor, value: Tensor) -> None:
        """That this buffer of the trace has that value now."""
        path, _, leaf = name.rpartition(".")
        if (path, leaf) in self._beside.spots:
            return
        self._names[id(buffer)] = path, leaf
        self._known[id(buffer)] = buffer, value
        self._made_of[id(buffer)] = frozenset((id(buffer),))

    def asks_buffers(self, asked: Any) -> bool:
        """Whether what is asked is made of buffers, which then may not be written to."""
        if buffers := self._buffers_in(asked):
            self._asked |= dict.fromkeys(buffers, line_here())
        return bool(buffers)

    def _buffers_in(self, value: Any) -> frozenset[int]:
        return frozenset(one for one in self._origins_of(value) if one > 0)

    def _root(self) -> frozenset[int]:
        self._roots += 1
        return frozenset((-self._roots,))

    def _origins_of(self, value: Any) -> frozenset[int]:
        return frozenset[int]().union(*(self._made_of.get(id(one), ()) for one in tensors_in(value)))

    def answer(self, func: Any, args: Any, kwargs: Any) -> bool | float | complex | list[Any] | None:
        """What `func` asks of known tensors; None where it asks nothing, or of others."""
        if getattr(func, "__name__", "") not in ASKS or not self._are_known(args, kwargs):
            return None
        if func is torch.Tensor.__format__ and args[0].ndim:
            return None  # text of more than a number is no key
        return self._run(func, args, kwargs)

    def number(self, func: Any, args: Any, answer: Any) -> Any:
        """What an answer says: of text, the number that it was written of."""
        return self._run(torch.Tensor.item, args[:1], {}) if func is torch.Tensor.__format__ else answer

    def sizes(
        self, func: Any, args: Any, kwargs: Any, of_arguments: Callable[[Tensor], Any]
    ) -> tuple[Any, Any, list[tuple[Tensor, int]]]:
        """The arguments of `func` with numbers in the place of known tensors that say how large something is, or where
        a slice begins or ends; and these tensors with their numbers. `of_arguments`: as `Origins.answer`.
        """
        name = getattr(func, "__name__", "")
        if name not in SIZED or not args:
            return args, kwargs, []
        found: list[tuple[Tensor, int]] = []

        def number(one: Any) -> Any:
            if isinstance(one, slice):
                return slice(number(one.start), number(one.stop), number(one.step))
            if not isinstance(one, Tensor) or one.ndim or one.is_floating_point() or one.dtype == torch.bool:
                return one
            if id(one) not in self._known:
                return one if (known := of_arguments(one)) is None else known
            found.append((one, int(self._known[id(one)][1])))
            return found[-1][1]

        only_slices = name.startswith("__")

        def part(one: Any) -> Any:
            return one if only_slices and not isinstance(one, slice) else number(one)

        ahead = () if name in MADE_SO_LARGE else args[:1]
        sizes = args[len(ahead) :]
        rest, named = pytree.tree_map(part, (sizes, kwargs), is_leaf=lambda one: isinstance(one, slice))
        return (*ahead, *rest), named, found

    def places(self, func: Any, args: Any) -> Any:
        """The arguments of `x[mask]` and `x[mask] = y` with the places of what is true in each mask that is made of
        numbers alone: how many these are is known.
        """
        if getattr(func, "__name__", "") not in ("__getitem__", "__setitem__") or not isinstance(args[0], Tensor):
            return args
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        masks = [self._mask(part) for part in parts]
        if all(mask is None for mask in masks):
            return args
        found: list[Any] = []
        for part, mask in zip(parts, masks, strict=True):
            if mask is None:
                found.append(part)
                continue
            with outside_modes():
                places = mask.nonzero(as_tuple=True)
            for real in places:
                found.append(torch.tensor(real.tolist(), dtype=torch.int64, device=getattr(part, "device", None)))
                self._known[id(found[-1])] = found[-1], real
                self._made_of[id(found[-1])] = self._root()
        return args[0], tuple(found), *args[2:]

    def nonzero(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Where a known tensor is not zero, as `x.nonzero()` has it; None where something else is asked."""
        if getattr(func, "__name__", "") != "nonzero" or kwargs or len(args) != 1 or id(args[0]) not in self._known:
            return None
        with outside_modes():
            real = self._known[id(args[0])][1].nonzero()
        made = torch.tensor(real.tolist(), dtype=torch.int64, device=args[0].device).reshape(real.shape)
        self._known[id(made)], self._made_of[id(made)] = (made, real), self._root()
        return made

    def known(self, tensor: Tensor) -> list[Any]:
        """What is in a tensor that is known."""
        with outside_modes():
            return self._known[id(tensor)][1].tolist()

    def _mask(self, value: Any) -> Tensor | None:
        """What is in a mask that is made of numbers alone, or that the model's code holds; None for all else."""
        if isinstance(value, list) and value and all(isinstance(one, bool) for one in cast("list[Any]", value)):
            with outside_modes():
                return torch.tensor(value)
        if isinstance(value, np.ndarray) and is_array(value) and value.dtype == bool and value.ndim:
            with outside_modes():
                return torch.from_numpy(value)
        if not isinstance(value, Tensor) or value.dtype != torch.bool or not value.ndim:
            return None
        if type(value) is Tensor and id(value) not in self._known:
            return value  # of the user's, and no tensor of the trace; a program is of what is in it
        return self._known[id(value)][1] if id(value) in self._known and not self._buffers_in(value) else None

    def made(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """`func` gave `result`; call it behind every function of torch."""
        name = getattr(func, "__name__", "")
        if not self._known and name not in MADE | LIKE | ELEMENTWISE:
            return
        given = tensors_in((args, kwargs))
        if writes_in_place(name, kwargs):
            written = tensors_in((args[:1], kwargs.get("out")))
            self.may_be_written(written, line_here)
            is_followed = name.strip("_").removeprefix("i" * name.startswith("__i")) in FOLLOWED | WRITES
            if is_followed and self._are_known(args, kwargs) and not self._lying_with(written) & self._names.keys():
                self._run(func, args, kwargs)  # looks at the same memory are looks at the same memory there
                origins = self._origins_of((args, kwargs))
                self._made_of |= {one: self._made_of[one] | origins for one in self._lying_with(written)}
            else:
                self._forget(written)
        elif name in LIKE and args and isinstance(args[0], Tensor) and self._are_known(args[1:], kwargs):
            if isinstance(result, Tensor) and result.numel() <= MOST:
                with outside_modes():
                    like = torch.empty(args[0].shape, dtype=args[0].dtype)
                self._known[id(like)], self._made_of[id(like)] = (like, like), self._root()
                self._keep(func, (like, *args[1:]), kwargs, result)
        elif name.strip("_") in FOLLOWED and self._are_known(args, kwargs) and (given or name in MADE | ELEMENTWISE):
            self._keep(func, args, kwargs, result)
        elif name.strip("_") not in FRESH and tensors_in(result):
            self._forget(tensors_in(args[0]) if name == "__getitem__" else given)  # it looks at no index

    def set_by_number(self, written: list[Tensor]) -> None:
        """A number of each call was written there."""
        self.may_be_written(written, line_here)
        self._forget(written)

    def _forget(self, given: list[Tensor]) -> None:
        unknown = self._origins_of(given)
        for one in [one for one, origins in self._made_of.items() if origins & unknown]:
            del self._known[one], self._made_of[one]

    def may_be_written(self, written: list[Tensor], line: Callable[[], str] = str) -> None:
        """Raises TraceError where that lies in a buffer that was asked. `line`: which writes; looked up
        only then, as most writes are to others.
        """
        buffers = self._lying_with(written) & self._names.keys()
        self._beside.written |= {self._names[one] for one in buffers}
        for buffer in buffers & self._asked.keys():
            self._beside.found |= {self._names[one] for one in self._asked if one in self._names}
            raise TraceError(
                f"forward asks for what is in a buffer{self._asked[buffer]}, and changes it{line()}, and a "
                "program has one answer: count outside of forward and pass the number as an argument, or leave it a "
                "tensor (places in a queue: ptr + torch.arange(n))"
            )

    def _lying_with(self, tensors: list[Tensor]) -> set[int]:
        """The known tensors, by id, that lie in the memory of some of these."""
        storages = {storage_of(self._known[id(one)][1]) for one in tensors if id(one) in self._known}
        return {one for one, (_, real) in self._known.items() if storage_of(real) in storages} if storages else set()

    def _keep(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        made = tensors_in(result)
        if sum(one.numel() for one in made) > MOST:
            return self._forget(tensors_in((args, kwargs)))
        for one, real in zip(made, tensors_in(self._run(func, args, kwargs)), strict=True):
            for given, known in [self._known[id(given)] for given in tensors_in(args[:1])]:
                if real is known and one is not given:  # a copy there, on another device
                    real = real.clone()
            self._known[id(one)] = one, real
            self._made_of[id(one)] = self._origins_of((args, kwargs)) or self._root()

    def _are_known(self, args: Any, kwargs: Any) -> bool:
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda part: isinstance(part, slice))
        return all(
            id(one) in self._known
            if isinstance(one, Tensor)
            else is_array(one) or isinstance(one, (*SCALARS, slice, type(Ellipsis), type(None)))
            for one in leaves
        )

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The function of what the tensors are, on the CPU: the device that they are for may not be there."""
        args, kwargs = pytree.tree_map_only(Tensor, lambda one: self._known[id(one)][1], (args, kwargs))
        # What is written to is only here.
        args, kwargs = pytree.tree_map(lambda one: one.copy() if is_array(one) else one, (args, kwargs))
        with outside_modes(), torch.no_grad():
            return on_cpu(func, args, kwargs)


def small_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What is in the buffers of a few elements, on the CPU; but for those that are no plain tensors, or on meta."""
    return {
        name: buffer.detach().cpu().clone()
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if type(buffer) is Tensor and buffer.numel() <= MOST_OF_BUFFER and buffer.device.type in ("cpu", "cuda")
        if buffer.layout is torch.strided
    }
