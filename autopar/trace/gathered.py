"""Lists that forward appends to in branches by hidden values, and then puts together: `losses.append(f(x[mask]))`.

How long one is hangs on values. It stands as a list of all that may be in it, with the truth of each: behind a branch
a `Gathered` is in the place of the list (`autopar.trace.appended` says of which).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from autopar.errors import TraceError
from autopar.trace.lines import line_here
from autopar.trace.places import refused

SUM = (
    "forward adds up a list{} in which tensors with dims, or of several dtypes, may be or not, and its sum is a number "
    "where none is: begin with zeros (sum(parts, x.new_zeros(n)))"
)


class Gathered(list[Any]):
    """What may be in a list, each thing where its truth is true; None: it is there in any case. `source`: the list that
    forward has made; `guarded`: a number or tensor where that is true, else zeros (`autopar.trace.branches`).
    """

    def __init__(self, source: list[Any], checks: Any, guarded: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(source)
        self.source, self._checks, self.guarded = source, checks, guarded
        self._truths = dict[int, Tensor]()  # by place

    def items(self) -> list[tuple[Any, Tensor | None]]:
        return [(one, self._truths.get(place)) for place, one in enumerate(list.__getitem__(self, slice(None)))]

    def put(self, place: int, items: Sequence[tuple[Any, Tensor | None]]) -> None:
        """Let these stand there, and nothing behind them."""
        list.__setitem__(self, slice(place, None), [one for one, _ in items])
        self._truths = {at: truth for at, truth in self._truths.items() if at < place}
        self._truths |= {at: truth for at, (_, truth) in enumerate(items, place) if truth is not None}

    def count(self) -> Tensor | None:
        """How many there are; None where all are."""
        if not self._truths:
            return None
        return torch.stack([*self._truths.values()]).sum() + (list.__len__(self) - len(self._truths))

    def asked_for_length(self, frame: FrameType) -> Any:
        """`len`, where code of that frame asks."""
        return list.__len__(self) if (count := self.count()) is None else self._checks.length(count, None, frame)

    def __bool__(self) -> bool:
        if (count := self.count()) is None or len(self._truths) < list.__len__(self):
            return list.__len__(self) > 0
        return self._checks.number(count > 0).asked_by(sys._getframe(1))

    def added_up(self, start: Any = 0) -> Any:
        """`sum` of it. Raises TraceError where of what type or shape that is hangs on what is there."""
        sure, every = [one for one, truth in self.items() if truth is None], [one for one, _ in self.items()]
        dtypes, shape = _kind_of([start, *every])
        if (dtypes, shape) != _kind_of([start, *sure]) and (shape or len(dtypes) > 1):
            raise TraceError(SUM.format(line_here()))
        for one, truth in self.items():
            start = start + (one if truth is None else self.guarded(one, truth))
        return start


def _kind_of(values: Sequence[Any]) -> tuple[frozenset[torch.dtype], tuple[int, ...]]:
    """The dtypes of tensors, and the shape of their sum."""
    tensors = [one for one in values if isinstance(one, Tensor)]
    return frozenset(one.dtype for one in tensors), tuple(torch.broadcast_shapes(*(one.shape for one in tensors)))


def items_of(listed: list[Any]) -> list[tuple[Any, Tensor | None]]:
    """What is in a list, and where."""
    return listed.items() if isinstance(listed, Gathered) else [(one, None) for one in listed]


def cut(listed: list[Any], place: int) -> None:
    """Let nothing stand there and behind it."""
    if isinstance(listed, Gathered):
        listed.put(place, ())
    else:
        del listed[place:]


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: Gathered, *_: Any, **__: Any) -> Any:
        raise refused(f"{name} of a list")

    return method


# What the source of a function does not show: it hands such a list to another.
for _name in (
    "__iter__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__reversed__", "__add__", "__iadd__",
    "__mul__", "__imul__", "__rmul__", "__len__", "__repr__", "__copy__", "__deepcopy__", "__reduce_ex__", "__eq__",
    "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "clear", "copy", "extend", "index", "insert", "pop",
    "remove", "reverse", "sort",
):  # fmt: skip
    setattr(Gathered, _name, _refusing(_name))
