"""Numbers that forward finds as an earlier call has left them, and changes: counters, temperatures, running averages.

    self.step += 1
    beta = min(1.0, self.step / self.warmup)

A program has them as arguments: 0-dim tensors, where something is computed with tensors. What is computed of such
numbers alone is computed in Python before each call, as what is asked of them is: each answer has a program of its own.
Tensors that forward finds and replaces (`self.state = new.detach()`) are arguments, too, a program for each shape.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.trace.checks import Checks
from autopar.trace.numbers import BINARY, COMPARED, Number
from autopar.trace.values import MISSING

ARGUMENT = "counted_"  # of forward, in a trace: a dict by what an attribute is called
Place = tuple[str, str]  # path of a module, name of an attribute
Of = Callable[[Sequence[Any]], Any]  # a number, of those that are there


@dataclass(frozen=True)
class Formula:
    """What a number is, of those that are there when a call begins."""

    of: Of


@dataclass
class Counting:
    """`places`: of the numbers, in the order in which a formula has them; `kinds`: as `kind_of` has them. `asked`: what
    forward asks of them, and the answers that a program has. `met`: what met tensors, or led to it, and has to fit
    into one. `needed`: Python has asked for a number itself, whatever the code did with the error.
    """

    places: tuple[Place, ...] = ()
    kinds: tuple[Any, ...] = ()
    asked: list[tuple[Formula, bool]] = field(default_factory=list[tuple[Formula, bool]])
    met: list[Formula] = field(default_factory=list[Formula])
    needed: bool = False

    def values(self, modules: Mapping[str, nn.Module]) -> list[Any]:
        """What is there now."""
        return [vars(modules[path]).get(name, MISSING) for path, name in self.places]

    @contextlib.contextmanager
    def standing(self, values: Sequence[Any], modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Inside, these are there."""
        before = self.values(modules)
        self._put(values, modules)
        try:
            yield
        finally:
            self._put(before, modules)

    def _put(self, values: Sequence[Any], modules: Mapping[str, nn.Module]) -> None:
        for (path, name), value in zip(self.places, values, strict=True):
            vars(modules[path])[name] = value

    def broken(self, modules: Mapping[str, nn.Module]) -> str | None:
        """Why a program is none for the numbers that are there; None where it is one."""
        values = self.values(modules)
        for place, value, kind in zip(self.places, values, self.kinds, strict=True):
            if kind_of(value) != kind:
                told = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
                return f"{called(place)} is {'not there' if value is MISSING else told}"
        if any(map(_is_large, (*values, *(formula.of(values) for formula in self.met)))):
            return f"a number made of {', '.join(map(called, self.places))} is too large for a tensor"
        if any(bool(formula.of(values)) != answer for formula, answer in self.asked):
            return f"what forward asks of {', '.join(map(called, self.places))} has another answer"
        return None

    def tensors(self, modules: Mapping[str, nn.Module]) -> list[Tensor]:
        """What a program takes in their place."""
        return [as_tensor(value) for value in self.values(modules)]


def counting_of(places: Sequence[Place], modules: Mapping[str, nn.Module]) -> Counting:
    """Of what is there."""
    counting = Counting(tuple(places))
    counting.kinds = tuple(map(kind_of, counting.values(modules)))
    return counting


