"""Rows that a boolean mask picks: how many there are depends on values, which a program cannot; what is made of them
need not.

`logits[mask]` becomes a `Picked`: the whole tensor beside the mask. What is done to each row by itself is done to all
rows, a mean or loss counts those that were picked. Numbers and gradients are those of the picked rows alone: rows left
out are replaced before anything is computed of them, and what comes of them is dropped, so a NaN there reaches nobody.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.trace.gathered import Gathered
from autopar.trace.indices import (
    WRITES,
    apart,
    expanded,
    guarded,
    indices_in,
    nonzero_of,
    places_of,
    read_all,
    read_at,
    values_at,
    written_at,
)
from autopar.trace.lines import line_here
from autopar.trace.origins import Origins
from autopar.trace.picked_writes import GIVEN, as_new, in_place, name_of, write
from autopar.trace.places import is_mask, refused
from autopar.trace.reshaped import beside, of_each_row, of_runs, product, reshaped
from autopar.trace.rows import ALONG, CATS, ELEMENTWISE, LOSSES, OF_A_BATCH, OPERATORS, ROWWISE
from autopar.trace.standing import Ahead, Listed, as_rows, permuted, transposed, turns
from autopar.trace.together import (
    LIKES,
    OVER_ROWS,
    counts,
    dropped,
    gathered,
    normed_over_rows,
    one_by_one,
    over_rows,
    padded,
    product_of_each,
    put_together,
)
from autopar.trace.wholes import arguments_of, class_loss, loss, whole

OF_RUNS = ("return_inverse", "return_counts", "dim")  # of which nothing is known


class Picked:
    """The rows of `dense` (the dims of `mask`, then those of a row) where `mask` is true, in their order.

    Stands for a tensor of shape [number of true, *dims of a row]; `count` is that number, as a tensor.
    """

    def __init__(self, dense: Tensor, mask: Tensor, key: Any, origins: Origins) -> None:
        self.dense, self.mask, self.key, self.origins = dense, mask, key, origins
        # Of the dim `place` of the mask, which `nonzero` gave, where they are made of these; and one for each dim.
        self.places: Tensor | None = None
        self.place, self.columns = 0, tuple[Picked, ...]()
        branches = origins.checks.branches
        branches.tensors.sees_rows(dense, branches.here())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return apply(func, args, kwargs or {})  # reached where no mode is in between

    @property
    def mask(self) -> Tensor:
        if self._mask._version != self._version:
            raise TraceError(
                f"forward writes to a mask that it has picked rows by, and goes on with these{line_here()}: write to a "
                "clone of it"
            )
        return self._mask

    @mask.setter
    def mask(self, mask: Tensor) -> None:
        self._mask, self._version = mask, mask._version

    @property
    def row(self) -> tuple[int, ...]:
        """The dims of one row."""
        return tuple(self.dense.shape[self._mask.ndim :])

    @property
    def count(self) -> Tensor:
        made = self.mask.sum()
        self.origins.checks.is_count(made, self.key, self.mask)
        return made

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.origins.checks.number(self.count), *self.row)

    @property
    def ndim(self) -> int:
        return 1 + len(self.row)

    @property
    def dtype(self) -> torch.dtype:
        return self.dense.dtype

    @property
    def device(self) -> torch.device:
        return self.dense.device

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Any:
        return self.shape[0] if (each := product(self.row)) == 1 else self.shape[0] * each

    nelement = numel

    def asked_for_length(self, frame: FrameType) -> Any:
        """`len`, where code of that frame asks."""
        return self.origins.checks.length(self.count, self.key, frame)

    def __len__(self) -> int:
        if isinstance(made := self.asked_for_length(sys._getframe(1)), int):
            return made
        raise refused("len()")

    def __bool__(self) -> bool:
        raise refused("bool()")

    def __iter__(self) -> Any:
        branches = self.origins.checks.branches
        return turns(self, sys._getframe(1), lambda place: branches.place([place] if self.row else place))

    @property
    def T(self) -> Any:
        return self.t()

    def tolist(self) -> Listed:
        return Listed(self)

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name, None)
        if name.startswith("__") or method is None or not callable(method):
            raise refused(f".{name}") if not name.startswith("__") else AttributeError(name)
        return lambda *args, **kwargs: apply(method, (self, *args), kwargs)

    def like(self, dense: Tensor) -> Picked:
        """Of the same rows, something else."""
        made = Picked(dense, self.mask, self.key, self.origins)
        made.places, made.place = self.places, self.place
        return made

    def shaped(self, like: Picked) -> Picked:
        """The same rows, by a mask of the shape of that one's."""
        made = self.like(self.dense.reshape(*like.mask.shape, *self.row))
        made.mask = like.mask
        return made

    def kept(self, value: Tensor | None = None, fill: Any = 0) -> Tensor:
        """The whole tensor with `fill` in rows that were not picked."""
        value = self.dense if value is None else value
        return torch.where(beside(self.mask, value), value, fill)


