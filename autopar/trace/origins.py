"""Which tensors of a forward are one value computed twice: the masks of `x[y != -100]` and `y[y != -100]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from autopar._compat import pytree
from autopar.trace.sharing import has_storage, storage_of

_PURE = """
    eq ne lt le gt ge and or xor invert logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not
    getitem view reshape flatten unsqueeze squeeze transpose permute contiguous to bool float double long int detach
    any all sum isnan isinf isfinite expand expand_as abs add sub mul div truediv argmax max min
"""
PURE = frozenset(_PURE.split())  # they give the same again from the same


def writes_in_place(name: str, kwargs: Any) -> bool:
    """Whether a function of torch of that name writes to its first argument, or to what it is given as `out`."""
    if name.startswith("__"):  # `__iadd__` is `__add__` in place; `__invert__` and `__index__` are nothing's
        return name == "__setitem__" or (name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"))
    return name.endswith("_") or kwargs.get("out") is not None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results, in whatever containers."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Looks(Protocol):
    """What is looked at in each call (`autopar.trace.checks.Checks`)."""

    notes: list[str]

    def add(self, told: str, wrong: torch.Tensor) -> None: ...

    def is_count(self, number: torch.Tensor) -> None: ...


def _memory_of(tensor: torch.Tensor) -> int | None:
    """None: that is not known, as inside `torch.vmap`."""
    try:
        return storage_of(tensor) if has_storage(tensor) else None
    except NotImplementedError:
        return None


class Origins:
    """Numbers of values: equal ones are the same function of the same. What is written to in place forgets them all.
    `checks`: what is looked at in each call, and the notes of the plan.
    """

    def __init__(self, checks: Looks) -> None:
        self.checks = checks
        self._by_id: dict[int, int] = {}
        self._in_memory: dict[int | None, set[int]] = {}  # which of them lie in a memory
        self._by_making: dict[Any, int] = {}
        self._next = 0
        self._held: list[Any] = []  # so that their ids stay theirs

    def of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor, a new one where nothing is known of it."""
        if id(tensor) not in self._by_id:
            self._is_number(tensor, self._new())
        return self._by_id[id(tensor)]

    def _is_number(self, tensor: torch.Tensor, number: int) -> None:
        self._by_id[id(tensor)] = number
        self._in_memory.setdefault(_memory_of(tensor), set()).add(id(tensor))
        self.hold(tensor)

    def hold(self, value: Any) -> None:
        self._held.append(value)

    def made(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """`func` gave `result`; call it behind every function of torch."""
        name = str(getattr(func, "__name__", func))
        if writes_in_place(name, kwargs):
            self.forget(tensors_in((args[:1], kwargs.get("out"))))
        elif name.strip("_") in PURE and isinstance(result, torch.Tensor) and not any(result is one for one in args):
            try:
                key = name.strip("_"), self._told(args), self._told(tuple(sorted(kwargs.items())))
                number = self._by_making.get(key)
            except TypeError:
                return  # an argument that cannot be compared
            self._by_making[key] = self._new() if number is None else number
            self._is_number(result, self._by_making[key])

    def forget(self, written: Sequence[torch.Tensor]) -> None:
        """These were written to in place: what lies in their memory has other values now."""
        memories = {*map(_memory_of, written)}
        for memory in self._in_memory if None in memories else {None, *memories}:
            for one in self._in_memory.get(memory, ()):
                self._by_id.pop(one, None)

    def _told(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return "tensor", self.of(value)
        if isinstance(value, list | tuple):
            return tuple(map(self._told, value))
        if isinstance(value, slice):
            return "slice", value.start, value.stop, value.step
        return type(value), value

    def _new(self) -> int:
        self._next += 1
        return self._next
