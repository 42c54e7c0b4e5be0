"""What forward asks about places that it writes to in a program of one call: how long a list is, and what is in a
buffer of one element.

    self.losses.append(loss.item())
    if len(self.losses) % 100 == 0: ..

    ptr = int(self.queue_ptr)
    self.queue[:, ptr:ptr + n] = keys.T
    self.queue_ptr[0] = (ptr + n) % size

Such a number is known when a call begins, as those are that attributes count (`autopar.trace.counted`). So what is
computed of it is computed in Python, and each answer has a program of its own. No program takes it as an argument: a
length meets tensors as a number of Python's, and what is in a buffer is read there.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar.trace.checks import Checks
from autopar.trace.formulas import Asked, Counted, Formula, Place, computed
from autopar.trace.numbers import BINARY, COMPARED, Number
from autopar.trace.origins import tensors_in, writes_in_place
from autopar.trace.rows import ELEMENTWISE
from autopar.trace.values import MISSING
from autopar.trace.writes import content

# What these give of one element is that element, and may be the same memory; a clone is not.
LOOKS = frozenset((
    "__getitem__", "view", "reshape", "squeeze", "unsqueeze", "flatten", "detach", "cpu", "cuda", "to", "long",
    "contiguous", "select",
))  # fmt: skip
SETS = frozenset(("__setitem__", "fill_", "copy_"))  # of one element, to their last argument
EXACT = (torch.int64, torch.int32, torch.float32, torch.float64)  # what is written to others may wrap
_PYTHONS = {name: python for name, (python, _) in (*BINARY.items(), *COMPARED.items())}
OPERATORS = _PYTHONS | {f"__{name}__": python for name, python in _PYTHONS.items()}


@dataclass
class Beside:
    """`spots`: of lists, and buffers of one element; `now`: what is asked of each, as it is in the call that is traced,
    where others may stand for it. `found`: further ones that forward asks; `written`: buffers
    that it writes to, and may ask behind that.
    """

    spots: tuple[Place, ...] = ()
    now: tuple[Any, ...] = ()
    found: set[Place] = field(default_factory=set[Place])
    written: set[Place] = field(default_factory=set[Place])
    was_changed: bool = False  # whether forward asked how long a list is that it had not only appended to
    _lists: list[tuple[Any, Counted, list[Any]]] = field(default_factory=list[Any])
    # id -> a tensor of one element, what it is, and the id of the first one that has the same memory
    _tensors: dict[int, tuple[Tensor, Counted | int, int]] = field(default_factory=dict[int, Any])

    def values(self, modules: Mapping[str, nn.Module]) -> list[Any]:
        """The numbers that are there now; MISSING where there is none."""
        return [_number(_held(spot, modules)) for spot in self.spots]

    def begin(self, asked: Asked, first: int, modules: Mapping[str, nn.Module], checks: Checks) -> None:
        """Note what stands in a trace. `first`: the place of the first of these numbers among all."""
        self._lists.clear()
        self._tensors.clear()
        self.was_changed = False
        for at, (spot, now) in enumerate(zip(self.spots, self.now, strict=True), first):
            held = _held(spot, modules)
            formula = Formula(asked.step(None, (at,)), frozenset((spot,)))
            if isinstance(held, Tensor):
                was = held.detach().clone().reshape(())  # it may be written to before the number meets a tensor
                counted = Counted(now, formula, lambda was=was: Number(was, checks), asked)
                self._tensors[id(held)] = held, counted, id(held)
            else:
                self._lists.append((held, Counted(now, formula, None, asked), content(held)))

    def length(self, held: Any) -> Any:
        """`len` of it, as forward is told."""
        for one, counted, had in self._lists:
            if one is held:
                now = content(held)
                if len(now) >= len(had) and all(map(operator.is_, now, had)):
                    return counted.of_two("add", len(now) - len(had))
                self.was_changed = True
                counted.pinned()
        return len(held)

    def answer(self, func: Any, args: Sequence[Any]) -> Any:
        """What `func` asks of such a tensor; None where it asks nothing, or of another."""
        if not self._tensors or not args or id(args[0]) not in self._tensors:
            return None
        counted = self._tensors[id(args[0])][1]
        is_truth = args[0].dtype == torch.bool  # which code may compare with `is`
        match getattr(func, "__name__", ""):
            case "item" | "tolist" as name if name == "item" or not args[0].ndim:
                return bool(counted) if is_truth else counted
            case "__bool__" | "is_nonzero":
                return bool(counted)
            case "__int__" | "__index__":
                return int(counted)
            case "__float__":
                return float(counted)
            case _:
                return None

    def made(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """`func` gave `result`; call it behind every function of torch."""
        if not self._tensors:
            return
        name, given = getattr(func, "__name__", ""), tensors_in((args, kwargs))
        if writes_in_place(name, kwargs):
            self._written(name, args, tensors_in((args[:1], kwargs.get("out"))))
        elif isinstance(result, Tensor) and any(id(one) in self._tensors for one in given):
            self._made(name, args, result)

    def _made(self, name: str, args: Sequence[Any], result: Tensor) -> None:
        known = self._tensors.get(id(args[0])) if args else None
        if known is not None and result.numel() == 1 and name in LOOKS and result.dtype == known[0].dtype:
            self._tensors[id(result)] = result, *known[1:]
        elif known is not None and name == "clone":
            self._tensors[id(result)] = result, known[1], id(result)
        elif name in OPERATORS and result.numel() == 1 and len(args) == 2:
            if (made := self._computed(OPERATORS[name], args, result.dtype)) is not None:
                self._tensors[id(result)] = result, made, id(result)
        elif name.strip("_") not in ELEMENTWISE:  # it may be a look at the same memory, through which forward writes
            self._forget({self._tensors[id(one)][2] for one in tensors_in(args) if id(one) in self._tensors})

    def _computed(self, python: Any, args: Sequence[Any], dtype: torch.dtype) -> Any:
        """What Python makes of numbers as torch does; None where that is another kind of number."""
        parts = [self._tensors[id(one)][1] if id(one) in self._tensors else one for one in args]
        kinds = {type(one.now if type(one) is Counted else one) for one in parts}
        if kinds <= {int, bool}:
            return python(*parts)
        if not kinds <= {int, bool, float} or dtype not in (torch.float32, torch.float64, torch.bool):
            return None
        singles = any(one.dtype == torch.float32 for one in tensors_in(args))
        counted = next((one for one in parts if type(one) is Counted), None)
        if not singles:
            return python(*parts)
        return None if counted is None else computed(_single(python), parts, None)

    def _written(self, name: str, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """Let what has that memory be what it was set to, where that is known."""
        roots = {self._tensors[id(one)][2] for one in tensors if id(one) in self._tensors}
        made: Any = None
        if len(roots) == 1 and len(tensors) == 1 and tensors[0].dtype in EXACT:
            python = OPERATORS.get(name.strip("_")) or OPERATORS.get(f"__{name.strip('_').removeprefix('i')}__")
            if name in SETS and id(args[-1]) in self._tensors:
                made = self._tensors[id(args[-1])][1]
            elif name in SETS and type(args[-1]) in (Counted, int):
                made = args[-1]
            elif python is not None and len(args) == 2:
                made = self._computed(python, args, tensors[0].dtype)
        if made is None:
            return self._forget(roots)
        for number, (tensor, _, root) in [*self._tensors.items()]:
            if root in roots:
                self._tensors[number] = tensor, made, root

    def _forget(self, roots: Set[int]) -> None:
        self._tensors = {number: one for number, one in self._tensors.items() if one[2] not in roots}


@functools.cache
def _single(python: Any) -> Any:
    """The same of numbers of float32, as torch rounds them."""

    def function(*args: Any) -> Any:
        made = python(*(np.float32(one).item() for one in args))
        return np.float32(made).item() if isinstance(made, float) else made

    return function


def beside_of(spots: Sequence[Place], modules: Mapping[str, nn.Module]) -> Beside:
    """Of what is there."""
    made = Beside(tuple(spots))
    made.now = tuple(made.values(modules))
    return made


def may_be_asked(spot: Place, modules: Mapping[str, nn.Module]) -> bool:
    return _number(_held(spot, modules)) is not MISSING


def _held(spot: Place, modules: Mapping[str, nn.Module]) -> Any:
    path, name, *within = spot
    held = vars(modules[path]).get(name, modules[path]._buffers.get(name, MISSING))
    for key in within:
        parts = content(held) if isinstance(held, (list, tuple, deque, dict)) else {}
        if isinstance(parts, list):
            parts = dict(enumerate(parts))
        held = parts.get(key, MISSING)
    return held


def _number(held: Any) -> Any:
    if isinstance(held, (list, deque)):
        return len(content(held))
    is_one = isinstance(held, Tensor) and held.numel() == 1 and not held.is_meta and not held.is_complex()
    return held.item() if is_one else MISSING
