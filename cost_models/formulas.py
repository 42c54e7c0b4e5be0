"""Closed forms: sympy expressions in the place of sizes, with the arithmetic of whole numbers.

    batch, ranks = symbol("batch"), symbol("data")
    TensorType((batch, 768), "float32").nbytes      3072*batch
    COLLECTIVES["all_gather"].received(ranks, n)    n*(data - 1)/data

There is no second set of formulas: what computes flops, bytes and pieces from numbers is run on `Form`s, and gives the
formula of these numbers. Two things are taken for granted of a symbol, because they hold of every plan: it is larger
than one, and what is split divides evenly, so that // divides exactly and % leaves nothing.
"""

# pyright: basic

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from math import inf, prod
from typing import Any

import sympy

Powers = tuple[tuple[str, int], ...]  # symbols and their exponents, by name
Number = int | float | Fraction


class Form:
    """A sympy expression that passes for a number wherever a size, a count or a number of bytes is computed with."""

    __slots__ = ("expr",)

    def __init__(self, expr: Any) -> None:
        self.expr: Any = _exact(expr)

    def __add__(self, other: Any) -> Form:
        return Form(self.expr + _exact(other))

    def __sub__(self, other: Any) -> Form:
        return Form(self.expr - _exact(other))

    def __rsub__(self, other: Any) -> Form:
        return Form(_exact(other) - self.expr)

    def __mul__(self, other: Any) -> Form:
        return Form(self.expr * _exact(other))

    def __truediv__(self, other: Any) -> Form:
        return Form(self.expr / _exact(other))

    def __rtruediv__(self, other: Any) -> Form:
        return Form(_exact(other) / self.expr)

    def __mod__(self, other: Any) -> int:
        return 0

    __rmod__ = __mod__
    __radd__, __rmul__ = __add__, __mul__
    __floordiv__, __rfloordiv__ = __truediv__, __rtruediv__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form | int | float | Fraction) and self.expr == _exact(other)

    def __hash__(self) -> int:
        return hash(self.expr)

    def __bool__(self) -> bool:
        return self.expr != 0

    def __lt__(self, other: Any) -> bool:
        return self._order(other) < 0

    def __le__(self, other: Any) -> bool:
        return self._order(other) <= 0

    def __gt__(self, other: Any) -> bool:
        return self._order(other) > 0

    def __ge__(self, other: Any) -> bool:
        return self._order(other) >= 0

    def _order(self, other: Any) -> int:
        """Above every number up to one, and finite; two forms, or a form and a larger number, have no order."""
        if other == inf:
            return -1
        if self.expr.is_number:
            left, right = fraction(self.expr), fraction(_exact(other))
            return (left > right) - (left < right)
        if isinstance(other, Form) or other > 1:
            raise TypeError(f"whether {self} is less than {other} depends on the sizes")
        return 1

    def __repr__(self) -> str:
        return str(self.expr)


def symbol(name: str) -> Any:
    """A size called `name`. Typed as Any, as it stands in for whole numbers."""
    return Form(sympy.Symbol(name, positive=True))


def fraction(expr: Any) -> Fraction:
    """The exact value of a form without symbols, or of a number."""
    value = _exact(expr)
    return Fraction(int(value.p), int(value.q))


def at(form: Form | Number, values: Mapping[str, int]) -> Fraction:
    """The exact value where each symbol has its value."""
    try:
        found = terms(form)
    except ValueError:
        expr = _exact(form)
        return fraction(expr.xreplace({known: sympy.Integer(values[known.name]) for known in expr.free_symbols}))
    return sum(
        (times * prod(Fraction(values[name]) ** power for name, power in powers) for powers, times in found.items()),
        Fraction(0),
    )


@cache
def _terms(expr: Any) -> tuple[tuple[Powers, Fraction], ...]:
    found: dict[Powers, Fraction] = {}
    for product, times in sympy.expand(expr).as_coefficients_dict().items():
        powers = {} if product == 1 else product.as_powers_dict()
        names = tuple(sorted((base.name, int(power)) for base, power in powers.items()))
        found[names] = found.get(names, Fraction(0)) + fraction(times)
    return tuple(sorted((names, times) for names, times in found.items() if times))


def terms(form: Form | Number) -> dict[Powers, Fraction]:
    """The form as a sum: product of powers -> its coefficient. ValueError where it is no such sum."""
    try:
        return dict(_terms(_exact(form)))
    except AttributeError:
        raise ValueError(f"{form} is no sum of products of powers") from None


def factored(form: Form) -> Form:
    """The same with common factors in front: 2*(data - 1)/data."""
    return Form(sympy.factor(form.expr))


def form_of(sum_of: Mapping[Powers, Fraction]) -> Form:
    """Inverse of `terms`."""
    found = sympy.Integer(0)
    for powers, times in sum_of.items():
        product = _exact(times)
        for name, power in powers:
            product *= symbol(name).expr ** power
        found += product
    return Form(found)


def _exact(value: Any) -> Any:
    match value:
        case Form():
            return value.expr
        case Fraction():
            return sympy.Rational(value.numerator, value.denominator)
        case float():
            return sympy.Rational(value)  # what the bits say: 2.0 is 2, and half of it 1
        case _:
            return sympy.sympify(value)
