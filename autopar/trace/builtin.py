"""Python's own functions and types, of which code may ask what a counted number is, while a model is traced."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from autopar._compat import FakeTensor
from autopar.trace.extremes import IS_BEFORE, extreme, may_be_left_open
from autopar.trace.formulas import Counted, computed, made_by
from autopar.trace.gathered import Gathered
from autopar.trace.lines import line_here
from autopar.trace.masked import Picked
from autopar.trace.numbers import TOO_LARGE, Array, Number
from autopar.trace.standing import Ahead, Listed, Turned

BY_METHODS = ("floor", "ceil", "trunc")  # of numbers
_AS_TORCH = """
    sqrt exp expm1 exp2 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc fabs
    degrees radians atan2 hypot fmod copysign pow isnan isinf isfinite
"""
# Functions of `math` that torch has for tensors: name -> what that is called there.
AS_TORCH = {name: name for name in _AS_TORCH.split()} | {"fabs": "abs", "degrees": "rad2deg", "radians": "deg2rad"}
NOT_IN_DOMAIN = "forward gives math.{} a number{} for which Python raises ValueError or OverflowError there"

# What stands for what there is without a trace.
STOOD_FOR: dict[type, type] = {Picked: Tensor, Ahead: Tensor, Turned: Tensor, Listed: list, Array: np.ndarray}


@contextlib.contextmanager
def replaced(module: ModuleType, names: Iterable[str], stand_in: Callable[[str, Any], Any]) -> Iterator[None]:
    """Inside, what these names of a module stand for is what `stand_in` makes of the name and of that."""
    functions = {name: getattr(module, name) for name in names}
    for name, function in functions.items():
        setattr(module, name, stand_in(name, function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(module, name, function)


def math_of_numbers() -> contextlib.AbstractContextManager[None]:
    """Inside, Python's `math` takes numbers that are counted, and numbers of each call."""
    functions = {name for name, function in vars(math).items() if callable(function) and not name.startswith("_")}
    return replaced(math, functions - {*BY_METHODS}, _taking_numbers)


