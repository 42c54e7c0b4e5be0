"""Writes fx nodes: operators by name, layout changes as functional collectives, and the local bodies of rules."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar._compat import functional_collectives
from autopar.emit import ops
from autopar.graph import Const, TensorType
from autopar.layout import Partial, Replicate, Shard
from autopar.mesh import Mesh
from autopar.reshard import Reshard

C10D = torch.ops._c10d_functional
assert functional_collectives  # imported for what it registers

# Views may meet tensors that are not contiguous after a layout change; reshape copies there, and is a view elsewhere.
RENAMED = {"aten.view.default": "aten.reshape.default", "autopar.to_reduce_dtype": "aten._to_copy.default"}


def target_of(op: str) -> Any:
    """`aten.mm.default` -> torch.ops.aten.mm.default; `autopar.einsum` -> our function."""
    op = RENAMED.get(op, op)
    namespace, name, *overload = op.split(".")
    if namespace == "autopar":
        return getattr(ops, name)
    return getattr(getattr(getattr(torch.ops, namespace), name), overload[0] if overload else "default")


class Writer:
    """Appends to one fx graph. `groups`: axis -> name of its process group; `coordinates`: axis -> this rank's index."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, groups: Mapping[str, str], device: str) -> None:
        self.graph, self.mesh, self.groups, self.device = graph, mesh, groups, device
        self.coordinates: dict[str, fx.Node] = {}
        self.comment = ""

    def constant(self, arg: Any) -> Any:
        match arg:
            case Const("dtype", value):
                return getattr(torch, value)
            case Const("device", _):
                return torch.device(self.device)
            case Const("memory_format" | "layout", value):
                return getattr(torch, value)
            case tuple() | list():
                return [self.constant(part) for part in arg]
            case _:
                return arg

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(
            target, tuple(self.constant(a) for a in args), {k: self.constant(v) for k, v in kwargs.items()}
        )
        node.meta["comment"] = self.comment
        return node

    def get(self, value: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, value, index)

    def wait(self, value: fx.Node) -> fx.Node:
        return self.call(C10D.wait_tensor.default, value)

    def all_reduce(self, value: Any, op: str, axis: str) -> fx.Node:
        return self.wait(self.call(C10D.all_reduce.default, self.contiguous(value), op, self.groups[axis]))

    def contiguous(self, value: Any) -> fx.Node:
        return self.call(torch.ops.aten.contiguous.default, value)

    def reshard(self, value: fx.Node, changes: Sequence[Reshard]) -> fx.Node:
        """Apply the steps of a layout change."""
        for change in changes:
            value = self._step(value, change)
        return value

    def _step(self, value: fx.Node, change: Reshard) -> fx.Node:
        ranks, axis = self.mesh.size(change.axis), change.axis
        if ranks == 1:
            return value
        group = self.groups[axis]
        match change.before, change.after:
            case Shard(dim), Replicate():
                gathered = self.wait(
                    self.call(C10D.all_gather_into_tensor.default, self.contiguous(value), ranks, group)
                )
                return self.call(ops.from_front, gathered, dim, ranks) if dim else gathered
            case Partial(op), Replicate():
                return self.all_reduce(value, op, axis)
            case Partial(), Shard(dim):
                front = self.call(ops.to_front, value, dim, ranks) if dim else self.contiguous(value)
                return self.wait(self.call(C10D.reduce_scatter_tensor.default, front, "sum", ranks, group))
            case Shard(src), Shard(dst):
                front = self.call(ops.to_front, value, dst, ranks) if dst else self.contiguous(value)
                rows = change.local.shape[0] if dst == 0 else ranks * change.local.shape[0]
                splits = [rows // ranks] * ranks
                sent = self.wait(self.call(C10D.all_to_all_single.default, front, splits, splits, group))
                return self.call(ops.from_front, sent, src, ranks) if src else sent
            case Replicate(), Shard(dim):
                return self.call(ops.piece, value, dim, ranks, self.coordinates[axis])
            case _:
                raise ValueError(f"no step leads from {change.before} to {change.after}")


class BodyWriter:
    """What a local body is written against (`autopar.rules.bodies.Builder`), turning its calls into fx nodes."""

    def __init__(
        self,
        writer: Writer,
        axes: Sequence[str],
        factor_size: int,
        local_operands: Sequence[TensorType],
        local_outputs: Sequence[TensorType | None],
    ) -> None:
        self.writer, self.axes = writer, axes
        self.factor_size = factor_size
        self.local_operands, self.local_outputs = local_operands, local_outputs
        self.shards = math.prod(writer.mesh.size(axis) for axis in axes)

    def call(self, op: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self.writer.call(target_of(op), *args, **kwargs)

    def get(self, value: fx.Node, index: int) -> fx.Node:
        return self.writer.get(value, index)

    def shard_index(self) -> fx.Node:
        index: Any = None
        for axis in self.axes:
            coordinate = self.writer.coordinates[axis]
            if index is None:
                index = coordinate
            else:
                scaled = self.writer.call(torch.ops.aten.mul.Tensor, index, self.writer.mesh.size(axis))
                index = self.writer.call(torch.ops.aten.add.Tensor, scaled, coordinate)
        return index

    def all_reduce(self, value: Any, op: str) -> fx.Node:
        for axis in self.axes:
            if self.writer.mesh.size(axis) > 1:
                value = self.writer.all_reduce(value, op, axis)
        return value
