"""Writes fx nodes: operators by name, layout changes as functional collectives, and the local bodies of rules."""

from __future__ import annotations

import math
import operator
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar._compat import functional_collectives
from autopar.emit import ctc, in_order, moves, ops, recurrent, sends
from autopar.ir.graph import Const, TensorType
from autopar.ir.layout import Partial, Replicate, Shard
from autopar.ir.mesh import Mesh
from autopar.price.reshard import Reshard, Work
from cost_models.steps import Comm, over

C10D = torch.ops._c10d_functional
OURS = torch.ops.autopar
assert functional_collectives and moves and sends  # imported for what they register

# Views may meet tensors that are not contiguous after a layout change; reshape copies there, and is a view elsewhere.
# Others hold more than their result below it, or read operands as if they lay without gaps.
RENAMED = {
    "aten.view.default": "aten.reshape.default",
    "aten.view_as_complex.default": "autopar.view_as_complex",
    "autopar.to_reduce_dtype": "aten._to_copy.default",
    "aten.mse_loss.default": "autopar.mse_loss",
    "aten.native_batch_norm_backward.default": "autopar.batch_norm_backward",
    "aten.native_layer_norm_backward.default": "autopar.layer_norm_backward",
    "aten.native_group_norm.default": "autopar.group_norm",
    "aten.native_group_norm_backward.default": "autopar.group_norm_backward",
    "aten._weight_norm_interface.default": "autopar.weight_norm",
    "aten._weight_norm_interface_backward.default": "autopar.weight_norm_backward",
    "aten.nll_loss2d_backward.default": "autopar.nll_loss2d_backward",
}


def target_of(op: str) -> Any:
    """`aten.mm.default` -> torch.ops.aten.mm.default; `autopar.einsum` -> our function. Raises ValueError for a name
    of anything else: names come out of files.
    """
    namespace, _, rest = RENAMED.get(op, op).partition(".")
    name, _, overload = rest.partition(".")
    if namespace == "autopar":
        for module in (ops, in_order, recurrent, ctc):
            found = vars(module).get(name)
            if isinstance(found, types.FunctionType) and found.__module__ == module.__name__ and name[0] != "_":
                return found
    elif all(part.isidentifier() and not part.startswith("__") for part in (namespace, name, overload or "default")):
        operators = getattr(torch.ops, namespace, None)
        packet = getattr(operators, name, None) if type(operators) is type(torch.ops.aten) else None
        found = getattr(packet, overload or "default", None) if type(packet) is type(torch.ops.aten.mm) else None
        if type(found) is type(torch.ops.aten.mm.default):
            return found
    raise ValueError(f"{op!r} is no operator of torch or of autopar")


def gives_list(target: Any) -> bool:
    """Whether an operator gives a list of tensors, of which there may be one."""
    given = target._schema.returns if isinstance(target, type(torch.ops.aten.mm.default)) else ()
    return any(isinstance(one.type, torch.ListType) for one in given)


