"""What is chosen behind a branch by hidden values: names, entries and lists are what it makes them where it is taken,
else what they were (`autopar.trace.branches`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.errors import TraceError
from autopar.trace.bodies import VALUE
from autopar.trace.branch import Branch
from autopar.trace.closures import with_parts
from autopar.trace.converted import Converted
from autopar.trace.gathered import Gathered
from autopar.trace.lines import line_here
from autopar.trace.values import MISSING

ASSIGNS = (
    "forward assigns {} {}, where {}: behind that a program chooses between tensors of one shape and dtype. Have it "
    "be one either way"
)
ORDER = "forward puts {} into a dict {} in another order than where that is not taken: do it in one order"


class Choices:
    """Those of one forward. `number`: the type of numbers of each call (`autopar.trace.numbers.Number`); `rows`: that
    of rows (`autopar.trace.masked.Picked`).
    """

    def __init__(self, tensors: Converted, checks: Any, number: Any, rows: Any) -> None:
        self._tensors, self._checks, self._number, self._rows = tensors, checks, number, rows

    def behind(self, branch: Branch, held: Mapping[str, Any] | None) -> dict[str, Any]:
        """Names behind a branch, of which it has left those that are `held`; None: nobody reads them. Sets entries."""
        for one in branch.entries:
            if one.lies not in (None, one.place):
                raise TraceError(ORDER.format(one.told, branch.where))
            if (new := one.now()) is not one.otherwise:
                one.put(self.of_two(one.told, branch, new, one.otherwise))
        if held is None:
            return {}
        names = sorted(branch.body.assigned)
        made = {name: self.of_two(name, branch, held.get(name), branch.before[name]) for name in names}
        return made | {name: self._listed(name, branch, held.get(name)) for name in sorted(branch.lists)}

    def _listed(self, name: str, branch: Branch, found: Any) -> Gathered:
        """What a list that a branch appends to is behind it."""
        ahead = branch.lists[name]
        if found is not ahead.there and getattr(found, "source", None) is not ahead.there:
            raise TraceError(ASSIGNS.format(repr(name), branch.where, "it is a list, and else another one"))
        made = found if isinstance(found, Gathered) else Gathered(found, self._checks, self.guarded)
        new, other = made.items()[ahead.count :], ahead.otherwise
        for one, _ in new:
            if isinstance(one, Tensor):
                self._tensors.check(one, [branch])
        if len(new) == len(other) and all(truth is None for _, truth in new):
            pairs = zip(new, other, strict=True)
            made.put(ahead.count, [(self.of_two(name, branch, one, old), None) for (one, _), (old, _) in pairs])
        else:
            there = [(one, branch.truth if truth is None else truth) for one, truth in new]
            made.put(ahead.count, [*other, *there])
        return made

    def guarded(self, one: Any, truth: Tensor) -> Any:
        """A number or tensor where that is true, else zeros."""
        if isinstance(one, Tensor):
            return self._tensors.where_true(one, truth)
        zero = type(one.like)(0) if isinstance(one, self._number) else type(one)(0) if self.may_be(one) else None
        if (made := self._number_of(one, zero, truth)) is not None:
            return made
        raise TraceError(f"forward adds up a list{line_here()} in which it has put {self._told(one)} in a branch")

    def of_two(self, name: str, branch: Branch, new: Any, old: Any) -> Any:
        """What is `new` where a branch is taken, else `old`. Raises TraceError, which names it, where it cannot be."""
        match new, old:
            case _ if new is old or (type(new) is type(old) and isinstance(new, (int, float)) and new == old):
                return new
            case Tensor(), int() | float() if new.ndim == 0 and new.is_floating_point():
                with self._tensors.own():
                    return self._tensors.chosen(new, torch.full_like(new, old), branch.truth)
            case int() | float(), Tensor() if old.ndim == 0 and old.is_floating_point():
                with self._tensors.own():
                    return self._tensors.chosen(torch.full_like(old, new), old, branch.truth)
            case Tensor(), Tensor() if (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device):
                self._tensors.check(new, [branch])
                return self._tensors.one_of(new, old, branch.truth)
            case self._rows(), self._rows() if (new.key, new.row, new.dtype) == (old.key, old.row, old.dtype):
                return new.like(self.of_two(name, branch, new.dense, old.dense.reshape_as(new.dense)))
            case tuple(), tuple() if type(new) is type(old) and len(new) == len(old):
                pairs = zip(new, old, strict=True)
                return with_parts(new, [self.of_two(name, branch, *pair) for pair in pairs])
            case _ if (number := self._number_of(new, old, branch.truth)) is not None:
                return number
            case _:
                what = "what it goes on with" if name == VALUE else repr(name)
                another = "others" if isinstance(old, self._rows) else "another one"
                other = another if self._told(new) == self._told(old) else self._told(old)
                raise TraceError(ASSIGNS.format(what, branch.where, f"it is {self._told(new)}, and else {other}"))

    def _number_of(self, new: Any, old: Any, truth: Tensor) -> Any:
        are_both = all(self.may_be(one) and not isinstance(one, Tensor) for one in (new, old))
        return self._number.chosen(new, old, truth, self._checks) if are_both else None

    def may_be_ahead(self, value: Any) -> bool:
        """Whether a name may be that ahead of a branch that assigns it."""
        if isinstance(value, tuple):
            return all(map(self.may_be_ahead, value))
        return isinstance(value, self._rows) or self.may_be(value)

    def may_be(self, value: Any) -> bool:
        """Whether it is a tensor or a number."""
        return isinstance(value, (Tensor, int, float, self._number))

    def _told(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"a tensor of shape {list(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
        if isinstance(value, self._rows):
            return "rows that a mask picks"
        return (
            "not assigned"
            if value is MISSING
            else f"{value!r}"
            if isinstance(value, (int, float))
            else f"a {type(value).__name__}"
        )