def _method(name: str) -> Callable[..., Any]:
    def method(self: Picked, *args: Any) -> Any:
        return apply(getattr(torch.Tensor, name), (self, *args), {})

    return method


for _name in (*OPERATORS, "setitem"):
    setattr(Picked, f"__{_name}__", _method(f"__{_name}__"))


def rows_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], origins: Origins) -> Any:
    """What `func` gives where it picks rows by a mask, or is asked of picked rows; None: neither. Raises TraceError."""
    name = getattr(func, "__name__", "")
    if args and type(args[0]) is Gathered:
        return gathered(name, args[0], Picked, origins, *args[1:], **kwargs)
    of_rows = bool(_all_picked(args[:1]))
    is_tensor = bool(args) and isinstance(args[0], Tensor) and args[0].ndim > 0
    origins.checks.branches.sees()
    if name in ("gather", "index_select") and not of_rows and isinstance(args[-1], Picked) and not kwargs:
        return read_at(name, *args)
    if name in ("__getitem__", "__setitem__"):
        args = args[0], as_rows(args[1]), *args[2:]
    if name == "__getitem__" and not of_rows:
        return _picks(args[0], args[1], origins)
    if name.rstrip("_") in WRITES and len(args) == 4 and isinstance(args[2], Picked) and not args[1] and not kwargs:
        made = written_at(args[0], [args[2]], args[3], adds="add" in name)
        return _put(args[0], made, origins) if name.endswith("_") else made
    if name in ("nonzero", "argwhere") and len(args) == 1 and not kwargs.get("as_tuple") and is_tensor:
        return nonzero_of(Picked, origins.truths(args[0]), origins)
    if name == "masked_select":
        tensor, mask = torch.broadcast_tensors(args[0], args[1] if len(args) > 1 else kwargs["mask"])
        return _pick(tensor, mask, origins)
    is_indices = (name == "where" and len(args) == 1 and not kwargs) or (name == "nonzero" and kwargs.get("as_tuple"))
    if is_indices and is_tensor:
        return places_of(Picked, origins.truths(args[0]), origins)
    if name in ("unique", "unique_consecutive") and not of_rows and not any(map(kwargs.get, OF_RUNS)):
        return of_runs(Picked, args[0], name == "unique", origins)
    if name == "__setitem__" and not of_rows:
        return _set(args[0], args[1], args[2], origins)
    return apply(func, args, kwargs) if of_rows or _all_picked((args, kwargs)) else None


def _put(tensor: Tensor, value: Tensor, origins: Origins) -> Tensor:
    origins.forget([tensor])
    return tensor.copy_(value)


