"""Numbers that Python computes before a call, of such that are known then (`autopar.trace.counted`)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar._compat import pytree
from autopar.trace.checks import Checks
from autopar.trace.lines import line_here
from autopar.trace.numbers import BINARY, COMPARED, Number
from autopar.trace.values import held_in
from autopar.trace.writes import refill

Place = tuple[Any, ...]  # path of a module, name of an attribute; and keys that lead to a list in it
Made = Callable[[], Number] | None  # a number in a program; None: no program computes it
# Functions of Python's `math`, and of numpy, and what computes them in a program.
COMPUTED = {
    **{name: getattr(torch, name) for name in (
        "exp", "exp2", "expm1", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan",
        "sinh", "cosh", "tanh", "erf", "erfc", "lgamma", "pow", "fmod", "hypot", "atan2", "square",
    )},
    "fabs": torch.abs, "radians": torch.deg2rad, "degrees": torch.rad2deg, "power": torch.pow,
    "log": lambda value, *base: torch.log(value) / torch.log(base[0]) if base else torch.log(value),
}  # fmt: skip
NEVER_RAISE = {operator.add, operator.sub, operator.mul, operator.abs, *(python for python, _ in COMPARED.values())}


@dataclass(frozen=True)
class Formula:
    """What a number is: the step of that `number` gives it, of what is at `places`."""

    number: int
    places: frozenset[Place]


class Step(NamedTuple):
    """Stands for what an earlier step gives."""

    number: int


class Computed:
    """What steps give for the numbers that are there when a call begins: each once, where it is asked for."""

    def __init__(self, steps: Sequence[tuple[Callable[..., Any] | None, tuple[Any, ...]]], numbers: Sequence[Any]):
        self._steps, self._numbers = steps, numbers
        self._made: list[tuple[Any, Exception | None]] = []

    def fails(self, number: int) -> bool:
        """Whether that step raises an error."""
        while len(self._made) <= number:  # one behind the other: a loop in forward may be thousands of them
            self._made.append(self._outcome(*self._steps[len(self._made)]))
        return self._made[number][1] is not None

    def of(self, number: int) -> Any:
        """What it gives. Raises the error."""
        self.fails(number)
        value, error = self._made[number]
        if error is not None:
            raise error
        return value

    def _outcome(self, python: Callable[..., Any] | None, args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
        if python is None:
            return self._numbers[args[0]], None
        if error := next(
            (error for one in args if isinstance(one, Step) and (error := self._made[one.number][1])), None
        ):
            return None, error
        try:
            return python(*(self._made[one.number][0] if isinstance(one, Step) else one for one in args)), None
        except Exception as error:  # of whatever kind: code may have caught it
            return None, error


@dataclass
class Asked:
    """`steps`: what Python computes of numbers, in order: a function and its arguments, or None and the place of a
    number that is there. `answers`: what forward asks of them, in order, and the answers that a program has; also
    whether those that met tensors, or led to it, are too large for one, and whether it is an error. `pinned`: where
    numbers are that forward needs as numbers of Python, and which line does: a program is for one value. `returned`:
    leaves of what forward gives that are such numbers, and the steps that give them.
    """

    steps: list[tuple[Callable[..., Any] | None, tuple[Any, ...]]] = field(default_factory=list[Any])
    answers: list[tuple[Callable[[Computed], Any], Any]] = field(default_factory=list[Any])
    pinned: dict[Place, str] = field(default_factory=dict[Place, str])
    returned: dict[int, int] = field(default_factory=dict[int, int])

    def step(self, python: Callable[..., Any] | None, args: Sequence[Any]) -> int:
        """The number of a new one."""
        self.steps.append((python, tuple(Step(one.formula.number) if type(one) is Counted else one for one in args)))
        return len(self.steps) - 1

    def holds(self, numbers: Sequence[Any]) -> bool:
        """Whether all is answered so for these, too."""
        made = Computed(self.steps, numbers)
        return all(of(made) == answer for of, answer in self.answers)


def is_large(value: Any) -> bool:
    """Whether it is an integer that no tensor holds."""
    return isinstance(value, int) and abs(value) >= 2**63


class Counted(Number):
    """A number that is known when a call begins. `now`: what it is in the call that is traced; `formula`: what it is in
    others; `made`: it in the program, of its `parts`. Whoever asks for its truth is answered, and `asked` notes it.
    """

    def __init__(self, now: Any, formula: Formula, made: Made, asked: Asked, parts: Sequence[Counted] = ()) -> None:
        self.now, self.formula, self.parts = now, formula, parts
        self.made, self.asked = made, asked
        self._number: Number | None = None

    @property
    def __class__(self) -> type:  # what `isinstance` asks, of int and of numbers.Number too
        return type(self.now)

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self.now), name):  # bit_length, is_integer
            return getattr(self.pinned(), name)
        raise AttributeError(name)

    def pinned(self, python: Callable[[Any], Any] = lambda now: now) -> Any:
        """What Python makes of it, for which a program is then made: it is equal in all calls of that."""
        number, is_error = self.formula.number, _raises(python, self.now)
        self.asked.answers.append((lambda made: _raises(python, made.of(number)), is_error))
        now = python(self.now)
        self.asked.answers.append((lambda made: repr(python(made.of(number))), repr(now)))
        for place in self.formula.places:
            self.asked.pinned.setdefault(place, line_here())
        return now

    def at_once(self, told: str) -> Any:
        return self.pinned()

    def as_given(self) -> Any:
        return self.pinned() if self.made is None or is_large(self.now) else self

    def __int__(self) -> int:
        return self.pinned(int)

    def __float__(self) -> float:
        return self.pinned(float)

    def __complex__(self) -> complex:
        return self.pinned(complex)

    def __index__(self) -> int:
        return self.pinned(operator.index)

    def __trunc__(self) -> int:
        return self.pinned(math.trunc)

    def __hash__(self) -> int:
        return hash(self.pinned())

    def __repr__(self) -> str:
        return self.pinned(repr)

    def __format__(self, text: str) -> str:
        return self.pinned(lambda now: format(now, text))

    def __copy__(self) -> Counted:
        return self

    def __deepcopy__(self, _: Any) -> Counted:
        return self

    @property
    def _as_number(self) -> Number:
        left = [self]
        while left:  # what it is made of first, one behind the other: a loop in forward may be thousands of steps
            one = left[-1]
            if missing := [other for other in one.parts if other._number is None]:
                left += missing
                continue
            left.pop()
            if one._number is None:
                one._number = one._made_now()
        assert self._number is not None
        return self._number

    def _made_now(self) -> Number:
        assert self.made is not None
        number = self.formula.number
        self.asked.answers.append((lambda made: is_large(made.of(number)), False))
        return self.made()

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
            if isinstance(other, Number) and (now := self.as_given()) is not self:  # no program computes it
                python = {**BINARY, **COMPARED}[name][0]
                return python(other, now) if is_reversed else python(now, other)
            return super().of_two(name, other, is_reversed)
        python = {**BINARY, **COMPARED}[name][0]
        pair = (other, self) if is_reversed else (self, other)
        theirs = other.now if isinstance(other, Counted) else other
        is_power = name == "pow" and isinstance(self.now, int) and isinstance(theirs, int)  # an int, or a float
        is_known = not is_power or not (is_reversed or isinstance(other, Counted) or theirs < 0)
        return computed(
            python, pair, (lambda: Number.of_two(self._as_number, name, other, is_reversed)) if is_known else None
        )

    def of_one(self, python: Callable[[Any], Any], made: Callable[[Number], Number]) -> Counted:
        """What Python makes of it, and what a program does."""
        return computed(python, (self,), lambda: made(self._as_number))

    def __abs__(self) -> Counted:
        return self.of_one(operator.abs, Number.__abs__)

    def __round__(self, digits: int | None = None) -> Counted:
        if digits is not None:  # to which torch rounds otherwise
            return computed(round, (self, digits), None)
        return self.of_one(round, Number.__round__)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """What numpy computes of it."""
        if method == "__call__" and not kwargs and all(isinstance(one, (Counted, bool, int, float)) for one in args):
            return computed(ufunc, args, made_by(ufunc.__name__, args))
        args, kwargs = pytree.tree_map(lambda one: one.pinned() if isinstance(one, Counted) else one, (args, kwargs))
        return getattr(ufunc, method)(*args, **kwargs)

    def __floor__(self) -> Counted:
        return self.of_one(math.floor, lambda number: Number(number.tensor.floor().long(), number._checks))

    def __ceil__(self) -> Counted:
        return self.of_one(math.ceil, lambda number: Number(number.tensor.ceil().long(), number._checks))

    def __bool__(self) -> bool:
        self.asked.answers.append((lambda made: bool(made.of(self.formula.number)), bool(self.now)))
        return bool(self.now)


def _bits(name: str) -> None:
    python = getattr(operator, f"{name}_" if name in ("and", "or") else name)

    def method(self: Counted, other: Any) -> Any:
        return computed(python, (self, other), None) if isinstance(other, (Counted, int)) else NotImplemented

    def turned(self: Counted, other: Any) -> Any:
        return computed(python, (other, self), None) if isinstance(other, int) else NotImplemented

    setattr(Counted, f"__{name}__", method)
    setattr(Counted, f"__r{name}__", turned)


for _name in ("and", "or", "xor", "lshift", "rshift"):
    _bits(_name)


def computed(python: Callable[..., Any], args: Sequence[Any], made: Made) -> Counted:
    """What Python computes of numbers, one of which is counted. `made`: it in the program."""
    counted = [one for one in args if isinstance(one, Counted)]
    asked = counted[0].asked
    places = frozenset[Place]().union(*(one.formula.places for one in counted))
    formula = Formula(asked.step(python, args), places)
    known = tuple(one.now if isinstance(one, Counted) else one for one in args)
    if python not in NEVER_RAISE:  # code may go on from there
        is_error = _raises(lambda given: python(*given), known)
        asked.answers.append((lambda made: made.fails(formula.number), is_error))
    now = python(*known)
    if any(one.made is None or is_large(one.now) for one in counted):
        made = None
    return Counted(now, formula, made, asked, counted)


def _raises(of: Callable[[Any], Any], of_what: Any) -> bool:
    try:
        of(of_what)
    except Exception:  # of whatever kind
        return True
    return False


def with_plain_keys(value: Any) -> Any:
    """The same, in whose dicts numbers of Python are the keys that counted ones were: asked for, they are known."""
    for part in held_in(value):
        with_plain_keys(part)
    if isinstance(value, dict) and any(type(key) is Counted for key in dict.keys(value)):
        refill(value, {plain_key(key): part for key, part in dict.items(value)})
    return value


def plain_key(key: Any) -> Any:
    return key.now if type(key) is Counted else key


def made_by(name: str, args: Sequence[Any]) -> Made:
    """What computes that function of numbers in a program."""
    if name not in COMPUTED:
        return None

    def made() -> Number:
        counted = [one for one in args if isinstance(one, Counted)]
        doubles = [
            one.tensor.double() if isinstance(one, Counted) else torch.tensor(one, dtype=torch.float64) for one in args
        ]
        return Number(COMPUTED[name](*doubles), counted[0]._checks)

    return made
