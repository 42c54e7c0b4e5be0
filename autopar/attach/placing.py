"""Where parameters go once there is a plan: all of them behind the first one, and later those that came since, as a
module was swapped, wrapped or added.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.attach.agree import agreed
from autopar.attach.copies import alike
from autopar.attach.optimizers import refuse_optimizers_with
from autopar.attach.parameters import become, carry, is_written, take_plain_tensors, whole_parameter
from autopar.attach.run import Runner
from autopar.attach.stage_run import StageRunner
from autopar.attach.staging import Staged
from autopar.attach.tensors import as_layout_of, from_rank_zero, is_elsewhere, layout_of, parameter_on
from autopar.errors import PlanMismatch, TraceError
from autopar.ir.layout import Layout, replicated
from autopar.trace.modules import replace_tensors, tensors_by_name

State = Any  # of `autopar.attach.programs`, which calls this


@contextlib.contextmanager
def as_user_class(parallel: Any) -> Iterator[None]:
    """While tracing, the module is what the user wrote: their forward, not ours."""
    ours = parallel.__class__
    state = parallel.__dict__.pop("_autopar")
    parallel.__class__ = state.model_class
    if state.own_forward is not None:
        vars(parallel)["forward"] = state.own_forward
    try:
        yield
    finally:
        vars(parallel).pop("forward", None)
        parallel.__class__ = ours
        object.__setattr__(parallel, "_autopar", state)


def adopt(parallel: nn.Module) -> None:
    """Parameters that came since `compile` become DTensors, as all are: whole, and with the values that they have. An
    optimizer that is made behind this holds what the next call lays out in place; one that was made before is refused.
    """
    state: State = vars(parallel).get("_autopar")
    if state is None or state.is_plain:
        return
    fresh: dict[int, Tensor] = {}
    for name, held in nn.Module.named_parameters(parallel):
        if _is_plain(held):
            fresh[id(held)] = made = whole_parameter(held, state.device_mesh)
            made.is_new = True  # type: ignore[attr-defined]
            refuse_optimizers_with(held, name, parallel)
    if not fresh:
        return
    state.has_new = True
    with as_user_class(parallel):
        replace_tensors(parallel, fresh)
    take_plain_tensors(parallel)


def _is_plain(held: Tensor) -> bool:
    """Whether a parameter is no DTensor; `torch.func.functional_call` puts tensors in their places, which are none."""
    return isinstance(held, nn.Parameter) and not isinstance(held, DTensor)


def refuse_without_values(name: str, parameter: Tensor) -> None:
    """Raises RuntimeError for a parameter on the meta device."""
    if parameter.is_meta:
        raise RuntimeError(
            f"parameter {name} is on the meta device and has no values: "
            "call to_empty(device=...) on the parallel module, then load or initialise its parameters"
        )


def newcomers(parallel: nn.Module, state: State) -> dict[str, nn.Parameter]:
    """Parameters that nobody has laid out yet. Where the others are plain tensors, they have rank 0's values now, as
    new buffers have.
    """
    adopt(parallel)
    if state.plan is not None:
        _share_buffers(parallel, state)
    if not state.is_plain:
        return {name: held for name, held in parallel.named_parameters() if getattr(held, "is_new", False)}
    held_by_name = [*parallel.named_parameters()]
    found = {name: one for name, one in held_by_name if _is_plain(one) and state.plain.get(id(one)) is not one}
    for name, held in found.items():
        refuse_without_values(name, held)
    with torch.inference_mode(False), torch.no_grad():
        for held in found.values():
            _take(held, from_rank_zero(held.detach(), state.device_mesh))
            state.plain[id(held)] = held
    return found


def _share_buffers(parallel: nn.Module, state: State) -> None:
    """Buffers that no program has seen yet get rank 0's values. One that was made of a parameter, as pruning's mask is,
    lies as that does; a buffer is whole.
    """
    for name, buffer in [*parallel.named_buffers()]:
        if name not in state.buffers:
            state.buffers.add(name)
            if isinstance(buffer, DTensor):
                path, _, leaf = name.rpartition(".")
                parallel.get_submodule(path)._buffers[leaf] = buffer = buffer.full_tensor()
            if not buffer.is_meta:
                _take(buffer, from_rank_zero(buffer.to_dense(), state.device_mesh))


def _take(held: Tensor, sent: Tensor) -> None:
    """Values that are others; `sent` is dense. What has them already is not written to: a script may have computed with
    it before the first call, and its backward looks whether somebody did.
    """
    if held.device != sent.device or not torch.equal(held.to_dense(), sent):
        held.copy_(as_layout_of(sent, held))


def layouts(parallel: nn.Module, state: State, new: Mapping[str, nn.Parameter]) -> dict[str, Layout]:
    """How parameters lie: in the plan's layouts. New ones will lie as those of their names did, if they had their
    shapes; others whole.
    """
    before = {node.target: node for node in state.plan.graph.nodes if node.op == "parameter"}

    def of(name: str, held: Tensor) -> Layout:
        if not isinstance(held, DTensor):
            return replicated(state.mesh)
        node = before.get(name)
        same = name in new and node is not None and state.plan.graph.stored_type(node).shape == tuple(held.shape)
        return state.plan.parameters[name] if same else layout_of(held)

    return {name: of(name, held) for name, held in tensors_by_name(parallel)[0].items()}


def known_places(parallel: nn.Module, state: State, new: Mapping[str, nn.Parameter]) -> Staged | None:
    """The stages of the training step, and which of them have parameters that have another name now."""
    staged, pipe = state.staged, state.pipe
    if staged is None:
        return None
    owners = staged.owners
    more = {
        name: tuple(staged.stages_at(pipe.meshes.index(held.device_mesh)))
        for name, held in parallel.named_parameters()
        if name not in owners and name not in new and isinstance(held, DTensor)
    }
    return replace(staged, more={**staged.more, **more}) if more else staged


def lay_out(parallel: nn.Module, state: State, runner: Runner) -> None:
    """Every parameter becomes a DTensor in the plan's layout, in place: optimizers that hold it already see the new
    one.

    Buffers stay whole; as with parameters, rank 0's values win.
    """
    _share_buffers(parallel, state)
    adopt(parallel)
    parameters = tensors_by_name(parallel)[0]
    _tell_written([name for name, held in parameters.items() if is_written(held)])
    written = [node.target for node in runner.graph.nodes if node.op == "buffer" and node.target in parameters]
    if written and isinstance(runner, StageRunner):
        raise TraceError(
            f"forward changes parameter {written[0]}, which does not train, and a pipeline's stages do not: plan the "
            "step without stages, or change it after optimizer.step(), under torch.no_grad()"
        )
    named = {name: parameters[name] for name in (*runner.plan.parameters, *written)}
    _place(state, runner, named)
    done = {*map(id, named.values())}
    for name, parameter in parameters.items():
        if id(parameter) not in done:
            raise AssertionError(f"parameter {name} is not in the plan")
    state.has_new = False


def _tell_written(names: Sequence[str]) -> None:
    """Warn of what is right where somebody loads weights, and wrong where somebody trains both models."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"{names[0]}{more} of the model were written to between autopar.compile and the parallel module's first "
            "call, which begins with the new values. To train both, compile a copy (copy.deepcopy(model)), or give "
            "example_inputs= to compile",
            stacklevel=2,
        )


