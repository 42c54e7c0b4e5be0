"""Functions of torch's that ask values, or change what they have made in place, where a trace does not see it: written
out, so that each of their operators is seen as those of forward are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.trace.reshaped import beside


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """As torch's. That no variance is negative is asked in each call."""
    if not isinstance(var, Tensor):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = var * torch.ones_like(input)
    elif torch.any(var < 0):
        raise ValueError("var has negative entry/entries")
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.ndim != var.ndim or sum(b for a, b in zip(input.shape, var.shape, strict=True) if a != b) != 1:
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    var = _at_least(var, eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """As torch's, where one of them is a constant, too."""
    dtype = torch.promote_types(x1.dtype, x2.dtype)
    if not dtype.is_floating_point:
        raise RuntimeError(f"expected common dtype to be floating point, yet common dtype is {dtype}")
    first, second = torch.broadcast_tensors(x1.to(dtype), x2.to(dtype))
    parts = (one / _at_least(torch.linalg.vector_norm(one, 2, dim, keepdim=True), eps) for one in (first, second))
    return torch.mul(*parts).sum(dim)


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """As torch's, which picks them by a mask."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = torch.tensor([*choose(range(len(input)), r)], dtype=torch.long, device=input.device).reshape(-1, r)
    return input[places]


def _at_least(value: Tensor, least: float) -> Tensor:
    """In a new tensor, whose gradient goes on as if it were as large as it is."""
    return value + (value.clamp(min=least) - value).detach()


def with_condition(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `torch.where`, whose condition may be bytes for torch, but not for its trace."""
    if getattr(func, "__name__", "") != "where" or len(args) < 3:
        return args
    place = 1 if func is Tensor.where else 0
    condition = args[place]
    if not isinstance(condition, Tensor) or condition.dtype != torch.uint8:
        return args
    return (*args[:place], condition.bool(), *args[place + 1 :])


def with_limits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `torch.clamp(x, 0, limit)`, both limits of which are tensors, where one is: torch takes a number
    out of it.
    """
    if getattr(func, "__name__", "") not in ("clamp", "clip", "clamp_", "clip_") or not isinstance(args[0], Tensor):
        return args, kwargs
    limits = {**dict(zip(("min", "max"), args[1:], strict=False)), **kwargs}
    tensors = [one for name in ("min", "max") if isinstance(one := limits.get(name), Tensor)]
    numbers = [one for name in ("min", "max") if isinstance(one := limits.get(name), (int, float))]
    if len(tensors) != 1 or len(numbers) != 1 or tensors[0].ndim or tensors[0].requires_grad:
        return args, kwargs
    dtype = args[0].dtype

    def limit(value: Any) -> Tensor:
        made = value.detach().reshape(()) if isinstance(value, Tensor) else torch.full((), value)
        return made.to(dtype)

    return args[:1], {name: limit(value) if name in ("min", "max") else value for name, value in limits.items()}


def filled(tensor: Tensor, mask: Tensor, value: float) -> None:
    """`labels[labels == pad] = -100` as what is done row by row."""
    tensor.masked_fill_(beside(mask, tensor), value)


def is_filled(args: Sequence[Any]) -> bool:
    """Whether `Tensor.__setitem__` of these is `filled`."""
    if type(args[2]) not in (int, float) or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
        return False
    tensor, mask, value = args
    is_whole = mask.ndim > 0 and mask.dtype == torch.bool and mask.shape == tensor.shape[: mask.ndim]
    return is_whole and (isinstance(value, int) or tensor.is_floating_point())


def allclose(input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """`torch.allclose`, as a number of each call."""
    return torch.isclose(input, other, rtol, atol, equal_nan).all().item()


def equal(input: Tensor, other: Tensor) -> Any:
    """`torch.equal`, likewise."""
    return input.shape == other.shape and (input == other).all().item()


WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    torch.allclose: allclose,
    Tensor.allclose: allclose,
    torch.equal: equal,
    Tensor.equal: equal,
    functional.gaussian_nll_loss: gaussian_nll_loss,
    torch.combinations: combinations,
    torch.cosine_similarity: cosine_similarity,
    functional.cosine_similarity: cosine_similarity,
    Tensor.__lshift__: torch.bitwise_left_shift,  # which torch knows by other names, that say the same
    Tensor.__rshift__: torch.bitwise_right_shift,
    Tensor.__ilshift__: Tensor.bitwise_left_shift_,
    Tensor.__irshift__: Tensor.bitwise_right_shift_,
}


def written_out(func: Any, args: Sequence[Any], branches: Any) -> Callable[..., Any] | None:
    """What gives what `func` gives, where it is one of these."""
    if func is Tensor.__setitem__:  # in a branch rows are guarded
        return filled if is_filled(args) and not branches.here() else None
    return WRITTEN_OUT.get(func)


def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """As `copy.deepcopy` has it of what is detached; torch copies storages, which nothing that is traced has."""
    if tensor.requires_grad:
        return Tensor.__deepcopy__(tensor, memo)
    return memo.setdefault(id(tensor), tensor.clone())
