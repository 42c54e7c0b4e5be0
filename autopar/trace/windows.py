"""What lies at places that are hidden values, and is of one size: random crops (`i = torch.randint(t - n, (1,)).item();
x[:, i:i + n]`), segments of each sample (`x[b, :, start[b]:start[b] + n]`), `x.narrow(1, i, n)`, `x[i]`, `x.roll(i)`.
A trace has no values: it picks by indices, and each call checks that these are inside, as Python gives less where a
slice reaches beyond the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from autopar.trace.checks import Checks
from autopar.trace.lines import line_here
from autopar.trace.numbers import Number
from autopar.trace.tables import ReadsAt

OUTSIDE = (
    "a slice of {} elements that begins at a value{} reaches beyond the ends of the dim of {} in this call, where "
    "Python gives fewer, and a program always gives so many: keep its begin between 0 and {}"
)
Sum = dict[Any, int]  # how often each number is in it, by what that is; under CONSTANT what is added to all
CONSTANT = None
NAMES = ("__getitem__", "__setitem__", "narrow", "roll")
# What the sign of each of two numbers is in a sum of them.
SUMS = {
    **dict.fromkeys(("add", "__add__", "__radd__"), (1, 1)), **dict.fromkeys(("sub", "subtract", "__sub__"), (1, -1)),
    **dict.fromkeys(("rsub", "__rsub__"), (-1, 1)),
}  # fmt: skip
TIMES = ("mul", "multiply", "__mul__", "__rmul__")
SAME = ("reshape", "view", "squeeze", "flatten", "detach", "clone", "long", "to")


@contextlib.contextmanager
def rolling_by_numbers() -> Iterator[None]:
    """Inside, `roll` takes numbers of each call; torch's own asks for the values before anybody sees that."""
    whole, of_tensors = torch.roll, torch.Tensor.roll

    def roll(input: Tensor, shifts: Any, dims: Any = ()) -> Tensor:  # by its names in torch
        listed = shifts if isinstance(shifts, (tuple, list)) else (shifts,)
        if any(isinstance(one, (Number, Tensor)) for one in listed):
            return handle_torch_function(whole, (input,), input, shifts, dims)
        return of_tensors(input, shifts, dims)

    torch.roll, torch.Tensor.roll = roll, roll  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.roll = whole
        del torch.Tensor.roll


