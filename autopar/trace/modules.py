"""Copies of a user's module with other tensors in the place of its parameters and buffers."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import TraceError


def check_names(model: nn.Module) -> None:
    """torch.fx writes the names of modules into code between quotes, as they are. Raises TraceError for names that are
    something else there, or no code at all.
    """
    for name, _ in model.named_modules():
        part = name.rpartition(".")[2]
        if any(one in part for one in '"\\\n\r'):
            raise TraceError(
                f"module {name!r} has a double quote, a backslash or a line break in its name, which torch.fx cannot "
                "write into the code of a graph: call it otherwise"
            )


def with_tensors(model: nn.Module, tensor_of: Mapping[int, torch.Tensor]) -> nn.Module:
    """A structural copy of `model` in which the tensor with `id` i is `tensor_of[i]`.

    Names, aliases (one module or tensor under two names) and the user's attributes stay as they are; `model` is not
    changed, and no parameter or buffer storage is copied.
    """
    return copy.deepcopy(model, dict(tensor_of))


def replace_tensors(model: nn.Module, tensor_of: Mapping[int, torch.Tensor], *, registered: bool = True) -> None:
    """Put `tensor_of[i]` wherever a module holds the tensor with `id` i: as an attribute, or in lists, tuples and
    dictionaries. Without `registered`, parameters and buffers themselves stay.
    """
    seen: set[int] = set()
    for part in model.modules():
        held = vars(part)
        for name in held.keys() - (set() if registered else {"_parameters", "_buffers"}):
            held[name] = _replaced(held[name], tensor_of, seen)


def _replaced(value: Any, tensor_of: Mapping[int, torch.Tensor], seen: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor_of.get(id(value), value)
    if not isinstance(value, (list, tuple, dict)) or id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, tuple):
        parts = [_replaced(part, tensor_of, seen) for part in value]
        if all(map(operator.is_, parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    places = range(len(value)) if isinstance(value, list) else [*value]
    for place in places:
        value[place] = _replaced(value[place], tensor_of, seen)
    return value


def tensors_by_name(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Parameters and buffers under every name they have (a tied one appears under each of its names)."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return parameters, buffers


def aliases(model: nn.Module) -> dict[str, str]:
    """Further name -> first name, of every parameter or buffer that has several (tied weights)."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for tensors in tensors_by_name(model):
        for name, tensor in tensors.items():
            if (known := first.setdefault(id(tensor), name)) != name:
                found[name] = known
    return found


def computed_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Attributes that hooks compute from parameters before each forward (weight norm, pruning): they belong to a graph
    of autograd, which cannot be copied, and what they are now is not read again.
    """
    held = [value for module in model.modules() for value in vars(module).values()]
    return [value for value in held if isinstance(value, torch.Tensor) and not value.is_leaf]
