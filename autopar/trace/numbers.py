"""Numbers that forward takes out of tensors: `loss.item()`. A trace has no values, so each stands for the number that
a call will have: it may be computed with, kept as an attribute, returned and checked. What a program cannot decide may
not hang on it: sizes, and which way to go on.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.trace.checks import Checks
from autopar.trace.lines import NUMPY, line_here
from autopar.trace.origins import tensors_in, writes_in_place
from autopar.trace.reading import is_asked, is_for_reading

BINARY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # of two numbers, and where one is a tensor
    "add": (operator.add, torch.add), "sub": (operator.sub, torch.sub), "mul": (operator.mul, torch.mul),
    "truediv": (operator.truediv, torch.true_divide), "floordiv": (operator.floordiv, torch.floor_divide),
    "mod": (operator.mod, torch.remainder), "pow": (operator.pow, torch.pow),
}  # fmt: skip
COMPARED = {name: (getattr(operator, name), getattr(torch, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
BY_UFUNC = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "power": operator.pow}
BY_UFUNC |= dict.fromkeys(("true_divide", "divide"), operator.truediv)
OF_ONE = ("sqrt", "exp", "log", "sin", "cos", "tanh", "square", "floor", "ceil")
DIVIDES = ("truediv", "floordiv", "mod")
ARITHMETIC = {*BINARY, "div", "true_divide", "floor_divide", "remainder", "rsub"}
WITH_TENSORS = {
    *ARITHMETIC, *COMPARED, "clamp", "clamp_min", "clamp_max", "masked_fill", "where", "fill", "setitem", "lerp",
    "fmod", "broadcast_tensors",
}  # fmt: skip
# Functions, and which argument scales one that is added; of two of them what is made.
SCALED = {"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value"}
COMBINED = {"addcmul": torch.mul, "addcdiv": torch.div}
FILLED = {"full": 1, "full_like": 1, "new_full": 2}  # function -> which argument of it is the number
IN_PYTHON = ("torch.nn.functional", "torch.functional")  # functions there compute with what they are given
NAMED = {"input", "other", "min", "max", "value", "exponent"}  # arguments that numbers may be
INSTEAD = (
    "Leave what is asked a tensor (torch.where for if, .clamp(min=1) for max(.., 1)). What .item() gives may be "
    "computed with, kept as an attribute, returned, and checked (assert, `if ..: raise`)."
)
TEXT = "(a value of each call)"
WRITTEN = "forward writes a value into text{}: that is done once, while it is traced, and without the value"
TOO_LARGE = "forward computes an integer{} of more than 64 bits, which Python has and a program has not"
DIVIDED = "forward divides by a number{} that is 0 in this call: Python raises ZeroDivisionError there"


class HangsOnValues(TraceError):
    """What forward does hangs on values, which a trace has not."""


class Number:
    """A number of each call. `tensor`: what it is, 0-dim and of bool, int64 or float64, as Python computes."""

    def __init__(self, tensor: Tensor, checks: Checks) -> None:
        kind = torch.float64 if tensor.is_floating_point() else torch.int64
        self.tensor = tensor if tensor.dtype == torch.bool else tensor.to(kind)
        self._checks = checks

    @property
    def like(self) -> bool | int | float:
        """A number of the same type."""
        return True if self.tensor.dtype == torch.bool else 1.0 if self.tensor.is_floating_point() else 1

    def as_given(self) -> Any:
        """It, or what stands for it in a trace: a number of Python that a program holds."""
        return self

    def at_once(self, told: str) -> Any:
        """A number of Python where nothing else will do. Raises TraceError, which says `told`, where there is none."""
        if (known := self.known()) is None:
            raise TraceError(f"{told}. {INSTEAD}")
        return known

    def known(self) -> Any:
        """What it is in calls of this program alone, where arguments or draws say so; else None."""
        return self._checks.known(self.tensor)

    def of_two(self, name: str, other: Any, is_reversed: bool = False) -> Any:
        """`self name other`, of numbers or with a tensor; NotImplemented where it is something else."""
        of_numbers, of_tensors = {**BINARY, **COMPARED}[name]
        if isinstance(other, Tensor):
            return of_tensors(*((other, self) if is_reversed else (self, other)))  # which comes to `given` below
        if not isinstance(other, (Number, bool, int, float)):
            return NotImplemented
        if name in COMPARED and isinstance(other, Number) and self._checks.are_of_same_rows(self.tensor, other.tensor):
            return of_numbers(0, 0)  # how many rows there are, and once more
        other = other.as_given() if isinstance(other, Number) else other
        is_int = isinstance(other.like if isinstance(other, Number) else other, int)
        is_float = not is_int or isinstance(self.like, float) or name == "truediv"
        if name == "pow" and not is_float and (is_reversed or not isinstance(other, int) or other < 0):
            raise needed_now()  # in Python an int to the power of an int is an int or a float
        kind = torch.float64 if is_float else torch.int64
        pair = [one.tensor.to(kind) if isinstance(one, Number) else one for one in (self, other)]
        left, right = reversed(pair) if is_reversed else pair
        if name in DIVIDES and isinstance(right, Tensor):
            self._checks.add(DIVIDED.format(line_here()), right.eq(0))
        if name in ("mul", "pow") and not is_float:
            wide = of_numbers(*(one.double() if isinstance(one, Tensor) else float(one) for one in (left, right)))
            self._checks.add(TOO_LARGE.format(line_here()), wide.abs() >= 2.0**63)
        return Number(of_numbers(left, right), self._checks)

    def __neg__(self) -> Any:
        return self.of_two("sub", 0, is_reversed=True)

    def __pos__(self) -> Any:
        return self.of_two("add", 0)

    def __abs__(self) -> Number:
        return Number(self.__pos__().tensor.abs(), self._checks)

    def __round__(self, digits: int | None = None) -> Number:
        rounded = torch.round(self.tensor.double(), decimals=digits or 0)
        return Number(rounded if digits is not None and isinstance(self.like, float) else rounded.long(), self._checks)

    def __bool__(self) -> bool:
        return self.asked_by(sys._getframe(1))

    def asked_by(self, frame: FrameType) -> bool:
        """Its truth, where code of that frame asks. Raises TraceError where nobody can say."""
        with self._checks:
            wanted = self._checks.asked(self.tensor, "__bool__", frame)
            if wanted is None:
                raise hangs(self._checks.instead)
            return wanted

    @classmethod
    def chosen(cls, new: Any, old: Any, truth: Tensor, checks: Checks) -> Number | None:
        """The new number where that is true, else the old one; None where they are not two numbers of one type."""
        given = [one.as_given() if isinstance(one, Number) else one for one in (new, old)]
        kinds = {type(one.like if isinstance(one, Number) else one) for one in given}
        if kinds not in ({bool}, {int}, {float}):
            return None
        kind = torch.float64 if kinds == {float} else None
        pair = [one.tensor if isinstance(one, Number) else torch.tensor(one, dtype=kind) for one in given]
        return cls(torch.where(truth, *pair), checks)

    def _at_once(self, *_: Any) -> Any:
        with self._checks:
            if (known := self._checks.known(self.tensor)) is None:
                raise needed_now()
            return int(known)

    def _whole(self, rounded: Callable[[Tensor], Tensor]) -> Number:
        return Number(rounded(self.tensor).long(), self._checks) if self.tensor.is_floating_point() else self

    __int__ = _at_once

    def __index__(self) -> int:
        try:
            return self._at_once()
        except HangsOnValues as error:  # which torch passes over, and says that its arguments are wrong
            self._checks.needed = error
            raise

    def __float__(self) -> float:
        return float(self._at_once())

    def __complex__(self) -> complex:
        return complex(self._at_once())

    def __hash__(self) -> int:  # equal ones are one key
        return hash(self._at_once())

    def __repr__(self) -> str:
        known = None if is_for_reading() else self._checks.of_arguments(self.tensor)
        return written(self._checks) if known is None else repr(known)

    def __format__(self, spec: str) -> str:
        known = None if is_for_reading() else self._checks.of_arguments(self.tensor)
        return written(self._checks) if known is None else format(known, spec)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """What numpy computes of it, as `np.mean` of a list does, or of an array beside what is drawn."""
        if self._checks.draws is not None and any(isinstance(one, np.ndarray) for one in args):
            return self._checks.draws.computed(getattr(ufunc, method), args, kwargs)
        python = BY_UFUNC.get(ufunc.__name__)
        if method == "__call__" and ufunc.__name__ in OF_ONE and not kwargs:
            return Number(getattr(torch, ufunc.__name__)(self.tensor.double()), self._checks)
        if method != "__call__" or python is None:
            raise needed_now()
        return python(*(one.item() if isinstance(one, np.generic) else one for one in args))

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return with_numbers(func, args, kwargs or {})  # reached where no mode is in between


class Array(Number):
    """An array of numpy of each call, which a tensor is made to be: it is kept or returned, and nothing else."""

    def __init__(self, tensor: Tensor, checks: Checks) -> None:
        self.tensor, self._checks = tensor, checks

    @property
    def like(self) -> Any:
        """One of the same shape."""
        return np.zeros(tuple(self.tensor.shape))

    def copy(self) -> Array:
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def of_two(self, name: str, other: Any, is_reversed: bool = False) -> Any:
        raise _array()

    def _at_once(self, *_: Any, **__: Any) -> Any:
        raise _array()

    def __getattr__(self, name: str) -> Any:
        if hasattr(np.ndarray, name):
            raise _array()
        raise AttributeError(name)


for _name in (
    "array", "array_ufunc", "array_function", "len", "iter", "getitem", "setitem", "bool", "float", "int", "index",
    "complex", "repr", "format", "round", "abs", "matmul", "neg", "pos",
):  # fmt: skip
    setattr(Array, f"__{_name}__", Array._at_once)


def _array() -> TraceError:
    told = f"forward computes with a numpy array of a tensor{line_here()}, and a trace has no values. {NUMPY}"
    return TraceError(told)


def _operators(name: str) -> None:
    def method(self: Number, other: Any) -> Any:
        return self.of_two(name, other)

    def turned(self: Number, other: Any) -> Any:
        return self.of_two(name, other, is_reversed=True)

    setattr(Number, f"__{name}__", method)
    if name in BINARY:
        setattr(Number, f"__r{name}__", turned)


for _name in (*BINARY, *COMPARED):
    _operators(_name)
for _name in ("floor", "ceil", "trunc"):
    setattr(Number, f"__{_name}__", functools.partialmethod(Number._whole, getattr(torch, _name)))
for _name, _divided in (("divmod", lambda x, y: (x // y, x % y)), ("rdivmod", lambda x, y: (y // x, y % x))):
    setattr(Number, f"__{_name}__", _divided)


def written(checks: Checks) -> str:
    """What stands for a value in text, with a note beside the plan. Raises TraceError where that is asked for."""
    if is_asked():
        raise hangs()
    if (told := WRITTEN.format(line_here())) not in checks.notes:
        checks.notes.append(told)
    return TEXT


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def with_numbers(
    func: Any,
    args: Any,
    kwargs: Any,
    called: Callable[[Any, Any, Any], Any] = _called,
    of_tensors: Callable[[Any, Any, Any], Any] = _called,
) -> Any:
    """What `func` gives of these, some of which are `Number`s, as torch treats numbers of Python: they have no say in
    the dtype, and are not rounded to it before something is computed. `called`: what a function gives of numbers that
    are known; `of_tensors`: of tensors in their place. Raises TraceError where it takes none.
    """
    if any(isinstance(leaf, Array) for leaf in pytree.tree_leaves((args, kwargs))):
        raise _array()
    args, kwargs = _given((args, kwargs))
    if not any(isinstance(leaf, Number) for leaf in pytree.tree_leaves((args, kwargs))):
        return of_tensors(func, args, kwargs)
    name = getattr(func, "__name__", "")
    in_place, known = writes_in_place(name, kwargs), name.strip("_")
    known = known if known in WITH_TENSORS or not name.startswith("__") else known[1:]  # __itruediv__, __rtruediv__
    if known in MADE:
        return MADE[known](*args, **kwargs)
    if known in FILLED:
        return _filled(func, FILLED[known], args, kwargs, called)
    if isinstance(kwargs.get(SCALED.get(known, "")), Number) and "out" not in kwargs:
        return _scaled(known, args, {**kwargs}, in_place, of_tensors)
    if known not in WITH_TENSORS or any(isinstance(one, Number) for key, one in kwargs.items() if key not in NAMED):
        if isinstance(func, types.FunctionType) and func.__module__ in IN_PYTHON:
            return func(*args, **kwargs)
        return _at_once(func, f"a number out of a tensor is given to {name or func}{line_here()}", args, kwargs, called)
    mask = {"where": 0, "masked_fill": 1}.get(known)
    tensors = tensors_in([one for place, one in enumerate(args) if place != mask])
    if not tensors:
        return _at_once(func, f"{name} is given numbers out of tensors alone{line_here()}", args, kwargs, called)
    first = tensors[0]
    widened = known in ARITHMETIC and not in_place and first.dtype in (torch.bfloat16, torch.float16)

    def value(one: Any) -> Any:
        if not isinstance(one, Number):
            return one.float() if widened and isinstance(one, Tensor) else one
        return one.tensor.to(torch.float32 if widened else torch.result_type(first, one.like))

    args, kwargs = pytree.tree_map(value, (args, kwargs))
    made = of_tensors(func, args, kwargs)
    return made.to(first.dtype) if widened else made


def _given(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.as_given() if isinstance(leaf, Number) else leaf, value)


def _at_once(func: Any, told: str, args: Any, kwargs: Any, called: Callable[[Any, Any, Any], Any]) -> Any:
    """What it gives of numbers of Python's. Raises TraceError where nobody has them."""
    known = pytree.tree_map(lambda leaf: leaf.at_once(told) if isinstance(leaf, Number) else leaf, (args, kwargs))
    return called(func, *known)


