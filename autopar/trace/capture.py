"""torch comes in here: a model and example inputs become one joint forward/backward ATen `torch.fx` graph.

Everything runs on fake tensors, so a model of any size, on any device or on none, is traced without allocating it.
The route is `torch.export` (non-strict), then AOTAutograd's joint graph, whose placeholders and outputs carry
descriptors that say what they are.
"""

from __future__ import annotations

import contextlib
import operator
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar._compat import FakeTensorMode, aot_export_joint_with_descriptors, pytree
from autopar.modules import aliases, with_tensors
from autopar.trace.precision import compute_dtype, insert_casts


class TraceError(RuntimeError):
    """The model could not be captured as one graph; the message names the line of the model."""


@dataclass
class Captured:
    """What capture leaves behind.

    `joint`: the fx graph module. `leaves`: the flat example inputs by path. `constants`: tensors that the model's code
    holds. `out_spec`: the tree of the model's outputs; `output_constants`: those of its leaves that are no tensors.
    `aliases`: every further name of a parameter or buffer that the model has under several -> its first name.
    """

    joint: torch.fx.GraphModule
    out_spec: pytree.TreeSpec
    leaves: tuple[tuple[str, Any], ...]
    constants: dict[str, torch.Tensor]
    output_constants: dict[int, Any]
    aliases: dict[str, str]


def _keep_scalar_gradients(outputs: list[Any]) -> list[Any]:
    """Where an output is a scalar that requires grad, detach the others.

    Otherwise a logits-sized tangent of zeros would be asked for, and flow through the whole backward pass.
    """
    tensors = [value for value in outputs if isinstance(value, torch.Tensor)]
    if any(value.requires_grad and value.ndim == 0 for value in tensors):
        return [value.detach() if isinstance(value, torch.Tensor) and value.ndim else value for value in outputs]
    return outputs


def _only_scalars_differentiable(module: torch.fx.GraphModule) -> None:
    """Pass the outputs of an exported module through `_keep_scalar_gradients`."""
    (output,) = module.graph.find_nodes(op="output")
    leaves = list(output.args[0])
    with module.graph.inserting_before(output):
        kept = module.graph.call_function(_keep_scalar_gradients, (leaves,))
        output.args = (tuple(module.graph.call_function(operator.getitem, (kept, i)) for i in range(len(leaves))),)
    module.recompile()


def fake_copy(model: nn.Module, mode: FakeTensorMode, precision: MixedPrecisionPolicy | None = None) -> nn.Module:
    """The model with fake tensors of the same shapes on the CPU, whatever device (or meta) the real ones are on.

    With a precision, parameters have the dtype they compute in.
    """
    fakes: dict[int, torch.Tensor] = {}
    with mode:
        for parameter in model.parameters():
            dtype = compute_dtype(parameter, precision)
            empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype)
            fakes[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            fakes[id(buffer)] = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype)
    return with_tensors(model, fakes)


def _fake(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(like.shape, dtype=dtype)


def flatten_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """(path, leaf) of every argument, in a fixed order: positional first, keywords by name. Paths read `[0]`,
    `['x']`.
    """
    paths, spec = pytree.tree_flatten_with_path((tuple(args), dict(sorted(kwargs.items()))))
    return [(pytree.keystr(path[1:]), leaf) for path, leaf in paths], spec


@contextlib.contextmanager
def _naming_the_line() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        where = _line_of_model(error)
        reason = re.split(r"\n\s*\n|\nThe following|\nUser code|\nFor more", str(error).strip())[0].replace("\n", " ")[
            :400
        ]
        raise TraceError(
            f"the model cannot be captured as one graph{where}: {type(error).__name__}: {reason} "
            "Control flow and shapes may not depend on tensor values; rewrite that line without them."
        ) from error


def _line_of_model(error: BaseException | None) -> str:
    """The innermost line outside torch and autopar: from the traceback, else from what the message quotes."""
    ours = (torch.__path__[0], __file__.rsplit("/", 2)[0], "<")
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if not frame.filename.startswith(ours) and "contextlib" not in frame.filename:
                if "transformers/utils" in frame.filename or frame.name == "<module>":
                    continue
                return f" at {frame.filename}:{frame.lineno} ({(frame.line or '').strip()})"
        error = error.__cause__ or error.__context__
    return ""


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool | None = None,
    precision: MixedPrecisionPolicy | None = None,
) -> Captured:
    """Capture forward and backward of `model(*args, **kwargs)`, in its present mode or in train or eval mode.

    `precision`: parameters and inputs are cast as it says before they are used. Tensors among the inputs give shapes
    and dtypes only; DTensors count with their global shape. Raises TraceError.
    """
    leaves, spec = flatten_inputs(args, kwargs)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_model = fake_copy(model, mode, precision)
    if training is not None:
        fake_model.train(training)
    with mode:
        fakes = [_fake(leaf, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves]
        casts = precision if precision is not None and precision.cast_forward_inputs else None
        cast = [_fake(leaf, compute_dtype(leaf, casts)) if isinstance(leaf, torch.Tensor) else leaf for leaf in fakes]
    with _naming_the_line(), ExitStack() as stack:
        exported = torch.export.export(fake_model, *pytree.tree_unflatten(cast, spec), strict=False)
        inner = exported.module(check_guards=False)
        if precision is not None:
            stored = dict(fake_copy(model, mode).named_parameters(remove_duplicate=False))
            insert_casts(inner, stored, fakes, precision)
        _only_scalars_differentiable(inner)
        fake_args, fake_kwargs = pytree.tree_unflatten(fakes, spec)
        joint = aot_export_joint_with_descriptors(stack, inner, fake_args, fake_kwargs, decompositions=None)
    graph_module = joint.graph_module
    constants = {
        str(node.target): getattr(graph_module, str(node.target))
        for node in graph_module.graph.nodes
        if node.op == "get_attr"
    }
    (output,) = graph_module.graph.find_nodes(op="output")
    plain = {
        desc.idx: value
        for value, desc in zip(output.args[0], output.meta["desc"], strict=True)
        if type(desc).__name__ == "PlainAOTOutput" and not isinstance(value, torch.fx.Node)
    }
    return Captured(graph_module, joint.out_spec, tuple(leaves), constants, plain, aliases(model))