class Windows:
    """Those of one forward. It sees which numbers are sums of multiples of others and a constant, so that `i + n` is
    known to lie `n` behind `i`, and `(k + 1) * n` behind `k * n`.
    """

    def __init__(self, checks: Checks, reads_at: ReadsAt) -> None:
        self._checks, self._reads_at = checks, reads_at
        # By id: a number and what it is made of, which version of it, and what sum that is.
        self._sums: dict[int, tuple[Any, int, Sum]] = {}

    def look(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """That a function of that name gave `result`, with no arguments by name."""
        if not _is_place(result) or not args or not isinstance(args[0], Tensor):
            return
        found: Sum | None = None
        if name in SUMS and len(args) == 2 and all(map(_is_number, args)):
            found = _added([(self._sum(one), sign) for one, sign in zip(args, SUMS[name], strict=True)])
        elif name in TIMES and type(args[1]) is int:
            found = _added([(self._sum(args[0]), args[1])])
        elif name in ("neg", "__neg__"):
            found = _added([(self._sum(args[0]), -1)])
        elif name in SAME and _is_place(args[0]):
            found = self._sum(args[0])
        elif name == "__getitem__" and type(args[1]) is int:
            found = {(id(args[0]), args[0]._version, args[1]): 1}
        if found is not None:
            self._sums[id(result)] = (result, args), result._version, found

    def _sum(self, number: Any) -> Sum:
        if isinstance(number, int):
            return {CONSTANT: number}
        _, version, found = self._sums.get(id(number), (None, None, {}))
        return found if version == number._version else {(id(number), number._version): 1}

    def taken(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Callable[[], Any] | None:
        """What gives what `func` does of these, at places that nobody knows; None: there are none, or of no size."""
        name = getattr(func, "__name__", "")
        if name not in NAMES or not args or not isinstance(args[0], Tensor):
            return None
        if name == "narrow":
            dim, start, length = (*args[1:], *kwargs.values())[:3] if len(args) + len(kwargs) == 4 else (0, 0, 0)
            place = self._hidden(start)
            return None if place is None else lambda: self._copy(args[0], self._window(args[0], dim, place, length))
        return self._rolled(*args, **kwargs) if name == "roll" else self._indexed(func, args)

    def _rolled(self, tensor: Tensor, shifts: Any, dims: Any = ()) -> Callable[[], Tensor] | None:
        """`tensor.roll(shifts, dims)`: without dims all elements move, as if they lay in one."""
        shifts, dims = ([*one] if isinstance(one, (tuple, list)) else [one] for one in (shifts, dims))
        hidden = [self._hidden(one) for one in shifts]
        if not any(one is not None for one in hidden):
            return None

        def made() -> Tensor:
            result = tensor if dims else tensor.flatten()
            for shift, place, dim in zip(shifts, hidden, dims or [0], strict=True):
                if place is None:
                    result = result.roll(shift, dim)
                else:
                    there = torch.arange(size := result.shape[dim], device=place.device) - place
                    result = result.index_select(dim, there.remainder(size))
            return result.view(tensor.shape)

        return made

    def _indexed(self, func: Any, args: tuple[Any, ...]) -> Callable[[], Any] | None:
        tensor, index, *value = args
        parts = list(index) if isinstance(index, tuple) else [index]
        found = {at: self._of_slice(part) for at, part in enumerate(parts) if isinstance(part, slice)}
        slices = {at: one for at, one in found.items() if one is not None}
        if value and not slices:
            return None  # writes at numbers are seen to where those are; to ask for one is to have a program for each
        numbers = {at: self._hidden(part) for at, part in enumerate(parts) if isinstance(part, Number)}
        numbers = {at: one for at, one in numbers.items() if one is not None}
        if not slices and not numbers:
            return None
        if any(isinstance(part, (Tensor, list, bool)) for at, part in enumerate(parts) if at not in numbers):
            return None  # beside other indices
        if not slices:  # as at a tensor without dims
            whole = tuple(numbers.get(at, part) for at, part in enumerate(parts))
            return lambda: self._copy(tensor, func(tensor, whole))
        spread = _spread(parts, tensor.ndim)
        shift = len(spread) - len(parts)
        behind = next((at for at, part in enumerate(parts) if part is Ellipsis), len(parts))
        windows = {at if at < behind else at + shift: one for at, one in slices.items()}
        hidden = {at if at < behind else at + shift: one for at, one in numbers.items()}
        if value:
            is_known = not any(part is None for part in spread)
            return partial(self._written, tensor, spread, windows, hidden, value[0]) if is_known else None
        return lambda: self._copy(tensor, self._read(tensor, spread, windows, hidden))

    def _copy(self, tensor: Tensor, made: Any) -> Any:
        """What is read there: a copy, where torch gives a view."""
        if made is not None:
            self._reads_at.read(made, tensor)
        return made

    def _of_slice(self, part: slice) -> tuple[Tensor, int] | None:
        """Where a slice begins, and how long it is, where both ends are hidden values and that is one number."""
        ends = [self._hidden(one) for one in (part.start, part.stop)]
        if ends[0] is None or ends[1] is None or part.step not in (None, 1):
            return None
        begin, end = (self._sum(_as_kept(one)) for one in (part.start, part.stop))
        far = _added([(end, 1), (begin, -1)])
        length = far.pop(CONSTANT, 0)
        return (ends[0], length) if not far and length > 0 else None

    def _hidden(self, number: Any) -> Tensor | None:
        """An integer that nobody knows while this is traced, without dims."""
        if isinstance(number, Number):
            is_hidden = type(number) is Number and type(number.like) is int and number.known() is None
            return number.tensor if is_hidden else None
        is_hidden = isinstance(number, Tensor) and _is_place(number) and self._checks.known(number) is None
        return number.reshape(()) if is_hidden else None

    def _window(self, tensor: Tensor, dim: int, start: Tensor, length: int) -> Tensor:
        return tensor.index_select(dim, self._places(tensor.shape[dim], start, length))

    def _places(self, size: int, start: Tensor, length: int) -> Tensor:
        told = OUTSIDE.format(length, line_here(), size, size - length)
        counted = (start >= 0) & (start <= size - length)
        from_the_end = (start >= -size) & (start < -length)
        self._checks.add(told, ~(counted | from_the_end))  # which comes behind the call
        return (start.remainder(size) + torch.arange(length, device=start.device)).clamp(0, size - 1)

    def _read(self, tensor: Tensor, parts: list[Any], windows: Any, hidden: Any) -> Tensor:
        dims = _dims(parts)
        for at, (start, length) in windows.items():
            tensor = self._window(tensor, dims[at], start, length)
        for at, place in hidden.items():
            tensor = tensor.index_select(dims[at], place.reshape(1))
        whole = {**dict.fromkeys(windows, slice(None)), **dict.fromkeys(hidden, 0)}
        return tensor[tuple(whole.get(at, part) for at, part in enumerate(parts))]

    def _written(self, tensor: Tensor, parts: list[Any], windows: Any, hidden: Any, value: Any) -> None:
        """`tensor[parts] = value`, by one index for each dim: those meet in a grid."""
        self._reads_at.put_back(value)
        dims, places = _dims(parts), list[Tensor]()
        kept = list[int]()
        for at, part in enumerate(parts):
            size = tensor.shape[dims[at]]
            if at in windows:
                places.append(self._places(size, *windows[at]))
            elif at in hidden or type(part) is int:
                places.append(
                    hidden[at].reshape(1) if at in hidden else torch.tensor([part % size], device=tensor.device)
                )
                continue
            else:
                places.append(torch.arange(size, device=tensor.device)[part])
            kept.append(len(places) - 1)
        shape = [len(one) for one in places]
        grid = tuple(one.view([-1 if at == dim else 1 for at in range(len(places))]) for dim, one in enumerate(places))
        if isinstance(value, Tensor):
            value = value.reshape(value.shape[max(0, value.ndim - len(kept)) :])  # those before are of one element
            value = value.expand([shape[dim] for dim in kept]).reshape(shape)
        tensor[grid] = value


def _added(parts: Sequence[tuple[Sum, int]]) -> Sum:
    """Of multiples of sums, without terms that are none."""
    found: Sum = {}
    for one, times in parts:
        for term, count in one.items():
            found[term] = found.get(term, 0) + times * count
    return {term: count for term, count in found.items() if count}


def _is_number(one: Any) -> bool:
    return type(one) is int or _is_place(one)


def _as_kept(number: Any) -> Tensor:
    return number.tensor if isinstance(number, Number) else number


def _is_place(number: Any) -> bool:
    is_whole = isinstance(number, Tensor) and not number.is_floating_point() and not number.is_complex()
    return is_whole and number.dtype != torch.bool and number.numel() == 1


def _spread(parts: list[Any], dims: int) -> list[Any]:
    """An index with a part for each dim."""
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    rest = [slice(None)] * (dims - taken)
    if Ellipsis not in [part for part in parts if part is Ellipsis]:
        return [*parts, *rest]
    at = next(at for at, part in enumerate(parts) if part is Ellipsis)
    return [*parts[:at], *rest, *parts[at + 1 :]]


def _dims(parts: list[Any]) -> list[int]:
    """Of each part the dim that it is of; of None that of the next one."""
    found, dim = list[int](), 0
    for part in parts:
        found.append(dim)
        dim += part is not None
    return found
