"""Copies of a user's module with other tensors in the place of its parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn


def with_tensors(model: nn.Module, tensor_of: Mapping[int, torch.Tensor]) -> nn.Module:
    """A structural copy of `model` in which the tensor with `id` i is `tensor_of[i]`.

    Names, aliases (one module or tensor under two names) and the user's attributes stay as they are; `model` is not
    changed, and no parameter or buffer storage is copied.
    """
    return copy.deepcopy(model, dict(tensor_of))


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