def _filled(func: Any, place: int, args: Any, kwargs: Any, called: Callable[[Any, Any, Any], Any]) -> Tensor:
    """As `torch.full(size, number)`."""
    number = args[place] if len(args) > place else kwargs["fill_value"]
    if not isinstance(number, Number):  # a size is one
        return _at_once(func, f"a size is a number out of a tensor{line_here()}", args, kwargs, called)
    args, kwargs = pytree.tree_map(lambda leaf: leaf.like if leaf is number else leaf, (args, kwargs))
    made = func(*args, **kwargs)
    return made.fill_(number.tensor.to(made.dtype))


def _scaled(name: str, args: Any, kwargs: Any, in_place: bool, called: Callable[[Any, Any, Any], Any]) -> Tensor:
    """As `torch.add(first, other, alpha=number)` and `torch.addcmul(first, one, other, value=number)`."""
    first, *others = *args, *(kwargs[key] for key in ("other", "tensor1", "tensor2") if key in kwargs)
    number = kwargs[SCALED[name]]
    is_half = first.dtype in (torch.bfloat16, torch.float16)
    wide, *others = [one.float() if is_half and isinstance(one, Tensor) else one for one in (first, *others)]
    scaled = number * others[0] if len(others) == 1 else number * (COMBINED[name](*others))
    made = torch.sub(wide, scaled) if name == "sub" else torch.add(wide, scaled)
    made = made.to(first.dtype) if is_half else made
    return called(torch.Tensor.copy_, (first, made), {}) if in_place else made


