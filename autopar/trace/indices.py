"""Indices of which there are as many as a mask picks (`masked.Picked` of whole numbers): `nonzero`, and what is read
at them. They stand for all places, of which those count where the mask is true.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.trace.lines import line_here
from autopar.trace.origins import Origins
from autopar.trace.places import refused
from autopar.trace.reshaped import beside, sizes_of
from autopar.trace.sharing import storage_of

Picked = Any  # of `autopar.trace.masked`, which calls what is here


TWICE = "forward writes to one place twice{}, as a mask picks two rows of that place, and which one stays nobody knows"
OUTSIDE = "IndexError{}: index {} is out of range for dim {}, which has {} elements"
WRITES = ("index_add", "index_copy", "index_fill")


def places_of(kind: type, mask: Tensor, origins: Origins) -> tuple[Picked, ...]:
    """`torch.where(mask)`: along each dim of the mask the indices of what it picks."""
    made = list[Picked]()
    for place, size in enumerate(mask.shape):
        places = torch.arange(size, device=mask.device)
        along = places.reshape([-1 if dim == place else 1 for dim in range(mask.ndim)])
        made.append(kind(along.expand(mask.shape), mask.bool(), origins.rows(mask), origins))
        made[-1].places, made[-1].place = places, place
    return tuple(made)


def nonzero_of(kind: type, mask: Tensor, origins: Origins) -> Picked:
    """`mask.nonzero()`: rows of one index for each dim."""
    columns = places_of(kind, mask, origins)
    if len(columns) == 1:
        return columns[0].like(columns[0].dense.unsqueeze(-1))
    made = columns[0].like(torch.stack([one.dense for one in columns], -1))
    made.columns = columns
    return made


def place_of(rows: Picked) -> int | None:
    """The dim of the mask along which these are the places themselves, and nothing that is computed of them."""
    return rows.place if is_each(rows) and not rows.row else None


def is_each(rows: Picked) -> bool:
    """Whether these are the places themselves."""
    return rows.places is not None and storage_of(rows.dense) == storage_of(rows.places)


def inside(tensor: Tensor, index: Any, checks: Any) -> tuple[Tensor, Any]:
    """Both, for a branch, with numbers that are inside of the tensor: where it is taken, others are an error in that
    call. A loop over all places that a mask may pick has turns beyond the experts that there are.
    """
    parts = index if isinstance(index, tuple) else (index,)
    made, dim = list[Any](), 0
    for one in parts:
        number = getattr(one, "constant", None) if isinstance(one, Tensor) and not one.ndim else one
        number = int(number) if isinstance(number, Tensor) and number.dtype == torch.int64 else number
        if one is Ellipsis or dim >= tensor.ndim:
            return tensor, index
        if type(number) is int and not -(size := tensor.shape[dim]) <= number < size:
            checks.add(OUTSIDE.format(line_here(), number, dim, size), torch.tensor(True))
            one = 0
        made.append(one)
        dim += one is not None
    return tensor, tuple(made) if isinstance(index, tuple) else made[0]


def indices_in(index: Any, kind: type) -> tuple[list[Picked], tuple[Any, ...]]:
    """The picked indices that an index begins with, and what comes behind them. Raises TraceError where there are some
    further behind.
    """
    parts = index if isinstance(index, tuple) else (index,)
    count = next((place for place, part in enumerate(parts) if not isinstance(part, kind)), len(parts))
    given, rest = list(parts[:count]), parts[count:]
    if any(isinstance(part, kind) for part in rest):
        raise refused("a mask among other indices")
    if any(part.dtype not in (torch.int64, torch.int32) or part.key != given[0].key for part in given):
        raise refused("an index of such rows")
    return given, rest


def read_all(tensor: Tensor, given: Sequence[Picked]) -> Picked:
    """`tensor[i, j]`, at picked indices of one mask."""
    rows = given[0]
    is_each = [place_of(one) for one in given] == [*range(rows.mask.ndim)]
    is_there = is_each and tensor.shape[: len(given)] == rows.mask.shape
    dense = tensor if is_there else tensor[tuple(one.dense for one in given)]
    return type(rows)(apart(dense, rows), rows.mask, rows.key, rows.origins)  # what is not picked may be not finite


def read_at(name: str, tensor: Tensor, *args: Any) -> Picked:
    """`index_select` and `gather` along dim 0, at picked indices."""
    rows = args[-1]
    if rows.dtype not in (torch.int64, torch.int32):
        raise refused("an index of such rows")
    is_alike = tensor.ndim == rows.ndim if name == "gather" else not rows.row
    if args[0] != 0 or not is_alike:
        raise refused(name)
    if name == "index_select":
        return read_all(tensor, [rows])
    if is_each(rows) and rows.mask.ndim == 1 and len(tensor) == len(rows.mask) and rows.row == tensor.shape[1:]:
        return rows.like(apart(tensor, rows))  # each at its own place
    made = torch.gather(tensor, 0, rows.dense.reshape(-1, *rows.row).long())
    return rows.like(made.reshape(rows.dense.shape))


def guarded(rows: Picked, value: Any) -> tuple[Picked, Any]:
    """Rows, and what is written to them, as `Branches.guarded` has them."""
    branches = rows.origins.checks.branches
    return branches.guarded(rows), branches.guarded(value) if isinstance(value, type(rows)) else value


def written_at(tensor: Tensor, given: Sequence[Picked], value: Any, adds: bool = False) -> Tensor:
    """What a tensor is behind `tensor[i, j] = value`, at places of one mask; `adds`: `index_add`."""
    places = [place for one in given if (place := place_of(one)) is not None]
    rows, value = guarded(given[0], value)
    mask, row = rows.mask, tensor.shape[len(given) :]
    if adds and not places and len(given) == 1:  # wherever that is
        flat = torch.where(mask, rows.dense, 0).flatten()
        return tensor.index_add(0, flat, values_at(value, rows, row).to(tensor.dtype).flatten(0, mask.ndim - 1))
    if len(places) < len(given) or tensor.shape[: len(given)] != tuple(mask.shape[place] for place in places):
        if adds or not len(tensor):
            raise refused("writing to other places")
        return _written_wherever(tensor, given, rows, value)
    made, rest = values_at(value, rows, row).to(tensor.dtype), [one for one in range(mask.ndim) if one not in places]
    if rest:
        if not adds:
            rows.origins.checks.add(TWICE.format(line_here()), mask.sum(rest) > 1)
        made, mask = made.sum(rest), mask.sum(rest) > 0
    order = [sorted(places).index(place) for place in places]
    made = made.permute(*order, *range(len(order), made.ndim))
    return tensor + made if adds else torch.where(beside(mask.permute(order), tensor), made, tensor)


def _written_wherever(tensor: Tensor, given: Sequence[Picked], rows: Picked, value: Any) -> Tensor:
    """Likewise at places that are computed. Rows that are left out are written behind the end of the tensor."""
    count, checks, indices = len(tensor), rows.origins.checks, list[Tensor]()
    for dim, one in enumerate(given):
        index, size = one.dense.long(), tensor.shape[dim]
        index = torch.where(index < 0, index + size, index)
        checks.add(
            OUTSIDE.format(line_here(), "of what a mask picks", dim, size), rows.mask & ((index < 0) | (index >= size))
        )
        indices.append(torch.where(rows.mask, index.clamp(0, size - 1), 0 if dim else count))
    longer, made = torch.cat([tensor, tensor[:1]]), values_at(value, rows, tensor.shape[len(given) :]).to(tensor.dtype)
    if isinstance(value, type(rows)):
        counts = torch.zeros(longer.shape[: len(given)], dtype=torch.int64, device=tensor.device)
        counts = counts.index_put(tuple(indices), torch.ones_like(indices[0]), accumulate=True)
        checks.add(TWICE.format(line_here()), counts[:count] > 1)
    return longer.index_put(tuple(indices), made)[:count]


def values_at(value: Any, rows: Picked, row: Sequence[int]) -> Tensor:
    """What is written to rows: a row for each, or one for all; zero for those that are left out."""
    if isinstance(value, type(rows)):
        if value.key != rows.key or value.row != tuple(row):
            raise refused("writing to other places")
        return value.kept()
    value = torch.as_tensor(value, device=rows.device)
    if value.ndim > len(row) and (value.ndim > len(row) + 1 or len(value) > 1):
        raise refused("writing a tensor of other rows to their places")
    value = value[0] if value.ndim > len(row) else value
    return torch.where(beside(rows.mask, value.new_empty(*rows.mask.shape, *row)), value, torch.zeros_like(value))


def apart(tensor: Tensor, rows: Picked) -> Tensor:
    """The tensor with something harmless where these rows are not, nor the branch that they are picked in is taken."""
    mask = rows.origins.checks.branches.guarded(rows).mask
    neutral = 0.5 if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.where(beside(mask, tensor), tensor, torch.full((), neutral, dtype=tensor.dtype, device=tensor.device))


def expanded(rows: Picked, *sizes: Any) -> Picked:
    """`rows.expand(-1, 3)`; for -1 their own number may stand."""
    given = sizes_of(sizes)
    if given[:1] != (-1,):
        raise refused("expand")
    return rows.like(rows.dense.expand(*rows.mask.shape, *given[1:]))
