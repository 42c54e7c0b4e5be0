"""Numbers that Python computes before a call, of such that are known then (`autopar.trace.counted`)."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar._compat import pytree
from autopar.trace.checks import Checks
from autopar.trace.lines import line_here
from autopar.trace.numbers import BINARY, COMPARED, Number
from autopar.trace.values import held_in
from autopar.trace.writes import refill

Place = tuple[str, str]  # path of a module, name of an attribute
Of = Callable[[Sequence[Any]], Any]  # a number, of those that are there
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
BY_METHODS = ("floor", "ceil", "trunc")  # of numbers


@dataclass(frozen=True)
class Formula:
    """What a number is, of those that are there when a call begins: `places` of them."""

    of: Of
    places: frozenset[Place]


@dataclass
class Asked:
    """`answers`: what forward asks of numbers, in order, and the answers that a program has; also whether those that
    met tensors, or led to it, are too large for one, and whether it is an error. `pinned`: where numbers are that
    forward needs as numbers of Python, and which line does: a program is for one value.
    """

    answers: list[tuple[Of, Any]] = field(default_factory=list[tuple[Of, Any]])
    pinned: dict[Place, str] = field(default_factory=dict[Place, str])

    def holds(self, numbers: Sequence[Any]) -> bool:
        """Whether all is answered so for these, too."""
        return all(of(numbers) == answer for of, answer in self.answers)


def is_large(value: Any) -> bool:
    """Whether it is an integer that no tensor holds."""
    return isinstance(value, int) and abs(value) >= 2**63


class Counted(Number):
    """A number that is known when a call begins. `now`: what it is in the call that is traced; `formula`: what it is in
    others; `made`: it in the program. Whoever asks for its truth is answered, and `asked` notes it.
    """

    def __init__(self, now: Any, formula: Formula, made: Made, asked: Asked) -> None:
        self.now, self.formula = now, formula
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
        of, is_error = self.formula.of, _raises(python, self.now)
        self.asked.answers.append((lambda values: _raises(python, of(values)), is_error))
        now = python(self.now)
        self.asked.answers.append((lambda values: repr(python(of(values))), repr(now)))
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
        if self._number is None:
            assert self.made is not None
            self.asked.answers.append((lambda values: is_large(self.formula.of(values)), False))
            self._number = self.made()
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
        self.asked.answers.append((lambda values: bool(self.formula.of(values)), bool(self.now)))
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
    ofs = [one.formula.of if isinstance(one, Counted) else (lambda _, one=one: one) for one in args]
    formula = Formula(
        lambda values: python(*(of(values) for of in ofs)),
        frozenset[Place]().union(*(one.formula.places for one in counted)),
    )
    known = tuple(one.now if isinstance(one, Counted) else one for one in args)
    if python not in NEVER_RAISE:  # code may go on from there
        is_error = _raises(lambda given: python(*given), known)
        counted[0].asked.answers.append((lambda values: _raises(formula.of, values), is_error))
    now = python(*known)
    if any(one.made is None or is_large(one.now) for one in counted):
        made = None
    return Counted(now, formula, made, counted[0].asked)


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


@contextlib.contextmanager
def math_of_counted() -> Iterator[None]:
    """Inside, Python's `math` takes them, too."""
    functions = {
        name: function
        for name, function in vars(math).items()
        if callable(function) and not name.startswith("_") and name not in BY_METHODS
    }
    for name, function in functions.items():
        setattr(math, name, _taking_counted(name, function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(math, name, function)


def _taking_counted(name: str, python: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not any(type(one) is Counted for one in args):
            return python(*args, **kwargs)
        return computed(python, args, made_by(name, args))

    return function


class _StandsFor:
    """Stands for `type`, `int` or `float` in code that may ask them of a counted number."""

    def __init__(self, kind: Any, of_counted: Callable[[Counted], Any]) -> None:
        self._kind, self._of_counted = kind, of_counted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is Counted:
            return self._of_counted(args[0])
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


STAND_IN = {
    "type": _StandsFor(type, lambda number: type(number.now)),
    "float": _StandsFor(
        float, lambda number: number.of_one(float, lambda one: Number(one.tensor.double(), one._checks))
    ),
    "int": _StandsFor(
        int,
        lambda number: number.of_one(int, lambda one: Number(one.tensor.trunc().long(), one._checks)),
    ),
}


@contextlib.contextmanager
def types_of_counted(asking: Iterable[tuple[dict[str, Any], Set[str]]]) -> Iterator[None]:
    """Inside, functions with these globals that ask for the type of a counted number are told the one of Python's, and
    those that make it an int or a float get a formula. Where one compares types with `is`, `int` and `float` are
    those of Python: what comes of them is a number of Python's.
    """
    wanted, compared = dict[tuple[int, str], dict[str, Any]](), set[tuple[int, str]]()
    for names, asked in asking:
        wanted |= {(id(names), name): names for name in asked & STAND_IN.keys() - names.keys()}
        if "is" in asked:
            compared |= {(id(names), name) for name in ("int", "float")}
    shadowed = [(names, place[1]) for place, names in wanted.items() if place not in compared]
    for names, name in shadowed:
        names[name] = STAND_IN[name]
    try:
        yield
    finally:
        for names, name in shadowed:
            del names[name]