def _set(tensor: Tensor, index: Any, value: Any, origins: Origins) -> Tensor | None:
    """`tensor[mask] = rows`, of the same mask or one row for all, or at indices of rows; None: torch does it."""
    if _all_picked(index):
        given, rest = indices_in(index, Picked)
        if rest and rest != (Ellipsis,):
            raise refused("writing to other places")
        return _put(tensor, written_at(tensor, given, value), origins)
    mask, *rest = index if isinstance(index, tuple) else (index,)
    if isinstance(value, int | float) and is_mask(mask) and origins.checks.branches.here():
        value = torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)
    if not isinstance(value, (Picked, Tensor)) or not is_mask(mask):
        if isinstance(value, Picked):
            raise refused("writing to other places")
        return None
    if any(not (part is Ellipsis or part == slice(None)) for part in rest):
        raise refused("a mask among other indices")
    rows = Picked(tensor, mask.bool(), origins.rows(mask), origins)
    value = value.shaped(rows) if isinstance(value, Picked) and value.key == rows.key else value
    rows, value = guarded(rows, value)
    made = values_at(value, rows, tensor.shape[mask.ndim :]).to(tensor.dtype)
    return _put(tensor, torch.where(beside(rows.mask, tensor), made, tensor), origins)


def _picks(tensor: Any, index: Any, origins: Origins) -> Any:
    """`tensor[index]` where a mask of values, or rows of indices, stand first in the index; None: it is an ordinary
    one. Raises TraceError where they stand elsewhere.
    """
    if not isinstance(tensor, Tensor):
        return None
    if isinstance(index, tuple) and index and index[0] is None and _all_picked(index):
        rows = _picks(tensor, index[1:], origins)
        return None if rows is None else Ahead(rows)
    if _all_picked(index):
        given, rest = indices_in(index, Picked)
        rows = read_all(tensor, given)
    else:
        mask, *rest = index if isinstance(index, tuple) else (index,)
        if not any(map(is_mask, (mask, *rest))):
            return None
        if not is_mask(mask) or any(map(is_mask, rest)):
            raise refused("a mask among other indices")
        rows = _pick(tensor, mask, origins)
    is_whole = all(part is Ellipsis or part == slice(None) for part in rest)
    return rows if is_whole else of_each_row(rows, (slice(None), *rest))


def _pick(tensor: Tensor, mask: Tensor, origins: Origins) -> Picked:
    """The rows of `tensor` where `mask`, over its first dims, is true."""
    if tensor.shape[: mask.ndim] != mask.shape:
        raise TraceError(f"a mask of shape {list(mask.shape)} picks from {list(tensor.shape)}{line_here()}")
    number, mask = origins.rows(mask), mask.bool()
    rows = Picked(tensor, mask, number, origins)
    return rows.like(apart(tensor, rows))


# --- what is done to them --------------------------------------------------------------------------------------------


