"""Writes to picked rows (`masked.Picked`), in place: `rows += 1`, `rows[:, 0] = left`, `relu(rows, inplace=True)`. What
rows are is a whole tensor, which looks at them look at: it is written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.trace.places import refused
from autopar.trace.reshaped import beside, of_each_row

Picked = Any  # of `autopar.trace.masked`, which calls what is here


def name_of(func: Any) -> str:
    """Without what says that it is a method, or writes in place."""
    told = getattr(func, "__name__", str(func)).removeprefix("linalg_")
    name = told.strip("_")
    return name[1:] if _is_of_python_in_place(told) else name


def in_place(func: Any, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """What gives the values that `func` writes to its first argument; None: it writes none."""
    told = getattr(func, "__name__", str(func))
    if kwargs.get("inplace") or (told.endswith("_") and told.strip("_") in GIVEN):  # `torch.fill` makes another
        return func
    if _is_of_python_in_place(told):
        return getattr(torch.Tensor, f"__{told.strip('_')[1:]}__")
    if not told.endswith("_") or told.endswith("__"):
        return None
    if (plain := getattr(torch.Tensor, told[:-1], None)) is None:
        raise refused(f"{told} in place")
    return plain


def _is_of_python_in_place(told: str) -> bool:
    return told.startswith("__i") and hasattr(torch.Tensor, f"__{told[3:]}") and told != "__invert__"


def _at(rows: Picked, index: Any, value: Any) -> tuple[Picked, Any]:
    is_mask = isinstance(index, type(rows)) and index.dtype == torch.bool and index.key == rows.key
    if not is_mask:
        return of_each_row(rows, index), value
    if index.row and (index.row != rows.row or getattr(value, "ndim", 0)):
        raise refused("setitem in place, of numbers that another mask picks,")
    made: Any = value.dense if isinstance(value, type(rows)) and value.key == rows.key else value
    if isinstance(made, type(rows)) or (isinstance(made, Tensor) and made.ndim > len(rows.row) and made is value):
        raise refused("setitem in place, of other rows,")
    index, made = beside(index.dense, rows.dense), torch.as_tensor(made, dtype=rows.dtype, device=rows.device)
    return rows, rows.like(torch.where(index, made, rows.dense))


# What writes values that it is given: (the part of each row that is written to, values).
GIVEN: dict[str, Callable[..., tuple[Picked, Any]]] = {
    "setitem": _at,
    "zero": lambda rows: (rows, 0),
    "fill": lambda rows, value: (rows, value),
    "copy": lambda rows, source: (rows, source),
}


def as_new(rows: Picked, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """What these rows are written by is called with: a copy of them, which backward may have, and that is written to
    by nobody.
    """
    copy = rows.like(rows.dense.clone())
    args = [copy if one is rows else one for one in args]
    return args, {name: copy if one is rows else one for name, one in kwargs.items() if name != "inplace"}


def write(rows: Picked, part: Picked, values: Any, name: str) -> Picked:
    """Let a part of each of these rows have these values."""
    branches = rows.origins.checks.branches
    if (
        part.key != rows.key
        or rows.places is not None
        or rows.columns
        or not branches.tensors.are_fresh(rows.dense, branches.here())
    ):
        raise refused(f"{name} in place")
    if isinstance(values, type(rows)):
        if values.key != rows.key or len(values.row) > len(part.row):
            raise refused(f"{name}, in place and of other rows,")
        dims = rows.mask.shape
        ones = [1] * (len(part.row) - len(values.row))
        values = values.dense.reshape(*dims, *ones, *values.row)
    elif isinstance(values, Tensor) and values.ndim > len(part.row):
        raise refused(f"{name}, in place and of a tensor of other rows,")
    rows.origins.forget([rows.dense])
    if isinstance(values, Tensor):
        part.dense.copy_(values)
    else:
        part.dense.fill_(values)
    return rows
