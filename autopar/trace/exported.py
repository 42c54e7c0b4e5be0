"""What an exported program must not have, as torch exports more than a plan can split; and what a traced one holds."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import torch.distributed as dist

from autopar._compat import FakeTensor
from autopar.errors import TraceError
from autopar.trace.ambient import check_device
from autopar.trace.installed import refuse_gradients_between_calls
from autopar.trace.lines import COLLECTIVE, line_of_node

CONTROL_FLOW = ("cond", "while_loop", "scan", "associative_scan", "map_impl")


SPARSE = (
    "forward makes a sparse tensor{}, and a program computes with dense ones: give it as a dense matrix (.to_dense()), "
    "or add up what its entries pick (index_select, index_add)"
)


def check_exported(exported: torch.export.ExportedProgram, with_gradient: Set[str], device_type: str) -> None:
    """Raises TraceError for what torch exports and a program for such a device does not do. `with_gradient`: buffers
    that forward sets to a tensor with one.
    """
    refuse_gradients_between_calls(exported, with_gradient)
    _no_unknown_constants(exported)
    _no_collectives(exported)
    _no_numbers(exported)
    _no_control_flow(exported)
    _no_sparse_tensors(exported)
    check_device(exported.graph_module, device_type)


def _no_control_flow(exported: torch.export.ExportedProgram) -> None:
    """Raises TraceError where forward calls torch.cond and its like, whose sides are graphs of their own."""
    for node in exported.graph.nodes:
        if str(node.target) in CONTROL_FLOW:
            raise TraceError(
                f"forward branches or loops in torch's own way, by torch.{node.target}{line_of_node(node)}, which a "
                "program does not: compute both and choose by torch.where, or loop as often as Python says"
            )


def _no_sparse_tensors(exported: torch.export.ExportedProgram) -> None:
    """Raises TraceError where forward makes one."""
    for node in exported.graph.nodes:
        made = node.meta.get("val")
        if isinstance(made, torch.Tensor) and made.layout != torch.strided:
            raise TraceError(SPARSE.format(line_of_node(node)))


def _no_unknown_constants(exported: torch.export.ExportedProgram) -> None:
    """Raises TraceError where the model reads a parameter, a buffer or an argument in a way that torch does not see."""
    nodes = {node.name: node for node in exported.graph.nodes}
    for placeholder, name in exported.graph_signature.inputs_to_lifted_tensor_constants.items():
        if isinstance(exported.constants[name], FakeTensor):
            line = next(filter(None, map(line_of_node, nodes[placeholder].users)), "")
            raise TraceError(
                f"the model reads or writes a parameter, a buffer or an argument behind torch's back{line}, through "
                ".data or an object that is no module; read it as an attribute of its module, write to a buffer itself "
                "(self.name.copy_(...), detached), and change parameters outside of forward. (torch.vmap may hide it, "
                "too, as where it multiplies a matrix by a vector: write (matrix * vector).sum(-1) there)"
            )


def _no_collectives(exported: torch.export.ExportedProgram) -> None:
    """Raises TraceError where forward calls a collective itself, in a process that is one of several: what it would
    gather or sum is of the whole batch already.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for node in exported.graph.nodes:
        if getattr(node.target, "namespace", "") in ("_c10d_functional", "_c10d_functional_autograd", "c10d"):
            name = str(node.target).split(".")[1].rstrip("_")
            raise TraceError(f"forward calls a collective itself, {name}{line_of_node(node)}. {COLLECTIVE}")


def _no_numbers(exported: torch.export.ExportedProgram) -> None:
    """Raises TraceError where forward takes a number out of a tensor, which torch exports as one that is not known."""
    for node in exported.graph.nodes:
        if str(node.target) in ("aten.item.default", "aten._local_scalar_dense.default"):
            raise TraceError(
                f"forward takes a number out of a tensor{line_of_node(node)}, and a program has no values: leave it a "
                "tensor; `assert tensor_condition` and `if tensor_condition: raise` are checked in each call"
            )


def constants_of(joint: torch.fx.GraphModule) -> dict[str, torch.Tensor]:
    """The tensors that the graph holds itself."""
    names = [str(node.target) for node in joint.graph.nodes if node.op == "get_attr"]
    return {name: getattr(joint, name) for name in names}


def plain_outputs(joint: torch.fx.GraphModule) -> dict[int, Any]:
    """The leaves of the model's outputs that are no tensors, by their number."""
    (output,) = joint.graph.find_nodes(op="output")
    return {
        desc.idx: value
        for value, desc in zip(output.args[0], output.meta["desc"], strict=True)
        if type(desc).__name__ == "PlainAOTOutput" and not isinstance(value, torch.fx.Node)
    }