def lay_out_new(parallel: nn.Module, state: State, runner: Runner, new: Mapping[str, nn.Parameter]) -> None:
    """The same, of those that came since. Raises PlanMismatch where the stages of a pipeline would need others of them
    than ranks have.
    """
    if isinstance(runner, StageRunner) and state.staged is not None:
        agreed(lambda: _check_places(parallel, runner, new), runner.pipe.whole)
        owners = runner.staged.owners
        state.staged = replace(state.staged, more={**state.staged.more, **{name: owners[name] for name in new}})
    if state.is_plain:
        return
    for one in alike(parallel):
        others: State = one._autopar
        _place(state, runner, new if one is parallel else newcomers(one, others))
        others.has_new, others.staged = False, state.staged


def _check_places(parallel: nn.Module, runner: StageRunner, new: Mapping[str, nn.Parameter]) -> None:
    for name, places in runner.staged.holders.items():
        held = parallel.get_parameter(name)
        is_here = isinstance(held, DTensor) and not is_elsewhere(held)
        is_read = runner.pipe.place in places
        if name not in new and is_here != is_read and (is_read or runner.gradients):
            raise PlanMismatch(
                f"parameter {name} is read in another pipeline stage now than the one that holds it; parts of the "
                "model may change as long as each weight is read where it was: compile the model anew. Where forward "
                "draws which ones it reads (random, numpy), have it read all in one order, and weigh what they give"
            )


def _place(state: State, runner: Runner, parameters: Mapping[str, nn.Parameter]) -> None:
    holders = runner.staged.holders if isinstance(runner, StageRunner) else {}
    for name, held in parameters.items():
        layout = runner.plan.parameters.get(name) or replicated(state.mesh)  # forward writes to it
        if isinstance(runner, StageRunner) and runner.pipe.place not in holders[name]:
            made = runner.pipe.given_to_others(held, layout, holders[name][0])
        else:
            on_host = runner.plan.residence.get(name) == "host"
            made = parameter_on(state.mesh, state.device_mesh, held, layout, on_host=on_host)
        become(held, made)
        held.is_new = False  # type: ignore[attr-defined]


def make_plain(parallel: nn.Module, state: State) -> None:
    """DTensors that are whole on every rank become plain tensors: each operator of an optimizer is quicker on those."""
    plain: dict[int, Tensor] = {}
    for held in parallel.parameters():
        made = nn.Parameter(cast(DTensor, held.detach()).to_local(), requires_grad=held.requires_grad)
        carry(held, made)
        plain[id(held)] = made
        state.plain[id(made)] = made
    state.is_plain = True
    with as_user_class(parallel):
        replace_tensors(parallel, plain)
