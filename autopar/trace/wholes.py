"""One number, or a loss, of all rows that a mask picks (`masked.Picked`)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from autopar.trace.lines import line_here
from autopar.trace.places import refused
from autopar.trace.reshaped import rooted

Picked = Any  # of `autopar.trace.masked`, which calls what is here
NONE = "a mask picks no row in this call, and forward asks for the {} of all that these hold{}: there is none"


def whole(name: str, first: Picked, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One number of all rows."""
    value, dtype = first.dense, kwargs.pop("dtype", None)
    if (args and not (name == "norm" and list(args) == [2])) or (kwargs and name not in ("var", "std")):
        raise refused(f"{name} with these arguments")
    if value.dtype == torch.bool and name in ("max", "amax", "min", "amin"):
        name = "any" if "max" in name else "all"
    kind = torch.uint8 if value.dtype == torch.bool else value.dtype
    bounds = torch.finfo(kind) if value.is_floating_point() else torch.iinfo(kind)
    if name in ("max", "amax", "min", "amin"):
        first.origins.checks.add(NONE.format(name, line_here()), first.count == 0)
    match name:
        case "sum":
            return first.kept().sum(dtype=dtype)
        case "mean":
            return first.kept().sum(dtype=dtype) / first.numel().tensor
        case "max" | "amax":
            return first.kept(fill=bounds.min).max()
        case "min" | "amin":
            return first.kept(fill=bounds.max).min()
        case "norm" | "vector_norm":
            return first.kept().norm()
        case "any":
            return first.kept(value.bool(), False).any()
        case "all":
            return first.kept(value.bool(), True).all()
        case "var" | "std":
            less = 1 if kwargs.get("unbiased", True) else 0
            correction = kwargs.get("correction", less)
            first = first.origins.checks.branches.guarded(first)  # as over rows
            mean = first.kept().sum() / first.numel().tensor
            found = (first.kept(value - mean) ** 2).sum() / (first.numel().tensor - correction).clamp(min=0)
            return found if name == "var" else rooted(found)
        case _:
            raise refused(name)


def arguments_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        raise refused("a loss with size_average or reduce (use reduction)")
    return given


def class_loss(func: Any, kind: type, *args: Any, **kwargs: Any) -> Any:
    """Cross entropy of rows of classes: rows that were left out have labels that are ignored."""
    given = arguments_of(func, args, kwargs)
    scores, target = given.pop("input"), given.pop("target")
    if not isinstance(scores, kind) or not isinstance(target, kind) or len(scores.row) != 1:
        raise refused("a class loss of other than picked rows of scores and their picked labels")
    flat, reduction = scores.dense.reshape(-1, *scores.row), given.pop("reduction")
    if target.row:  # probabilities of classes
        made = func(flat, target.dense.reshape(-1, *target.row), reduction="none", **given)
        return _reduced(scores.like(made.reshape(scores.mask.shape)), reduction)
    labels = target.kept(fill=given["ignore_index"]).reshape(-1)
    made = func(flat, labels, reduction=reduction, **given)
    return scores.like(made.reshape(scores.mask.shape)) if reduction == "none" else made


def loss(func: Any, first: Picked, given: dict[str, Any], reduction: str) -> Any:
    """`given`: its arguments, dense, but for `reduction`, by name."""
    return _reduced(first.like(func(**given, reduction="none")), reduction)


def _reduced(rows: Picked, reduction: str) -> Any:
    match reduction:
        case "none":
            return rows
        case "sum":
            return whole("sum", rows, (), {})
        case "batchmean":
            return whole("sum", rows, (), {}) / rows.count
        case _:
            return whole("mean", rows, (), {})
