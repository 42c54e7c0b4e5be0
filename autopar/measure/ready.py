"""What a measurement runs: the profile that priced the plan, a model with values, and inputs of the right kind."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.attach.inputs import type_of
from autopar.attach.module import ParallelModule
from autopar.attach.tensors import from_rank_zero, is_elsewhere
from autopar.calibrate.values import input_bounds, random_tensor
from autopar.errors import PlanMismatch
from autopar.machine.device import hardware_or_here
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.simulate.timeline import pricer_of
from autopar.trace import flatten_inputs
from cost_models.hardware import Hardware


def pricer_at_hand(plan: Plan, hardware: Hardware | None, device_type: str) -> Pricer | None:
    """What priced the plan: the given profile, the one of that name, or this machine's own; None if it is none of them.
    Raises PlanMismatch where the given profile has other figures.
    """
    if hardware is not None:
        return pricer_of(plan, hardware)
    with contextlib.suppress(PlanMismatch, ValueError):
        return pricer_of(plan)
    with contextlib.suppress(PlanMismatch, ValueError, OSError):
        return pricer_of(plan, hardware_or_here(None, device_type))
    return None


def materialise(parallel: ParallelModule, device_type: str) -> tuple[str, ...]:
    """Give tensors on the meta device values that neither overflow nor vanish."""
    named = [*parallel.named_parameters(), *parallel.named_buffers()]
    tensors = [(name, tensor) for name, tensor in named if not is_elsewhere(tensor)]
    empty = {name for name, tensor in tensors if tensor.is_meta}
    if not empty:
        return ()
    if len(empty) < len(tensors):
        raise ValueError("some of the model is on the meta device and some is not; build all of it, or none")
    parallel.to_empty(device=device_type)
    with torch.no_grad():
        for name, tensor in [*parallel.named_parameters(), *parallel.named_buffers()]:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.is_floating_point() and local.ndim > 1:
                local.normal_(0.0, 0.02)
            else:
                local.fill_(0 if not local.is_floating_point() or name.endswith("bias") else 1)
    return ("the model was built on the meta device: its values are random",)


def inputs_of(
    plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any], device_mesh: DeviceMesh
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with real tensors, the same on every rank, each of them a tensor of its own: a factory draws others on
    each.
    """
    leaves, spec = flatten_inputs(args, kwargs)
    bounds, node_of = input_bounds(plan.graph), plan.graph.by_name
    below = {node_of[name].target: bound for name, bound in sorted(bounds.items(), key=lambda one: -one[1])}
    made: list[Any] = []
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for path, leaf in leaves:
            if isinstance(leaf, Tensor):
                bound = below.get(path)
                cpu, device, trains = torch.device("cpu"), torch.device(device_mesh.device_type), leaf.requires_grad
                if leaf.is_meta:
                    leaf = random_tensor(type_of(leaf), cpu, bound).to(device)
                else:
                    leaf = from_rank_zero(leaf.detach().clone(), device_mesh)
                leaf.requires_grad_(trains)
            made.append(leaf)
    positional, named = pytree.tree_unflatten(made, spec)
    return positional, named


def without_history(call: Any) -> Any:
    """The same tensors as leaves of autograd's: those that require grad get gradients of their own."""
    return pytree.tree_map(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf, call
    )
