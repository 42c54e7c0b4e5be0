"""Lookups in tables as programs have them: with dense gradients, in tables that forward leaves as they are, at places
that are values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar._compat import FakeTensor
from autopar.errors import TraceError
from autopar.trace.lines import line_here
from autopar.trace.origins import tensors_in, writes_in_place

LOOKUPS = (functional.embedding, functional.embedding_bag)
SPARSE_AT = {torch.embedding: 4, torch.embedding_bag: 5}  # where torch takes `sparse`
NOTE = (
    "an embedding has sparse=True{line}; its gradient is dense here, with the same numbers: "
    "use an optimizer that takes dense gradients (SparseAdam does not)"
)


def dense_lookup(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which torch calls `func`, without sparse gradients; a warning tells of them. Raises TraceError
    for `max_norm`, with which forward writes to the table.
    """
    given = dict(kwargs)
    if func is torch.embedding_renorm_ or (func in LOOKUPS and given.get("max_norm") is not None):
        raise TraceError(
            f"an embedding with max_norm rescales rows of its table in forward{line_here()}, which a program does not: "
            "leave max_norm out and rescale them after optimizer.step()"
        )
    place = SPARSE_AT.get(func)
    is_sparse = given.get("sparse", place is not None and len(args) > place and args[place])
    if not is_sparse or (place is None and func not in LOOKUPS):
        return args, given
    warnings.warn(NOTE.format(line=line_here()), stacklevel=2)
    if "sparse" in given:
        given["sparse"] = False
    else:
        assert place is not None
        args = (*args[:place], False, *args[place + 1 :])
    return args, given


def at_values(func: Any, args: tuple[Any, ...]) -> tuple[Tensor, Any, int] | None:
    """The tensor and index of `x[t]` or `x[t] = y` where one integer in the index is a tensor without a value, which
    torch would take out of it, with a dim of size 1 for it; and where that dim is in what the index picks. None: it is
    another index.
    """
    if getattr(func, "__name__", "") not in ("__getitem__", "__setitem__") or not isinstance(args[0], Tensor):
        return None
    parts = args[1] if isinstance(args[1], tuple) else (args[1],)
    tensors = [place for place, part in enumerate(parts) if isinstance(part, (Tensor, list))]
    if len(tensors) != 1 or not is_unknown_integer(part := parts[at := tensors[0]]):
        return None
    taken = sum(part is not None and part is not Ellipsis and not isinstance(part, bool) for part in parts)
    widths = {slice: 1, type(None): 1, type(Ellipsis): args[0].ndim - taken}
    return (
        args[0],
        (*parts[:at], part.reshape(1), *parts[at + 1 :]),
        sum(widths.get(type(one), 0) for one in parts[:at]),
    )


VIEWS = frozenset((
    "__getitem__", "view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "t", "permute", "narrow",
    "select", "detach", "view_as", "expand", "__get__",
))  # fmt: skip


class ReadsAt:
    """What forward reads at places that are values: `x[t]` is a copy in a program, and with torch the same memory. A
    write to it has to get to `x` by `x[t] = ..`, which is what Python makes of `x[t] += y`; and once `x` is written to,
    it is no longer what it was.
    """

    def __init__(self) -> None:
        self._read: dict[int, tuple[Tensor, Tensor]] = {}  # by id, and of what
        self._written: dict[int, str] = {}  # id of what was read -> the line that writes to it
        self._old = set[int]()  # ids of what was read, and written to in `x` since
        # `.data` of what forward has made and looks at it, by id, and how to get there from that itself
        self._data: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    def read(self, result: Tensor, of: Tensor) -> None:
        self._read[id(result)] = result, of

    def read_data(self, result: Tensor, of: Tensor) -> None:
        """That this is the `.data` of a tensor that forward has made."""
        self._data[id(result)] = result, lambda: of

    def look(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """That `func` gave `result`."""
        if not self._data or not args or not isinstance(result, Tensor) or id(args[0]) not in self._data:
            return
        if getattr(func, "__name__", "") in VIEWS and id(result) not in self._data:
            _, there = self._data[id(args[0])]
            self._data[id(result)] = result, lambda: func(there(), *args[1:], **kwargs)

    def by_data(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Tensor] | None:
        """How to get to what a function of that name writes to by way of `.data`, in the tensor itself; it is written
        to under no_grad, as gradients do not know of it. None: the function writes to nothing of that kind.
        """
        if not self._data or not args or id(args[0]) not in self._data or not writes_in_place(name, kwargs):
            return None
        return self._data[id(args[0])][1]

    def set_anew(self, numbers: Set[int]) -> None:
        """What these ids are of was set to another tensor."""
        self._old |= numbers

    def see(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note what a function of that name does to such. Raises TraceError where that goes wrong."""
        self._refuse_old((args, kwargs))
        if name == "__setitem__":
            self.put_back(args[2])
        if args and writes_in_place(name, kwargs):
            if id(args[0]) in self._read:
                self._written.setdefault(id(args[0]), line_here())
            self._old |= {id(result) for result, of in self._read.values() if of is args[0]}

    def put_back(self, value: Any) -> None:
        """That this is written to a place, as Python does behind `x[t] += y`."""
        self._written.pop(id(value), None)

    def check(self, returned: Any) -> None:
        """Raises TraceError where a write would be lost, or what forward returns is no longer what it was."""
        self._refuse_old(returned)
        for line in self._written.values():
            raise TraceError(
                f"forward writes in place to what it has read at a place that is a value{line}, and that is a copy "
                "in a program: write x[i] = y"
            )

    def _refuse_old(self, value: Any) -> None:
        if self._old and any(id(one) in self._old for one in tensors_in(value)):
            raise TraceError(
                "forward goes on with what it has read of a tensor (x[i] at a place that is a value, x.data) that it "
                f"has written to since{line_here()}, where a program has what it was: read x[i].clone(), or read it "
                "anew"
            )


def is_unknown_integer(part: Any) -> bool:
    is_integer = isinstance(part, FakeTensor) and not part.ndim and not part.is_floating_point()
    return is_integer and part.dtype != torch.bool and part.constant is None


def read_or_write(func: Any, args: tuple[Any, ...], found: tuple[Tensor, Any, int]) -> Any:
    """`x[t]`, or `x[t] = y`, of what `at_values` found."""
    tensor, index, dim = found
    if len(args) == 2:
        return func(tensor, index).squeeze(dim)
    value = args[2]
    if isinstance(value, Tensor) and (behind := tensor[index].ndim - 1 - dim) <= value.ndim:
        value = value.unsqueeze(value.ndim - behind)
    return func(tensor, index, value)


def one_hot(values: Tensor, num_classes: int = -1) -> Tensor:
    """As `functional.one_hot`, whose checks of the values a program does not have; those of scatter's kernels stay."""
    if num_classes == -1:
        raise TraceError(
            f"one_hot{line_here()} counts its classes in the values that it is given, and a program has one shape; say "
            "how many: one_hot(y, num_classes)"
        )
    if values.dtype != torch.int64:
        raise RuntimeError(f"one_hot takes indices of int64, not {values.dtype}")
    return values.new_zeros([*values.shape, num_classes]).scatter(-1, values.unsqueeze(-1), 1)