def _new_tensor(like: Tensor, data: Any, *, dtype: torch.dtype | None = None, **others: Any) -> Tensor:
    return _tensor_of(data, dtype=dtype or like.dtype, **others)


def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, **others: Any) -> Tensor:
    return _tensor_of(value, dtype=dtype or torch.get_default_dtype(), **others)


def _tensor_of(data: Any, dtype: torch.dtype | None = None, *_: Any, **others: Any) -> Tensor:
    """As `torch.tensor(data, ..)`, of lists with numbers of each call, or tensors, in them."""
    kind = dtype or functools.reduce(torch.promote_types, map(_kind_of, pytree.tree_leaves(data)))

    def made(one: Any) -> Tensor:
        if isinstance(one, (list, tuple)):
            return torch.stack([*map(made, one)])
        one = one.tensor if isinstance(one, Number) else one
        return one.detach().to(kind, copy=True) if isinstance(one, Tensor) else torch.tensor(one, dtype=kind)

    return made(data).requires_grad_(others.get("requires_grad", False))


def _kind_of(value: Any) -> torch.dtype:
    """Of a tensor of such numbers."""
    like = value.like if isinstance(value, Number) else value
    return like.dtype if isinstance(like, Tensor) else torch.tensor(like).dtype


def made_of_tensors(func: Any, args: Any, kwargs: Any) -> Callable[[], Tensor] | None:
    """What gives `torch.tensor` of a list of tensors, which torch reads one by one; None: it is something else."""
    makes = func in (torch.tensor, torch.as_tensor) and isinstance(args[0], (list, tuple))
    if not makes or not any(isinstance(one, Tensor) for one in pytree.tree_leaves(args[0])):
        return None
    return lambda: _tensor_of(*args, **kwargs)


MADE = {"tensor": _tensor_of, "as_tensor": _tensor_of, "new_tensor": _new_tensor, "scalar_tensor": _scalar_tensor}


def hangs(more: str = "") -> TraceError:
    """`more`: what else to do."""
    return HangsOnValues(
        f"which way forward goes depends on values{line_here()}, and a program goes one way. {INSTEAD}{more}"
    )


def needed_now() -> TraceError:
    return HangsOnValues(
        f"forward needs a number out of a tensor at once{line_here()}, and a trace has no values. {INSTEAD}"
    )
