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

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from autopar.trace.checks import Checks
from autopar.trace.formulas import Asked, Counted, Formula
from autopar.trace.numbers import BINARY, COMPARED, Number
from autopar.trace.values import MISSING
from autopar.trace.writes import content

# Path of a module, name of an attribute, and keys that lead from there to a list.
Spot = tuple[Any, ...]

# What these give of one element is that element.
LOOKS = frozenset((
    "__getitem__", "view", "reshape", "squeeze", "unsqueeze", "flatten", "detach", "clone", "cpu", "cuda", "to", "long",
    "contiguous", "select",
))  # fmt: skip
_PYTHONS = {name: python for name, (python, _) in (*BINARY.items(), *COMPARED.items())}
OPERATORS = _PYTHONS | {f"__{name}__": python for name, python in _PYTHONS.items()}


@dataclass
class Beside:
    """`spots`: of lists, and buffers of one element; `now`: what is asked of each, as it is in the call that is traced,
    where others may stand for it. `found`: further ones that forward asks.
    """

    spots: tuple[Spot, ...] = ()
    now: tuple[Any, ...] = ()
    found: set[Spot] = field(default_factory=set[Spot])
    _lists: list[tuple[Any, Counted, int]] = field(default_factory=list[Any])
    _tensors: dict[int, tuple[Tensor, Counted]] = field(default_factory=dict[int, Any])

    def values(self, modules: Mapping[str, nn.Module]) -> list[Any]:
        """The numbers that are there now; MISSING where there is none."""
        return [_number(_held(spot, modules)) for spot in self.spots]

    def begin(self, asked: Asked, first: int, modules: Mapping[str, nn.Module], checks: Checks) -> None:
        """Note what stands in a trace. `first`: the place of the first of these numbers among all."""
        self._lists.clear()
        self._tensors.clear()
        for at, (spot, now) in enumerate(zip(self.spots, self.now, strict=True), first):
            held = _held(spot, modules)
            formula = Formula(asked.step(None, (at,)), frozenset((spot,)))
            if isinstance(held, Tensor):
                was = held.detach().clone().reshape(())  # it may be written to before the number meets a tensor
                self._tensors[id(held)] = held, Counted(now, formula, lambda was=was: Number(was, checks), asked)
            else:
                self._lists.append((held, Counted(now, formula, None, asked), len(content(held))))

    def length(self, held: Any) -> Any:
        """`len` of it, as forward is told."""
        for one, counted, had in self._lists:
            if one is held and len(content(held)) >= had:
                return counted.of_two("add", len(content(held)) - had)
        return len(held)

    def counts(self, tensor: Any) -> bool:
        """Whether it is such a buffer, or made of one."""
        return id(tensor) in self._tensors

    def answer(self, func: Any, args: Sequence[Any]) -> Any:
        """What `func` asks of such a tensor; None where it asks nothing, or of another."""
        if not self._tensors or not args or id(args[0]) not in self._tensors:
            return None
        _, counted = self._tensors[id(args[0])]
        match getattr(func, "__name__", ""):
            case "item":
                return counted
            case "tolist":
                return counted if not args[0].ndim else None
            case "__bool__" | "is_nonzero":
                return bool(counted)
            case "__int__" | "__index__" | "__float__" as name:
                return getattr(counted, name)()
            case _:
                return None

    def made(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """`func` gave `result`; call it behind every function of torch."""
        if not self._tensors or not isinstance(result, Tensor) or result.numel() != 1:
            return
        name = getattr(func, "__name__", "")
        if name in LOOKS and id(args[0]) in self._tensors and result.dtype == args[0].dtype:
            self._tensors[id(result)] = result, self._tensors[id(args[0])][1]
        elif name in OPERATORS and len(args) == 2 and any(id(one) in self._tensors for one in args):
            parts = [self._tensors[id(one)][1] if id(one) in self._tensors else one for one in args]
            kinds = {type(one.now if type(one) is Counted else one) for one in parts}
            if kinds <= {int, bool}:  # of others torch computes in another precision than Python
                self._tensors[id(result)] = result, OPERATORS[name](*parts)

    def written(self, tensors: Sequence[Tensor]) -> None:
        """These were written to: what they are, and what looks at them, is no longer known."""
        if any(id(one) in self._tensors for one in tensors):
            self._tensors.clear()


def beside_of(spots: Sequence[Spot], modules: Mapping[str, nn.Module]) -> Beside:
    """Of what is there."""
    made = Beside(tuple(spots))
    made.now = tuple(made.values(modules))
    return made


def may_be_asked(spot: Spot, modules: Mapping[str, nn.Module]) -> bool:
    return _number(_held(spot, modules)) is not MISSING


def _held(spot: Spot, modules: Mapping[str, nn.Module]) -> Any:
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
