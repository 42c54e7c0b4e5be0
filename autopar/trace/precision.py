"""Mixed precision as casts in the graph: parameters stay as they are stored and are cast where they enter the program.

The planner then decides by price whether a weight is cast before it is gathered (half the bytes on the wire: yes) and
where its gradient is summed. `reduce_dtype` takes the latter out of its hands: such a gradient is cast first, then
summed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Node
from autopar.ir.precision import CAST, TO_REDUCE_DTYPE
from autopar.trace.written import NORMS

__all__ = ["CAST", "NAMES", "TO_REDUCE_DTYPE", "casts_in_place", "compute_dtype", "insert_casts", "precision_named"]

NAMES = ("bf16", "fp32")


def precision_named(name: str | MixedPrecisionPolicy | None) -> MixedPrecisionPolicy | None:
    """What a short form stands for: "bf16" computes in bfloat16 over the stored parameters, and sums gradients in
    float32; "fp32" casts nothing. A policy is itself.

    Raises ValueError for another name.
    """
    if name is None or isinstance(name, MixedPrecisionPolicy):
        return name
    match name:
        case "bf16":
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        case "fp32":
            return None
        case "fp16" | "float16":
            # A loss of float16 times the scale with which GradScaler begins (65536) is above float16's largest.
            raise ValueError(
                f"precision {name!r} is not known; choose {' or '.join(NAMES)}: gradients of float16 need a loss of "
                "float32 and a torch.amp.GradScaler in your loop, so give autopar.compile the MixedPrecisionPolicy "
                "that goes with it"
            )
        case _:
            raise ValueError(
                f"precision {name!r} is not known; choose {' or '.join(NAMES)}, or give autopar.compile a "
                "MixedPrecisionPolicy"
            )


def compute_dtype(tensor: torch.Tensor, precision: MixedPrecisionPolicy | None) -> torch.dtype:
    """What a parameter or input of the model computes in."""
    if precision is None or precision.param_dtype is None or not tensor.is_floating_point():
        return tensor.dtype
    return precision.param_dtype


def insert_casts(
    module: fx.GraphModule, stored: Mapping[str, torch.Tensor], inputs: list[Any], precision: MixedPrecisionPolicy
) -> None:
    """Give an exported module, traced in the compute precision, its stored parameters and inputs back, with casts
    behind them.

    `stored`: parameters in their own precision, by name; `inputs`: the flat inputs as the caller passes them. Raises
    TraceError where a parameter is written to, as its cast would be.
    """
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in stored or _is_of_norms_with_statistics(node):
            continue
        if precision.param_dtype is not None and stored[name].is_floating_point():
            if _is_written(module, node):
                raise TraceError(
                    f"forward changes parameter {name}, which with precision= is stored in another dtype than the one "
                    "it computes in, and a program does not: change it after optimizer.step(), under torch.no_grad()"
                )
            _cast_after(module, node, stored[name].dtype, precision.param_dtype)
    for name, tensor in stored.items():
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        if leaf in holder._parameters:
            holder._parameters[leaf] = nn.Parameter(tensor, requires_grad=tensor.requires_grad)
    for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(value, torch.Tensor) and precision.cast_forward_inputs:
            _cast_after(module, node, value.dtype, compute_dtype(value, precision))
    (output,) = module.graph.find_nodes(op="output")
    if precision.output_dtype is not None:
        with module.graph.inserting_before(output):
            leaves = [
                module.graph.call_method("to", (leaf, precision.output_dtype)) if _is_floating(leaf) else leaf
                for leaf in output.args[0]
            ]
        output.args = (tuple(leaves),)
    module.recompile()


def _is_of_norms_with_statistics(node: fx.Node) -> bool:
    """Whether only batch norms, or instance norms, with statistics of their own read it: their kernels take inputs of
    16 bits beside parameters and statistics of 32, and none takes parameters of 16 bits beside statistics of 32. FSDP 1
    and autocast leave these in float32, too.
    """
    return bool(node.users) and all(user.target in NORMS and user.args[3] is not None for user in node.users)


def _is_written(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether an operator writes to it, or to a look at it, also in a region without gradients or of autocast."""
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if schema is None:
            inner = next(
                (getattr(module, str(one.target)) for one in user.all_input_nodes if _is_region(module, one)), None
            )
            if inner is not None:
                place = [one for one in user.all_input_nodes if not _is_region(module, one)].index(node)
                if _is_written(inner, inner.graph.find_nodes(op="placeholder")[place]):
                    return True
            continue
        aliased = schema.arguments[0].alias_info if user.args and user.args[0] is node else None
        if aliased is not None and (aliased.is_write or _is_written(module, user)):
            return True
    return False


def _is_region(module: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), fx.GraphModule)


def _is_floating(value: Any) -> bool:
    held = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(held, torch.Tensor) and held.is_floating_point()


def _cast_after(module: fx.GraphModule, node: fx.Node, have: torch.dtype, want: torch.dtype) -> None:
    if have == want:
        return
    with module.graph.inserting_after(node):
        cast = module.graph.call_method("to", (node, want))
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


def casts_in_place(graph: Graph) -> Graph:
    """A trace has the casts of all parameters at its beginning, and those of all gradients at its end. Here the former
    stand right before their first reader and the latter right behind what they cast, so that copies and gradients are
    held no longer than they must be, and gradients are summed while backward goes on.
    """
    node_of = graph.by_name
    gradients = {r.ref.name for r in graph.results if r.kind == "gradient" and r.ref is not None}
    reader: dict[str, Node] = {}  # value -> who reads it first
    for node in graph.nodes:
        for ref in node.operands:
            reader.setdefault(ref.name, node)
    before: dict[str, list[Node]] = defaultdict(list)
    behind: dict[str, list[Node]] = defaultdict(list)
    for cast in (node for node in graph.nodes if node.op == CAST):
        maker, first = node_of[cast.operands[0].name], reader.get(cast.name)
        if maker.op == "parameter" and first is not None and first.phase == cast.phase:
            before[first.name].append(cast)
        elif cast.name in gradients and maker.phase == cast.phase:
            behind[maker.name].append(cast)
    moved = {cast.name for casts in (*before.values(), *behind.values()) for cast in casts}
    places = ((*before[node.name], node, *behind[node.name]) for node in graph.nodes if node.name not in moved)
    return Graph(tuple(chain.from_iterable(places)), graph.results)


def reduce_after_cast(graph: Graph) -> Graph:
    """Mark the casts that turn gradients into the stored precision: partial sums pass them, and are summed behind
    them.
    """
    made = {r.ref.name for r in graph.results if r.kind == "gradient" and r.ref is not None}
    nodes = tuple(
        replace(node, op=TO_REDUCE_DTYPE) if node.name in made and node.op == CAST else node for node in graph.nodes
    )
    return Graph(nodes, graph.results)