def _is_large(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >= 2**63


def kind_of(value: Any) -> Any:
    """What is equal for all values that a program takes."""
    return (value.shape, value.dtype, value.requires_grad) if isinstance(value, Tensor) else type(value)


def as_tensor(value: float | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def called(place: Place) -> str:
    """In words."""
    return ".".join(("self", *filter(None, place)))


def path_of(place: Place) -> str:
    """Which flat input of a trace it is."""
    return f"['{ARGUMENT}']['{called(place)}']"


def is_counted(path: str) -> bool:
    """Whether a flat input of a trace is such a number."""
    return path.startswith(f"['{ARGUMENT}']")


def with_counted(kwargs: Mapping[str, Any], model: nn.Module, places: Sequence[Place]) -> dict[str, Any]:
    """Named arguments, and these numbers of the model among them."""
    if not places:
        return dict(kwargs)
    modules = dict(model.named_modules(remove_duplicate=False))
    numbers = {called(place): as_tensor(vars(modules[place[0]])[place[1]]) for place in places}
    return {**kwargs, ARGUMENT: numbers}


def is_number(value: Any) -> bool:
    """Whether something may count with it: a truth is a flag."""
    return isinstance(value, (int, float)) and not isinstance(value, (bool, Number))


def counted_in(
    attributes: Mapping[Place, Any], written: Mapping[Place, tuple[Any, Any, str]], there: Mapping[str, nn.Module]
) -> list[Place]:
    """Numbers, and tensors that are no buffers, among the attributes that forward reads, and makes anew."""
    return sorted(
        place
        for place, (was, after, _) in written.items()
        if place in attributes and may_be_counted(vars(there[place[0]]).get(place[1], MISSING))
        if _is_another_number(was, after) or (_is_tensor(was) and _is_tensor(after) and was is not after)
    )


def _is_another_number(was: Any, after: Any) -> bool:
    return is_number(was) and (isinstance(after, Number) or (is_number(after) and was != after))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def may_be_counted(value: Any) -> bool:
    """Whether a program may take it as an argument."""
    return is_number(value) or _is_tensor(value)


class Counted(Number):
    """A number that is known when a call begins. `now`: what it is in the call that is traced; `formula`: what it is in
    others; `made`: it as a tensor. Whoever asks for its truth is answered, and `counting` notes it.
    """

    def __init__(self, now: Any, of: Of, made: Callable[[], Number], counting: Counting) -> None:
        self.now, self.formula = now, Formula(of)
        self._made, self._counting = made, counting
        self._number: Number | None = None

    @property
    def __class__(self) -> type:  # what `isinstance` asks, of int and of numbers.Number too
        return type(self.now)

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self.now), name):  # bit_length, is_integer
            self._at_once()
        raise AttributeError(name)

    def _at_once(self, *_: Any) -> Any:
        self._counting.needed = True
        return super()._at_once()

    __int__ = __float__ = __index__ = __complex__ = __trunc__ = __hash__ = _at_once

    def __repr__(self) -> str:
        return self._at_once()

    def __format__(self, _: str) -> str:
        return self._at_once()

    def __copy__(self) -> Counted:
        return self

    def __deepcopy__(self, _: Any) -> Counted:
        return self

    @property
    def _as_number(self) -> Number:
        if self._number is None:
            if _is_large(self.now):
                self._at_once()
            self._counting.met.append(self.formula)
            self._number = self._made()
        return self._number

    @property
    def tensor(self) -> Tensor:  # type: ignore[override]
        """It as an argument of the program, or made of some."""
        return self._as_number.tensor

    @property
    def _checks(self) -> Checks:  # type: ignore[override]
        return self._as_number._checks

    @property
    def like(self) -> bool | int | float:
        """A number of the same type."""
        return type(self.now)(1)

    def of_two(self, name: str, other: Any, is_reversed: bool = False) -> Any:
        """As of any number; of two that are known it is known, too."""
        if not isinstance(other, (Counted, bool, int, float)):
            return super().of_two(name, other, is_reversed)
        python = {**BINARY, **COMPARED}[name][0]
        of, other_of = self.formula.of, other.formula.of if isinstance(other, Counted) else lambda _: other
        first, second = (other_of, of) if is_reversed else (of, other_of)
        theirs = other.now if isinstance(other, Counted) else other
        now = python(theirs, self.now) if is_reversed else python(self.now, theirs)
        return Counted(
            now, lambda values: python(first(values), second(values)),
            lambda: Number.of_two(self._as_number, name, other, is_reversed), self._counting,
        )  # fmt: skip

    def _of_one(self, python: Callable[[Any], Any], made: Callable[[Number], Number]) -> Counted:
        of = self.formula.of
        return Counted(
            python(self.now), lambda values: python(of(values)), lambda: made(self._as_number), self._counting
        )

    def __abs__(self) -> Counted:
        return self._of_one(operator.abs, Number.__abs__)

    def __round__(self, digits: int | None = None) -> Counted:
        def made(number: Number) -> Number:
            return Number.__round__(number) if digits is None else self._at_once()  # torch rounds to digits otherwise

        return self._of_one(lambda value: round(value, digits), made)

    def __floor__(self) -> Counted:
        return self._of_one(math.floor, lambda number: Number(number.tensor.floor().long(), number._checks))

    def __ceil__(self) -> Counted:
        return self._of_one(math.ceil, lambda number: Number(number.tensor.ceil().long(), number._checks))

    def __bool__(self) -> bool:
        self._counting.asked.append((self.formula, bool(self.now)))
        return bool(self.now)


def counted_from(
    given: Mapping[str, Tensor], counting: Counting, modules: Mapping[str, nn.Module], checks: Checks
) -> list[Counted | Tensor]:
    """The numbers that are there, with `given` in their place where tensors are, and in the place of tensors. What is
    asked is noted anew.
    """
    counting.asked.clear()
    counting.met.clear()
    made: list[Counted | Tensor] = []
    for at, (place, value) in enumerate(zip(counting.places, counting.values(modules), strict=True)):
        tensor = given[called(place)]
        if isinstance(value, Tensor):
            made.append(tensor)
            continue
        made.append(
            Counted(
                value,
                lambda values, at=at: values[at],
                lambda tensor=tensor: Number(tensor, checks),
                counting,
            )
        )
    return made


def signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    """That of a forward which is given counted numbers, too."""
    signature = inspect.signature(forward)
    added = inspect.Parameter(ARGUMENT, inspect.Parameter.KEYWORD_ONLY)
    parts = sorted([*signature.parameters.values(), added], key=lambda one: one.kind)
    return signature.replace(parameters=parts)
