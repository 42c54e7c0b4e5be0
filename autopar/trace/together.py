"""What is made of all picked rows at once (`masked.Picked`): rows put together, padded, normalised over the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.trace.checked import counted as bincount
from autopar.trace.gathered import Gathered
from autopar.trace.lines import line_here
from autopar.trace.origins import Origins
from autopar.trace.places import refused
from autopar.trace.reshaped import product, rooted

Picked = Any  # of `autopar.trace.masked`, which calls what is here
EMPTY = "forward puts a list together{} that is empty in this call: torch raises RuntimeError there"
LIKES = ("zeros_like", "ones_like", "full_like", "empty_like")  # their numbers are not looked at

DRAWN = (
    "dropout of rows that a mask picks, or of packed sequences, is drawn for all rows: other numbers are drawn than by "
    "torch, on one process, too"
)
TOO_FEW = "batch_norm in training{} is given one row, which has no variance: give it more, or call eval()"
OVER_ROWS = ("sum", "mean", "var", "std", "amax", "amin", "softmax", "log_softmax", "logsumexp")


def over_rows(name: str, rows: Picked, options: Mapping[str, Any]) -> Any:
    """`torch.sum` and its like over dim 0: of one row's dims, or, softmax, rows again."""
    over = tuple(range(rows.mask.ndim))
    given = {name: value for name, value in options.items() if name not in ("dim", "keepdim", "_stacklevel")}
    if (dtype := given.pop("dtype", None)) is not None:
        rows = rows.like(rows.dense.to(dtype))
    correction = given.pop("correction", 1 if given.pop("unbiased", True) else 0) if name in ("var", "std") else None
    if given:
        raise refused(f"{name} over rows with {', '.join(given)}")
    if name in ("sum", "mean"):
        total = rows.kept().sum(over)
        return total if name == "sum" else total / rows.count
    if name in ("var", "std"):
        rows = rows.origins.checks.branches.guarded(rows)  # of one row it has no gradient, which zero is not, either
        mean = rows.kept().sum(over) / rows.count
        found = (rows.kept(rows.dense - mean) ** 2).sum(over) / (rows.count - correction).clamp(min=0)
        return found if name == "var" else rooted(found)
    if not rows.dense.is_floating_point():
        raise refused(f"{name} of whole numbers over rows")
    there = rows.kept(fill=torch.inf if name == "amin" else -torch.inf)
    if name in ("amax", "amin", "logsumexp"):
        return getattr(there, name)(over)
    made = getattr(there.flatten(0, len(over) - 1), name)(0).reshape(there.shape)
    return rows.like(rows.kept(made))


def put_together(name: str, like: Picked, tensors: Any, dim: int = 0) -> Picked:
    """`torch.cat` or `stack` of tensors of which some are picked rows like `like`; along dims of a row, or, `cat`, the
    rows of one behind those of the other. Raises TraceError where they have not the same rows.
    """
    kind = type(like)
    if not isinstance(tensors, list | tuple):
        raise refused(name)
    dim += like.ndim + (name == "stack") if dim < 0 else 0
    if dim > 0:
        if any(not isinstance(part, kind) or part.key != like.key for part in tensors):
            raise refused("what puts other rows beside them")
        join = torch.stack if name == "stack" else torch.cat
        return like.like(join([part.dense for part in tensors], dim + like.mask.ndim - 1))
    if name == "stack":
        raise refused("stacking them in front")
    dense, masks, keys = list[Tensor](), list[Tensor](), list[Any]()
    for part in tensors:
        picked = isinstance(part, kind)
        row = part.row if picked else tuple(part.shape[1:])
        if row != like.row:
            raise refused("cat with rows of other dims")
        dense.append(part.dense.reshape(-1, *row) if picked else part)
        masks.append(part.mask.reshape(-1) if picked else torch.ones(len(part), dtype=torch.bool, device=part.device))
        keys.append(part.key if picked else len(part))
    return kind(torch.cat(dense), torch.cat(masks), ("behind each other", *keys), like.origins)


def gathered(name: str, listed: Gathered, kind: type, origins: Origins, dim: int = 0) -> Any:
    """`torch.stack` or `cat` of a list of which some things are there only where that is true: rows, of that `kind`."""
    items = listed.items()
    if (count := listed.count()) is None:
        return (torch.stack if name == "stack" else torch.cat)([one for one, _ in items], dim)
    if len({one.dtype for one, _ in items if hasattr(one, "dtype")}) > 1:
        raise refused(f"{name} of several dtypes")
    if all(truth is not None for _, truth in items):
        origins.checks.add(EMPTY.format(line_here()), count == 0)
    parts = [_part(name, listed, one, truth, kind, origins) for one, truth in items]
    like = next(part for part in parts if isinstance(part, kind))
    if dim not in (0, -like.ndim):
        raise refused(f"{name} along another dim than the first")
    return put_together("cat", like, parts)


