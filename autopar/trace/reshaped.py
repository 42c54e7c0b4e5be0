"""Other shapes of picked rows (`masked.Picked`): of each row, of as many for each of a batch, of values that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.trace.lines import line_here
from autopar.trace.numbers import Number
from autopar.trace.origins import Origins
from autopar.trace.places import refused

Picked = Any  # of `autopar.trace.masked`, which calls what is here
NOT_AS_MANY = (
    "forward takes one of the rows that a mask picks for each of a batch{}, and the mask picks more for one than for "
    "another, or not so many"
)


def sizes_of(args: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes as functions of torch are given them; -1 for the number of rows, which may stand there."""
    sizes = tuple(args[0]) if len(args) == 1 and isinstance(args[0], list | tuple) else tuple(args)
    return tuple(-1 if isinstance(one, (Tensor, Number)) else one for one in sizes)


def reshaped(name: str, rows: Picked, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if name == "flatten":
        start, end = (*args, *(kwargs.get(one) for one in ("start_dim", "end_dim")[len(args) :]))
        shape: tuple[Any, ...] = (-1,) if not start else (-1, product(rows.row))
        if start not in (None, 0, 1) or end not in (None, -1):
            raise refused(name)
    else:
        shape = sizes_of(args)
        if shape[:1] == (-1,) and shape.count(-1) == 2:  # their number, and what is left
            left = product(rows.row) // max(product([size for size in shape if size != -1]), 1)
            shape = (-1, *(left if size == -1 else size for size in shape[1:]))
    is_each = rows.mask.ndim == 2 and shape[:2] == (len(rows.mask), -1)
    if is_each and product(shape[2:]) == product(rows.row):
        return ForEach(rows.like(rows.dense.reshape(*rows.mask.shape, *shape[2:])))
    if (kwargs and name != "flatten") or shape[:1] != (-1,):
        raise refused(name)
    if shape == (-1,) and product(rows.row) == 1:
        return rows.like(rows.dense.reshape(rows.mask.shape))
    if shape == (-1,):
        mask = beside(rows.mask, rows.dense).expand_as(rows.dense)
        return type(rows)(rows.dense, mask, ("each number of", rows.key, rows.row), rows.origins)
    if product(shape[1:]) != product(rows.row):
        raise refused(name)
    return rows.like(rows.dense.reshape(*rows.mask.shape, *shape[1:]))


def of_each_row(rows: Picked, index: Any) -> Picked:
    """The same part of each row, or the rows that a further mask picks from them."""
    head, *rest = index if isinstance(index, tuple) else (index,)
    if isinstance(head, type(rows)) and head.dtype == torch.bool and rows.row[: len(head.row)] == head.row:
        rows.origins.hold(head)
        mask = beside(rows.mask, head.dense) & head.dense
        picked = type(rows)(rows.dense.clone(), mask, ("and", rows.key, id(head)), rows.origins)
        return of_each_row(picked, (slice(None), *rest)) if rest else picked
    is_all = isinstance(head, slice) and head == slice(None)
    if rows.columns and is_all and len(rest) == 1 and type(rest[0]) is int:
        return rows.columns[rest[0]]
    if any(not (part is None or part is Ellipsis or isinstance(part, int | slice)) for part in rest):
        raise refused("such an index")
    if head is Ellipsis and sum(part is not None for part in rest) <= len(rows.row):
        return rows.like(rows.dense[(Ellipsis, *rest)])
    if is_all:
        return rows.like(rows.dense[(*[slice(None)] * rows.mask.ndim, *rest)])
    raise refused("an index of their number")


class ForEach:
    """Rows picked from [batch, steps], as many for each of the batch: `x[ids == end].view(len(x), -1, width)`."""

    def __init__(self, rows: Picked) -> None:
        self.rows = rows

    def __getitem__(self, index: Any) -> Tensor:
        """One of each: `[:, -1]`, `[:, 0, :]`."""
        first, number, *rest = index if isinstance(index, tuple) else (index, None)
        if first != slice(None) or type(number) is not int:
            raise refused("an index of their number")
        mask = self.rows.mask
        counts = mask.sum(1)
        wanted = number + 1 + (torch.zeros_like(counts) if number >= 0 else counts)
        is_wrong = (counts != counts[:1]) | (wanted < 1) | (wanted > counts)
        self.rows.origins.checks.add(NOT_AS_MANY.format(line_here()), is_wrong)
        found = self.rows.like(self.rows.dense)
        found.mask = mask & (mask.cumsum(1) == wanted.unsqueeze(1))
        return found.kept().sum(1)[(slice(None), *rest)]

    def __getattr__(self, name: str) -> Any:
        raise refused(f".{name}")


def of_runs(kind: type, values: Tensor, is_sorted: bool, origins: Origins) -> Picked:
    """`torch.unique` (`is_sorted`) and `unique_consecutive`: the first of each run of equal values."""
    values = values.detach().reshape(-1)
    values = values.sort()[0] if is_sorted else values
    is_first = torch.ones_like(values[:1], dtype=torch.bool)
    mask = torch.cat([is_first, values[1:] != values[:-1]])
    return kind(values, mask, origins.of(mask), origins)


def product(sizes: Sequence[int]) -> int:
    return torch.Size(sizes).numel()


def beside(mask: Tensor, value: Tensor) -> Tensor:
    """The mask with dims of one behind, to stand beside `value`."""
    return mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim))


def rooted(variance: Tensor) -> Tensor:
    """The root, which has a derivative of 0 where there is no variance, as torch's std has."""
    is_zero = variance == 0
    return torch.where(is_zero, 0, torch.where(is_zero, 1, variance).sqrt())
