"""torch comes in here: a model and example inputs become one joint forward/backward ATen `torch.fx` graph.

Everything runs on fake tensors, so a model of any size, on any device or on none, is traced without allocating it.
The route is `torch.export` (non-strict), then AOTAutograd's joint graph, whose placeholders and outputs carry
descriptors that say what they are.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar._compat import FakeTensorMode, aot_export_joint_with_descriptors, pytree
from autopar.errors import TraceError
from autopar.trace.ambient import (
    autocast_as,
    autocast_as_asked,
    autocast_for,
    check_device,
    distributions_as_they_come,
    has_autocast,
    insert_autocast,
    one_tf32_setting,
    without_autocast,
)
from autopar.trace.attention import keep_attention
from autopar.trace.casts import NONE, Autocast, bring_home, naming_autocast, spell_out
from autopar.trace.forward import no_unknown_constants, watch_forward
from autopar.trace.functions import functions_kept, with_functions
from autopar.trace.lines import naming_the_line, without_torchs_log
from autopar.trace.masks import masks_left_out
from autopar.trace.modules import aliases, computed_tensors, with_tensors
from autopar.trace.outputs import returning, settle
from autopar.trace.plain_norm import make_traceable, synced
from autopar.trace.precision import compute_dtype, insert_casts
from autopar.trace.reads import Reads, line_that_draws, random_state, watching

_ONE_AT_A_TIME = threading.RLock()  # torch traces for one thread at a time


@dataclass
class Captured:
    """What capture leaves behind.

    `joint`: the fx graph module. `leaves`: the flat example inputs by path. `constants`: tensors that the model's code
    holds. `out_spec`: the tree of the model's outputs, as an `autopar.trace.outputs.Returned`; `output_constants`:
    those of its leaves that are no tensors.
    `aliases`: every further name of a parameter or buffer that the model has under several -> its first name.
    `without_tangent`: outputs (by index) that have a gradient in the model and none in the joint graph, as nobody is
    expected to use it. `reads`: what the model's code saw besides tensors. `notes`: what a user should know. `synced`:
    names of the modules that are a SyncBatchNorm.
    """

    joint: torch.fx.GraphModule
    out_spec: pytree.TreeSpec
    leaves: tuple[tuple[str, Any], ...]
    constants: dict[str, torch.Tensor]
    output_constants: dict[int, Any]
    aliases: dict[str, str]
    without_tangent: frozenset[str] = frozenset()
    reads: Reads = field(default_factory=Reads)
    notes: tuple[str, ...] = ()
    synced: frozenset[str] = frozenset()


def _only_scalars_differentiable(module: torch.fx.GraphModule) -> frozenset[str]:
    """Where an output of an exported module is a scalar with a gradient, let the others have none: a tangent of zeros
    as large as the logits would flow through the whole backward pass. Which they are (by index) is returned.
    """
    (output,) = module.graph.find_nodes(op="output")
    leaves = list(output.args[0])
    dropped: set[str] = set()

    def keep_scalar_gradients(values: list[Any]) -> list[Any]:
        has_loss = any(isinstance(v, torch.Tensor) and v.requires_grad and v.ndim == 0 for v in values)
        if not has_loss:
            return values
        dropped.update(
            str(i) for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.ndim and v.requires_grad
        )
        return [value.detach() if isinstance(value, torch.Tensor) and value.ndim else value for value in values]

    with module.graph.inserting_before(output):
        kept = module.graph.call_function(keep_scalar_gradients, (leaves,))
        output.args = (tuple(module.graph.call_function(operator.getitem, (kept, i)) for i in range(len(leaves))),)
    module.recompile()
    return dropped  # type: ignore[return-value]  # it is filled when the module runs


def fake_copy(
    model: nn.Module, mode: FakeTensorMode, precision: MixedPrecisionPolicy | None = None, device: str = "cpu"
) -> nn.Module:
    """The model with fake tensors of the same shapes on `device`, whatever device (or meta) the real ones are on.

    With a precision, parameters have the dtype they compute in. On another device than the CPU none requires grad.
    """
    fakes: dict[int, torch.Tensor] = {}
    with mode, torch.device(device):
        for parameter in model.parameters():
            dtype = compute_dtype(parameter, precision)
            empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype)
            fakes[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad and device == "cpu")
        for buffer in model.buffers():
            fakes[id(buffer)] = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype)
        for value in computed_tensors(model):
            fakes[id(value)] = torch.empty(value.shape, dtype=value.dtype)
    return with_tensors(model, fakes)


def _fake(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(like.shape, dtype=dtype)


def flatten_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """(path, leaf) of every argument, in a fixed order: positional first, keywords by name. Paths read `[0]`,
    `['x']`.
    """
    paths, spec = pytree.tree_flatten_with_path((tuple(args), dict(sorted(kwargs.items()))))
    return [(pytree.keystr(path[1:]), leaf) for path, leaf in paths], spec


def shown(leaves: list[tuple[str, Any]]) -> str:
    """The inputs in words: `x float32[8, 31], y float32[8, 30]`; numbers, texts and nothing are left out."""
    told: list[str] = []
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            name = path[2:-2] if path.startswith("['") and path.count("[") == 1 else path
            told.append(f"{name} {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}")
    return ", ".join(told) or "none of which is a tensor"


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool | None = None,
    precision: MixedPrecisionPolicy | None = None,
    every_tangent: bool = False,
    device_type: str = "cpu",
    under_its_autocast: bool = False,
) -> Captured:
    """Capture forward and backward of `model(*args, **kwargs)`, in its present mode or in train or eval mode, under the
    present autocast: the casts are in the forward, as if backward were called outside.

    `precision`: parameters and inputs are cast as it says before they are used. `device_type`: what the program will
    run on; `under_its_autocast`: some of it runs under that device's autocast (found out where it is left out). Tensors
    among the inputs give shapes and dtypes only; DTensors count with their global shape.
    `every_tangent`: outputs beside a scalar loss get their gradients, too. Raises TraceError.
    """
    autocast = autocast_for(device_type)
    leaves, spec = flatten_inputs(args, kwargs)
    notes: list[str] = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    around = next((Autocast(on, getattr(torch, to)) for device, on, to in autocast if device == device_type), NONE)
    under_its_autocast |= around.enabled and device_type != "cpu"
    exported_on = device_type if under_its_autocast else "cpu"
    fake_model = fake_copy(model, mode, precision, exported_on)
    make_traceable(fake_model)
    if training is not None:
        fake_model.train(training)
    caches = settle(fake_model, notes) and kwargs.get("use_cache") is not False
    reads, drawn = Reads(), random_state()
    returning(fake_model, reads, notes)
    watch_forward(fake_model)
    with mode, torch.device(exported_on):
        fakes = [_fake(leaf, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves]
        casts = precision if precision is not None and precision.cast_forward_inputs else None
        cast = [_fake(leaf, compute_dtype(leaf, casts)) if isinstance(leaf, torch.Tensor) else leaf for leaf in fakes]

    def by_itself() -> object:
        called = fake_copy(model, mode, precision, exported_on)
        called.train(model.training if training is None else training)
        call_args, call_kwargs = pytree.tree_unflatten(cast, spec)
        with mode, autocast_as(autocast), autocast_as_asked(device_type), torch.no_grad():
            return called(*call_args, **call_kwargs)

    naming = naming_the_line(shown(leaves), by_itself)
    with (
        _ONE_AT_A_TIME, without_torchs_log(), naming, ExitStack() as stack,
        naming_autocast(device_type, under_its_autocast),
    ):  # fmt: skip
        stack.enter_context(one_tf32_setting())
        # Without oneDNN recurrent layers are steps that can be split, instead of one operator that only CPUs have.
        without_onednn = torch.backends.mkldnn.flags(False, None, None, None)  # type: ignore[arg-type]
        with (
            autocast_as(autocast),
            autocast_as_asked(device_type),
            without_onednn,
            watching(fake_model, reads),
            functions_kept() as functions,
            distributions_as_they_come(),
            masks_left_out(notes, caches),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "The .*attribute.* assigned during export")  # which `returning` sees to
            exported = torch.export.export(fake_model, *pytree.tree_unflatten(cast, spec), strict=False)
        no_unknown_constants(exported)
        check_device(exported.graph_module, device_type)
        if not under_its_autocast and has_autocast(exported.graph_module, device_type):
            return capture(
                model, args, kwargs, training=training, precision=precision, every_tangent=every_tangent,
                device_type=device_type, under_its_autocast=True,
            )  # fmt: skip
        if random_state() != drawn:
            _refuse_drawing(fake_model, pytree.tree_unflatten(cast, spec), mode)
        inner = exported.module(check_guards=False)
        with_functions(inner, functions)
        if precision is not None:
            copied = fake_copy(model, mode, device=exported_on)
            stored = dict(copied.named_parameters(remove_duplicate=False))
            insert_casts(inner, stored, fakes, precision)
        if under_its_autocast:
            spell_out(inner, fakes, around, device_type, mode)
            trained = {n for n, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}
            bring_home(inner, trained, mode)
            with mode:
                fakes = [_fake(leaf, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in fakes]
        keep_attention(inner)
        dropped = frozenset[str]() if every_tangent else _only_scalars_differentiable(inner)
        if device_type == "cpu":
            insert_autocast(inner, autocast)
        fake_args, fake_kwargs = pytree.tree_unflatten(fakes, spec)
        with without_autocast():
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
    return Captured(
        graph_module, joint.out_spec, tuple(leaves), constants, plain, aliases(model), frozenset(dropped), reads,
        tuple(notes), synced(model),
    )  # fmt: skip


def _refuse_drawing(model: nn.Module, call: Any, mode: FakeTensorMode) -> None:
    """Raise where forward takes numbers from Python's or numpy's generator: a program would repeat them for ever."""
    args, kwargs = call
    with mode:
        line = line_that_draws(lambda: model(*args, **kwargs))
    if line is not None:
        raise TraceError(
            f"a random number that Python or numpy draws at {line} would be the same at every call; "
            "draw it with torch (torch.rand), or outside, and pass it as a tensor"
        )