def _part(name: str, listed: Gathered, one: Any, truth: Tensor | None, kind: Any, origins: Origins) -> Any:
    if isinstance(one, kind) and name != "stack":
        if truth is None:
            return one
        part = one.like(listed.guarded(one.dense, truth))
        part.mask, part.key = one.mask & truth, (one.key, id(truth))
        return part
    if not isinstance(one, Tensor):
        raise refused(name)
    one = one.unsqueeze(0) if name == "stack" else one
    if truth is None:
        return one
    mask = truth.reshape(1).expand(len(one))
    return kind(listed.guarded(one, truth), mask, ("of a list", id(truth), len(one)), origins)


def padded(input: Picked, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Picked:
    """`functional.pad` of dims of each row."""
    if mode != "constant" or len(pad) // 2 > len(input.row):
        raise refused("padding them so")
    return input.like(functional.pad(input.dense, list(pad), mode, value))


def dropped(input: Picked, p: float = 0.5, training: bool = True, inplace: bool = False) -> Picked:
    if training and p and DRAWN not in input.origins.checks.notes:
        input.origins.checks.notes.append(DRAWN)
    return input.like(functional.dropout(input.dense, p, training))


def product_of_each(input: Picked, mat2: Any) -> Picked:
    """Of each row, a matrix, with that of the same row, or of others."""
    if not isinstance(mat2, type(input)) or len(input.row) < 2 or len(mat2.row) != len(input.row):
        raise refused("matmul")
    return input.like(input.dense @ mat2.dense)


def counts(input: Picked, weights: Picked | None = None, minlength: int = 0) -> Tensor:
    """`torch.bincount`, of so many counts."""
    if not minlength or input.row:
        raise refused("bincount without minlength")
    flat = None if weights is None else weights.dense.flatten()
    return bincount(input.dense.flatten(), flat, minlength, input.origins.checks, input.mask.flatten())


def one_by_one(func: Any, rows: Picked, args: Sequence[Any], kwargs: Any) -> Picked:
    """What treats each of a batch by itself, of rows as the batch: a convolution."""
    made = func(rows.dense.reshape(-1, *rows.row), *args, **kwargs)
    return rows.like(made.reshape(*rows.mask.shape, *made.shape[1:]))


def normed_over_rows(func: Any, *args: Any, **kwargs: Any) -> Picked:
    """`functional.batch_norm` of rows [channels, ...]: mean and variance are of the picked rows alone."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    rows, mean, variance = given["input"], given["running_mean"], given["running_var"]
    if not rows.row or any(type(one) is type(rows) for name, one in given.items() if name != "input"):
        raise refused("batch_norm with such arguments")
    ahead = rows.mask.ndim
    if given["training"]:
        others = (*range(ahead), *range(ahead + 1, rows.dense.ndim))
        along = [1] * ahead + [rows.row[0]] + [1] * (len(rows.row) - 1)
        here = rows.dense.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows.dense
        count = rows.count * product(rows.row[1:])
        rows.origins.checks.add(TOO_FEW.format(line_here()), count == 1)
        count = count.clamp(min=1)  # of none there are no numbers, and none that are not any
        average = rows.kept(here).sum(others) / count
        spread = (rows.kept(here - average.reshape(along)) ** 2).sum(others) / count
        if mean is not None:
            taken = [branch.truth for branch in rows.origins.checks.branches.here()[-1:]]
            is_written = reduce(torch.logical_and, taken, count >= 2)  # else as a call that is refused leaves it
            for running, found in ((mean, average), (variance, spread * count / (count - 1))):
                after = running + given["momentum"] * (found.detach() - running)
                running.copy_(torch.where(is_written, after, running))
        made = (here - average.reshape(along)) * torch.rsqrt(spread + given["eps"]).reshape(along)
        for weight, put in ((given["weight"], torch.mul), (given["bias"], torch.add)):
            made = made if weight is None else put(made, weight.reshape(along))
        return rows.like(made.to(rows.dtype))
    of_batch = mean, variance, given["weight"], given["bias"], False, given["momentum"], given["eps"]
    return one_by_one(func, rows, of_batch, {})