def apply(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`func` of picked rows. Raises TraceError for what is not done row by row."""
    name = name_of(func)
    every = _all_picked((args, kwargs))
    checks = every[0].origins.checks
    branches, plain, rows = checks.branches, in_place(func, kwargs), args[0] if args else None
    with checks, branches.of_rows(func, name, args, kwargs) as (args, kwargs):
        if plain is None:
            return branches.given(_applied(func, name, every, args, kwargs))
        if not isinstance(rows, Picked):
            raise refused(f"{name} in place")
        if name in GIVEN:
            return branches.given(write(rows, *GIVEN[name](rows, *args[1:]), name))
        return branches.given(write(rows, rows, _applied(plain, name, every, *as_new(rows, args, kwargs)), name))


def _applied(func: Any, name: str, every: list[Picked], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    first = every[0]
    if name in CATS:
        return put_together(name, first, *args, **kwargs)
    if any(one.key != first.key for one in every):
        raise refused("what puts rows of two masks together")
    args, kwargs = pytree.tree_map(
        lambda one: one.shaped(first) if isinstance(one, Picked) and one.mask.shape != first.mask.shape else one,
        (tuple(args), kwargs),
    )
    if name in ("cross_entropy", "nll_loss"):
        return class_loss(func, Picked, *args, **kwargs)
    if name in LOSSES:
        given = arguments_of(func, args, kwargs)
        reduction = given.pop("reduction")
        _no_other_rows(first, (), given)
        return loss(func, first, _dense(given), reduction)
    is_elementwise = name in ("min", "max") and len(args) > 1 and isinstance(args[1], Picked)
    if is_elementwise or name in ELEMENTWISE or name in LIKES:
        _no_other_rows(first, args, kwargs)
        return first.like(func(*_dense(args), **_dense(kwargs)))
    if not isinstance(args[0], Picked):
        raise refused(name)
    name = "bmm" if name == "matmul" and len(every) == 2 else name  # of one, a weight is no rows
    if name in OF_ROWS:
        return OF_ROWS[name](*args, **kwargs)
    if name == "batch_norm":
        return normed_over_rows(func, *args, **kwargs)
    if name in ("reshape", "view", "flatten"):
        return reshaped(name, args[0], args[1:], kwargs)
    if name == "getitem":
        return of_each_row(args[0], args[1])
    if name in ("size", "numel", "dim"):
        return getattr(args[0], name)(*args[1:], **kwargs)
    if name in OF_A_BATCH and len(args[0].row) >= OF_A_BATCH[name]:
        return one_by_one(func, args[0], args[1:], kwargs)
    if name in ROWWISE and len(args[0].row) >= ROWWISE[name]:
        return first.like(func(first.dense, *args[1:], **kwargs))
    if name in ALONG:
        place, default = ALONG[name]
        given = kwargs.get("dim", args[place] if len(args) > place else default)
        if given is not None and not isinstance(given, bool):
            return _along(func, name, place, given, args, kwargs)
        return whole(name, args[0], args[1:], kwargs)
    raise refused(name)


OF_ROWS = {
    "dropout": dropped, "pad": padded, "expand": expanded, "bincount": counts, "transpose": transposed,
    "permute": permuted, "bmm": product_of_each, "t": lambda rows: transposed(rows, 0, -1),
}  # fmt: skip


def _all_picked(values: Any) -> list[Picked]:
    if isinstance(values, Picked):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [one for value in values for one in _all_picked(value)] if isinstance(values, list | tuple) else []


def _dense(values: Any) -> Any:
    if isinstance(values, Picked):
        return values.dense
    if isinstance(values, dict):
        return {name: _dense(value) for name, value in values.items()}
    return type(values)(map(_dense, values)) if isinstance(values, list | tuple) else values


def _no_other_rows(first: Picked, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """What is no row stands beside each: it has at most the dims of a row, and so do they all."""
    dims = len(first.row)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Picked) and len(value.row) != dims:
            raise refused("what spreads one over another")
        if isinstance(value, Tensor) and value.ndim > dims:
            raise refused("what puts a tensor of other rows beside them")


def _along(func: Any, name: str, place: int, dim: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`func` along dims of a row, or over all rows (dim 0)."""
    first: Picked = args[0]
    ahead = first.mask.ndim - 1
    news = 1 if name == "unsqueeze" else 0
    dims = [one if one >= 0 else one + first.ndim + news for one in (dim if isinstance(dim, list | tuple) else [dim])]
    if 0 in dims:
        if dims != [0] or name not in OVER_ROWS or kwargs.get("keepdim") or len(args) > place + 1:
            raise refused(f"{name} over rows")
        return over_rows(name, first, kwargs)
    moved = [one + ahead for one in dims]
    inner = list(_dense(tuple(args)))
    told = moved if isinstance(dim, list | tuple) else moved[0]
    if len(inner) > place:
        inner[place] = told
    else:
        kwargs = {**kwargs, "dim": told}
    made = func(*inner, **_dense(kwargs))
    if isinstance(made, tuple):  # values and indices
        return type(made)(tuple(map(first.like, made)))
    return first.like(made)