def _taking_numbers(name: str, python: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        if name in AS_TORCH and not kwargs and any(type(one) is Number for one in args):
            return _as_torch(name, [one.as_given() if isinstance(one, Number) else one for one in args])
        if kwargs or not any(type(one) is Counted for one in args):
            return python(*args, **kwargs)
        return computed(python, args, made_by(name, args))

    return function


def _as_torch(name: str, given: list[Any]) -> Number:
    """A function of `math`, of numbers of each call among others. Those that it is not defined for are told of."""
    numbers = [one for one in given if isinstance(one, Number)]
    like = numbers[0].tensor.double()
    taken = [one.tensor.double() if isinstance(one, Number) else torch.full_like(like, float(one)) for one in given]
    made = getattr(torch, AS_TORCH[name])(*taken)
    if not name.startswith("is"):
        are_finite = torch.stack([one.isfinite() for one in taken]).all()
        numbers[0]._checks.add(NOT_IN_DOMAIN.format(name, line_here()), are_finite & ~made.isfinite())
    return Number(made, numbers[0]._checks)


class _StandsFor:
    """Stands for `type`, `int` or `float` in code that may ask them of a counted number."""

    def __init__(self, kind: Any, of_counted: Callable[[Counted], Any], of_number: Callable[[Number], Any]) -> None:
        self._kind, self._of_counted, self._of_number = kind, of_counted, of_number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            of = args[0]
            if isinstance(of, Tensor) and self._kind is not type and of.numel() == 1:
                of = of.item()  # which says what is in a buffer that is counted
            if self._kind is type and (kind := STOOD_FOR.get(type(of))) is not None:
                return kind
            if type(of) is Counted:
                return self._of_counted(of)
            if type(of) is Number:
                return self._of_number(of)
            if self._kind is type and isinstance(of, FakeTensor):
                return nn.Parameter if isinstance(of, nn.Parameter) else Tensor
        return self._kind(*args, **kwargs)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self._kind)

    def __subclasscheck__(self, value: Any) -> bool:
        return issubclass(value, self._kind)

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (self._kind,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def __getitem__(self, of: Any) -> Any:
        return self._kind[of]

    def __or__(self, other: Any) -> Any:
        return self._kind | other

    def __ror__(self, other: Any) -> Any:
        return other | self._kind

    def __eq__(self, other: object) -> bool:
        return other is self._kind or (isinstance(other, _StandsFor) and other._kind is self._kind)

    def __hash__(self) -> int:
        return hash(self._kind)


def _float(number: Number) -> Number:
    return Number(number.tensor.double(), number._checks)


def _int(number: Number) -> Number:
    if number.tensor.is_floating_point():
        number._checks.add(f"forward makes an int{line_here()} of what is no number", ~number.tensor.isfinite())
        number._checks.add(TOO_LARGE.format(line_here()), number.tensor.isfinite() & (number.tensor.abs() >= 2.0**63))
    whole = number.tensor.trunc() if number.tensor.is_floating_point() else number.tensor
    return Number(whole.long(), number._checks)


def _picking(python: Callable[..., Any]) -> Callable[..., Any]:
    """`min` or `max`, also of tensors, and of numbers of each call that are all of one type."""
    name = python.__name__

    def function(*args: Any, **kwargs: Any) -> Any:
        given = [*args[0]] if len(args) == 1 else [*args]
        if not kwargs and may_be_left_open(given, sys._getframe(1).f_code):
            return handle_torch_function(extreme, given, name, *given)
        given = [one.as_given() if isinstance(one, Number) else one for one in given]
        numbers = [one for one in given if isinstance(one, Number)]
        kinds = {type(one.like if isinstance(one, Number) else one) for one in given}
        if kwargs or all(type(one) is Counted for one in numbers) or kinds not in ({int}, {float}):
            return python(given, **kwargs)
        checks, like = numbers[0]._checks, numbers[0].tensor
        best, *others = (one.tensor if isinstance(one, Number) else like.new_tensor(one) for one in given)
        for one in others:
            best = torch.where(IS_BEFORE[name](one, best), one, best)  # of equal ones the first, as Python has it
        return Number(best, checks)

    return function


def _is_one(value: Any, kinds: Any) -> bool:
    """`isinstance`, of what stands for something, and of numbers of each call too."""
    if (kind := STOOD_FOR.get(type(value))) is not None:
        return issubclass(kind, kinds)
    return isinstance(value.like if type(value) is Number else value, kinds)


def _added_up(of: Any, *start: Any, **given: Any) -> Any:
    """`sum`, also of lists of which nobody knows how long they are."""
    return of.added_up(*start, **given) if type(of) is Gathered else sum(of, *start, **given)


STAND_IN: dict[str, Any] = {
    "sum": _added_up,
    "isinstance": _is_one,
    "type": _StandsFor(type, lambda number: type(number.now), lambda number: type(number.like)),
    "float": _StandsFor(float, lambda number: number.of_one(float, _float), _float),
    "int": _StandsFor(int, lambda number: number.of_one(int, _int), _int),
    "min": _picking(min),
    "max": _picking(max),
}


@contextlib.contextmanager
def types_of_counted(
    asking: Iterable[tuple[dict[str, Any], Set[str]]], length: Callable[[Any], Any], are_there: bool
) -> Iterator[None]:
    """Inside, functions with these globals that ask for the type of a tensor, or of a counted number, are told the one
    that it has without a trace, and those that make an int or a float of a number get a number, or a formula. Where one
    compares types with `is`, or gives one to torch, `int` and `float` are those of Python. `length` stands for `len`,
    where lists are counted (`are_there`).
    """

    def of(held: Any) -> Any:
        if (told := getattr(type(held), "asked_for_length", None)) is not None:
            return told(held, sys._getframe(1))
        return length(held) if are_there else len(held)

    stand_in = {**STAND_IN, "len": of}
    asking = [*asking, (torch.is_tensor.__globals__, {"isinstance"})]
    wanted, compared = dict[tuple[int, str], dict[str, Any]](), set[tuple[int, str]]()
    for names, asked in asking:
        wanted |= {(id(names), name): names for name in asked & stand_in.keys() - names.keys()}
        if "is" in asked:
            compared |= {(id(names), name) for name in ("int", "float")}
    shadowed = [(names, place[1]) for place, names in wanted.items() if place not in compared]
    for names, name in shadowed:
        names[name] = stand_in[name]
    try:
        yield
    finally:
        for names, name in shadowed:
            del names[name]
