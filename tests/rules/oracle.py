"""DTensor's own sharding propagation, asked what it makes of given placements. A second opinion for tests only."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from autopar.rules.notation import Rule
from tests.rules.harness import Axis, Call, real, real_kwargs, resolve


def placement_of(rule: Rule, dims: Any, axis: Axis, reduce: str = "sum") -> Placement:
    for dim, group in enumerate(dims):
        if axis.factor in group:
            return Shard(dim)
    return Replicate() if reduce == "same" else Partial(reduce)


def ask(call: Call, rule: Rule, axis: Axis, mesh: DeviceMesh) -> str:
    """`agrees`, or in which way DTensor differs from the rule on a mesh of one axis."""
    takes: list[Placement] = []
    for place, dims in enumerate(rule.inputs):
        has = any(axis.factor in group for group in dims)
        takes.append(placement_of(rule, dims, axis) if has else Partial() if place in axis.terms else Replicate())
    gives = [
        None if type is None else Partial() if axis.terms else placement_of(rule, dims, axis, reduce)
        for type, dims, reduce in zip(call.node.outputs, rule.outputs, rule.reduce, strict=True)
    ]
    operands = [
        DTensor.from_local(_local(value, taken, axis.size), mesh, [taken], run_check=False)
        for value, taken in zip(call.operands, takes, strict=True)
    ]
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(
        resolve(call.node.op), tuple(real(call.node.args, operands)), real_kwargs(call.node.kwargs, operands)
    )
    try:
        dispatcher.sharding_propagator.propagate(info)
    except NotImplementedError:
        return "no rule"
    sharding = info.output_sharding
    if sharding.needs_redistribute:
        return "redistributes"
    specs = sharding.output_spec
    specs = specs if isinstance(specs, tuple | list) else (specs,)
    found = [None if spec is None else spec.placements[0] for spec in specs]
    return "agrees" if found == gives else f"gives {found} for {gives}"


def _local(value: torch.Tensor, placement: Placement, size: int) -> torch.Tensor:
    return value.chunk(size, placement.dim)[0].contiguous() if isinstance(placement, Shard) else value