class Writer:
    """Appends to one fx graph. `groups`: axis, or several at once (`cost_models.steps.over`), -> name of its process
    group; `coordinates`: the same -> this rank's index; `one_at_a_time`: as `emit` has it.
    """

    def __init__(
        self, graph: fx.Graph, mesh: Mesh, groups: Mapping[str, str], device: str, one_at_a_time: bool = False
    ) -> None:
        self.graph, self.mesh, self.groups, self.device = graph, mesh, groups, device
        self.one_at_a_time = one_at_a_time
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
        return self.make("", target, args, kwargs)

    def make(self, name: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
        """A call; `name` is what its value shall be called, numbered if it is taken."""
        given = tuple(self.constant(arg) for arg in args), {key: self.constant(arg) for key, arg in kwargs.items()}
        node = self.graph.create_node("call_function", target, *given, name=name or None)
        node.meta["comment"] = self.comment
        return node

    def get(self, value: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, value, index)

    def wait(self, value: fx.Node) -> fx.Node:
        return self.call(C10D.wait_tensor.default, value)

    def store(self, value: fx.Node, name: str) -> fx.Node:
        """Begin to copy the value to the host."""
        made = name if name.isidentifier() else f"{value.name}_store"
        return self.make(made, OURS.store.default, (value, name), {})

    def fetch(self, value: fx.Node, name: str) -> fx.Node:
        """Begin to copy the value to the device."""
        return self.make(name, OURS.fetch.default, (value, torch.device(self.device), name), {})

    def wait_copy(self, made: fx.Node, source: fx.Node) -> None:
        self.named(made, "wait", OURS.wait_copy.default, made, source, made.args[-1])

    def all_reduce(self, value: Any, op: str, axis: str) -> fx.Node:
        return self.wait(self.call(C10D.all_reduce.default, self.contiguous(value), op, self.groups[axis]))

    def contiguous(self, value: fx.Node) -> fx.Node:
        return self.named(value, "contiguous", torch.ops.aten.contiguous.default, value)

    def local(self, work: Work, value: fx.Node, dim: int, axis: str) -> fx.Node:
        """Local work of a layout change on one axis."""
        ranks = self.mesh.size(axis) if axis else 1
        match work:
            case Work.PIECE:
                return self.named(value, "piece", ops.piece, value, dim, ranks, self.coordinates[axis])
            case Work.TO_FRONT:
                return self.named(value, "to_front", ops.to_front, value, dim, ranks)
            case Work.FROM_FRONT:
                return self.named(value, "in_order", ops.from_front, value, dim, ranks)
            case Work.NOTHING:
                return value
            case Work.CLONE:
                return self.named(value, "copy", torch.ops.aten.clone.default, value)
            case Work.FLATTEN | Work.UNFLATTEN | Work.ADD_UP:
                raise ValueError(f"{work} is of several values")

    def launch(self, value: fx.Node, change: Reshard, in_place: bool) -> fx.Node:
        """Launch the collective of a layout change. `in_place`: nobody else reads the value, which becomes the sum.

        Complex numbers travel as pairs: not every collective of gloo (all-to-all) and NCCL knows them.
        """
        ranks, group = self.mesh.size(change.axis), self.groups[change.axis]
        if value.target is not ops.to_front and not in_place:
            value = self.contiguous(value)
        if change.is_complex:
            value = self.named(value, "as_real", torch.ops.aten.view_as_real.default, value)
        match change.before, change.after:
            case Shard(), Replicate():
                target, args = C10D.all_gather_into_tensor.default, (value, ranks, group)
            case Partial(op), Replicate():
                target, args = (C10D.all_reduce_ if in_place else C10D.all_reduce).default, (value, op, group)
            case Partial(), Shard():
                target, args = C10D.reduce_scatter_tensor.default, (value, "sum", ranks, group)
            case Shard(), Shard(dim):
                rows = change.local.shape[0] if dim == 0 else ranks * change.local.shape[0]
                splits = [rows // ranks] * ranks
                target, args = C10D.all_to_all_single.default, (value, splits, splits, group)
            case _:
                raise ValueError(f"no collective leads from {change.before} to {change.after}")
        launched = self.named(value, change.kind, target, *args)
        return self._waited(launched, change) if self.one_at_a_time else launched

    def send(self, value: fx.Node, step: Comm) -> fx.Node:
        """Begin what a loop sends: of a shift or a mirror, the value to another rank; else along its leading dim."""
        value, group = self.contiguous(value), self.groups[step.axis]
        match step.collective:
            case "shift" | "mirror" as to:
                target, args = getattr(OURS, to).default, (group,)
            case "all_gather":
                target, args = C10D.all_gather_into_tensor.default, (step.ranks, group)
            case "reduce_scatter":
                target, args = C10D.reduce_scatter_tensor.default, ("sum", step.ranks, group)
            case other:
                raise ValueError(f"no loop sends by {other}")
        launched = self.named(value, step.collective, target, value, *args)
        return self.wait(launched) if self.one_at_a_time else launched

    def sent(self, launched: fx.Node) -> fx.Node:
        """What came, once it is there."""
        return launched if self.one_at_a_time else self.named(launched, "wait", C10D.wait_tensor.default, launched)

    def waited(self, launched: fx.Node, change: Reshard) -> fx.Node:
        """The value that a collective makes, once it is there."""
        return launched if self.one_at_a_time else self._waited(launched, change)

    def _waited(self, launched: fx.Node, change: Reshard) -> fx.Node:
        waited = self.named(launched, "wait", C10D.wait_tensor.default, launched)
        if not change.is_complex:
            return waited
        return self.named(waited, "as_complex", torch.ops.aten.view_as_complex.default, waited)

    def named(self, after: fx.Node, suffix: str, target: Any, *args: Any) -> fx.Node:
        """A call whose name tells what it was made from: `wte_weight_all_gather`."""
        return self.make(f"{_STEP_SUFFIX.sub('', after.name)}_{suffix}", target, args, {})


_STEP_SUFFIX = re.compile(
    r"_(shift|mirror|all_gather|all_reduce|reduce_scatter|all_to_all|wait|in_order|to_front|contiguous|piece|as_real|as_complex)(_\d+)?$"
)


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
        return self.index_on(over(self.axes))

    def index_on(self, axis: str) -> fx.Node:
        return self.writer.coordinates[axis]

    def all_reduce(self, value: Any, op: str) -> fx.Node:
        return self.writer.all_reduce(value, op, over(self.axes)) if self.shards > 1 else value
