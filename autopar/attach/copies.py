"""Copies of a parallel module: by `copy.deepcopy`, which trains by itself, and those that are refused."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.attach.tensors import as_dtensor, layout_of

Module = TypeVar("Module", bound=nn.Module)

# What is the same for a module and its copies: values that nobody writes to, and handles of process groups.
SHARED = ("device_mesh", "mesh", "planner", "precision")


def copied(module: Module, state: Any, memo: dict[int, Any]) -> Module:
    """The module again, with parameters, buffers and `state` of its own: what `copy.deepcopy` of a plain module means.

    As there, the copy has no gradients. Parameters stay in their layouts, and nothing is sent. What the module was
    planned for is not planned again.
    """
    for parameter in module.parameters():
        if id(parameter) not in memo:
            memo[id(parameter)] = _parameter(parameter)
    for name in SHARED:
        value = getattr(state, name)
        memo[id(value)] = value
    made = type(module).__new__(type(module))
    memo[id(module)] = made
    made.__setstate__(copy.deepcopy(module.__getstate__(), memo))
    if state.pipe is not None and (state.plan is None or state.has_new):
        of_made: Any = made._autopar
        state.alike = of_made.alike = state.alike or [weakref.ref(module)]
        state.alike.append(weakref.ref(made))
    return made


def alike(module: nn.Module) -> list[Any]:
    """The module, and what was copied with it before any of them was planned for stages, or had its new parts laid out,
    and is not yet: they are laid out together, so that averages of weights meet what they average.
    """
    state: Any = module._autopar
    others = [one for held in state.alike if (one := held()) is not None and one is not module]
    return [module, *(one for one in others if one._autopar.plan is None or one._autopar.has_new)]


def hand_on(module: nn.Module) -> None:
    """Give those that were laid out with it the plan of the module. Their programs are made when they are called."""
    state: Any = module._autopar
    for one in alike(module)[1:]:
        one._autopar.plan, one._autopar.staged, one._autopar.seed = state.plan, state.staged, state.seed


def _parameter(parameter: nn.Parameter) -> nn.Parameter:
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return nn.Parameter(_tensor(value), requires_grad=parameter.requires_grad)
    made = as_dtensor(_tensor(value.to_local()), value.shape, layout_of(value), value.device_mesh)
    again = nn.Parameter(made, requires_grad=parameter.requires_grad)
    again.is_new = getattr(parameter, "is_new", False)  # type: ignore[attr-defined]
    return again


def _tensor(value: Tensor) -> Tensor:
    """A copy, pinned where the tensor is: a device fetches it while it computes."""
    return torch.empty_like(value, pin_memory=value.is_pinned()).copy_(value)


def copied_shallowly(module: Module) -> Module:
    """What `copy.copy` of a plain module means: another module with the same tensors and submodules."""
    made = type(module).__new__(type(module))
    made.__setstate__(module.__getstate__())
    return made


def unpicklable(module: nn.Module) -> TypeError:
    """What is raised where a parallel module would be pickled: by `torch.save`, for other processes."""
    return TypeError(
        f"a parallel module ({type(module).__name__}) belongs to the processes that run it and cannot be pickled: save "
        "parallel.full_state_dict(), or parallel.state_dict() with torch.distributed.checkpoint, and give other "
        "processes the plain model, which loads the first"
    )


def unshareable(module: nn.Module) -> TypeError:
    """What is raised where its memory would be shared."""
    return TypeError(
        f"share_memory: parameters of a parallel module ({type(module).__name__}) lie in pieces in the processes that "
        "run it; load parallel.full_state_dict() into the plain model and share that one's"
    )


def enlist(parallel: nn.Module, originals: Mapping[int, Any]) -> None:
    """Let copies of modules be in the lists of their classes that have the originals: libraries find all modules of a
    kind by such, to reset their states. `originals`: id of a copy -> what it is of.
    """
    for part in parallel.modules():
        if (original := originals.get(id(part))) is None:
            continue
        lists = [held for kind in type(original).__mro__ for held in vars(kind).values() if isinstance(held, list)]
        for held in lists:
            if any(one is original for one in held) and not any(one is part for one in held):
                held.append(part)
