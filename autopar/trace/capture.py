"""torch comes in here: a model and example inputs become one joint forward/backward ATen `torch.fx` graph.

Everything runs on fake tensors, so a model of any size, on any device or on none, is traced without allocating it.
The route is `torch.export` (non-strict), then AOTAutograd's joint graph, whose placeholders and outputs carry
descriptors that say what they are.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar._compat import (
    FakeTensorMode,
    aot_export_joint_with_descriptors,
    checking_truths,
    keeping_grad_modes,
    pytree,
    scripted_as_written,
    without_parametrization_cache,
)
from autopar.errors import TraceError
from autopar.trace.ambient import (
    AutocastState,
    autocast_as,
    autocast_as_asked,
    autocast_for,
    distributions_as_they_come,
    has_autocast,
    insert_autocast,
    one_tf32_setting,
    without_autocast,
)
from autopar.trace.apart import keep_apart
from autopar.trace.asked import Arguments, Asked
from autopar.trace.attention import keep_attention
from autopar.trace.cached import computing_for_good
from autopar.trace.calls import dense_inputs, shown
from autopar.trace.casts import NONE, Autocast, bring_home, naming_autocast, spell_out
from autopar.trace.changed import ArgumentsChanged
from autopar.trace.counted import ARGUMENT, Counting, with_counted
from autopar.trace.derivatives import TANGENTS, Derivative
from autopar.trace.drawing import Drawing, random_state
from autopar.trace.experts import experts_kept
from autopar.trace.exported import check_exported, constants_of, plain_outputs
from autopar.trace.fakes import fake_copy
from autopar.trace.flat_inputs import FlatInputs, fake_inputs, fake_of, requiring_grad, same_in
from autopar.trace.forward import watch_forward
from autopar.trace.functions import functions_kept, with_functions
from autopar.trace.gradients import traced_with, variables_seen, without_own_leaves
from autopar.trace.identity import asks_which
from autopar.trace.independent import hangs_on_nothing, refuse_fakes
from autopar.trace.installed import unsaved_as_attributes
from autopar.trace.left import Left
from autopar.trace.lines import naming_the_line, without_torchs_log
from autopar.trace.literals import small_buffers
from autopar.trace.masks import masks_left_out
from autopar.trace.modules import (
    aliases,
    as_plain_modules,
    calling_forward,
    check_names,
    leaving_modules,
    sparse_buffers,
)
from autopar.trace.numbers import Number
from autopar.trace.outputs import returning, settle
from autopar.trace.outside import states_outside, undrawn, unlike
from autopar.trace.plain_norm import make_traceable, synced
from autopar.trace.precision import insert_casts
from autopar.trace.reads import Reads, refuse, watching
from autopar.trace.records import classes_in
from autopar.trace.tangents import outputs_settled
from autopar.trace.values import Change
from autopar.trace.written import read_before_assigned

_ONE_AT_A_TIME = threading.RLock()  # torch traces for one thread at a time


@dataclass
class Captured:
    """What capture leaves behind.

    `joint`: the fx graph module. `leaves`: the flat example inputs by path. `constants`: tensors that the model's code
    holds. `out_spec`: the tree of the model's outputs, as an `autopar.trace.outputs.Returned`; `output_constants`:
    those of its leaves that are no tensors. `aliases`: every further name of a parameter or buffer -> its first name.
    `without_tangent`: outputs (by index) that have a gradient in the model and none in the joint graph, as nobody is
    expected to use it. `reads`: what the model's code saw besides tensors. `notes`: what a user should know. `synced`:
    names of the modules that are a SyncBatchNorm. `device_type`: what the program will run on.
    `own_leaves`: outputs (by index) that require grad and lead to no parameter or input.
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
    device_type: str = "cpu"
    own_leaves: frozenset[int] = frozenset()


def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


@dataclass(frozen=True)
class _Setting:
    """How a model is traced: on fake tensors of `mode`, in train or eval mode if `training` says so, under `autocast`.

    `around`: the present autocast of the device that the program is for. `under_its_autocast`: some of the model runs
    under that device's autocast, so that it is exported as one on that device. `counted`: numbers that are arguments.
    """

    model: nn.Module
    mode: FakeTensorMode
    training: bool | None
    precision: MixedPrecisionPolicy | None
    device_type: str
    autocast: AutocastState
    around: Autocast
    under_its_autocast: bool
    counted: Counting
    derivatives: Sequence[Derivative]
    arguments: Arguments
    drawing: Drawing
    changed: frozenset[str] = frozenset()  # arguments that forward changes, by path
    same: Mapping[str, str] = field(default_factory=dict[str, str])  # `same_in`

    @property
    def device(self) -> str:
        """Where the fake tensors are."""
        return self.device_type if self.under_its_autocast else "cpu"

    def copy(self, originals: dict[int, Any] | None = None, left: Sequence[torch.Tensor] = ()) -> nn.Module:
        return fake_copy(self.model, self.mode, self.precision, self.device, originals, left)

    def run_by_itself(self, inputs: FlatInputs, caches: list[Any]) -> object:
        """What a copy of the model returns to a call that nobody traces."""
        called, (args, named) = self.copy(), inputs.call()
        kwargs = {name: value for name, value in named.items() if name not in (ARGUMENT, TANGENTS)}
        called.train(self.model.training if self.training is None else self.training)
        as_there = autocast_as(self.autocast), autocast_as_asked(self.device_type)
        with self.mode, as_there[0], as_there[1], torch.no_grad(), computing_for_good(caches):
            return nn.Module.__call__(called, *args, **kwargs)


@dataclass(frozen=True)
class _Watched:
    """The copy of a model that is traced. `reads`, `notes`: what is found out about it on the way. `caches`: it would
    have made a key/value cache, and `may_cache`. `drawn`: the random state of Python and numpy before.
    `originals`: id of what was copied -> that.
    """

    model: nn.Module
    reads: Reads
    notes: list[str]
    caches: bool
    may_cache: bool
    drawn: tuple[int, int]
    originals: Mapping[int, Any]


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool | None = None,
    precision: MixedPrecisionPolicy | None = None,
    every_tangent: bool = False,
    loss_alone: bool = False,
    device_type: str = "cpu",
    counted: Counting | None = None,
    derivatives: Sequence[Derivative] = (),
    arguments: Arguments | None = None,
) -> Captured:
    """Capture forward and backward of `model(*args, **kwargs)`, in its present mode or in train or eval mode, under the
    present autocast: the casts are in the forward, as if backward were called outside.

    `precision`: parameters and inputs are cast as it says before use; tensors among these give shapes and dtypes alone.
    `device_type`: what the program will run on.
    `every_tangent`: outputs beside a scalar loss get gradients, and scalars beside one that is called `loss`;
    `loss_alone`: others are None. `counted`: numbers that are arguments (`autopar.trace.counted`). `derivatives`: what
    is captured in the place of outputs (`autopar.trace.derivatives`). `arguments`: what forward may ask. Raises
    TraceError.
    """
    check_names(model)
    around = _autocast_around(device_type)
    setting = _Setting(
        model, _fake_mode(), training, precision, device_type, autocast_for(device_type),
        around, around.enabled and device_type != "cpu", counted or Counting(),
        derivatives, arguments or Arguments(), Drawing(),
    )  # fmt: skip
    with undrawn(unlike(states_outside())):  # forward may set the seed that was set before
        return _captured(setting, args, kwargs, every_tangent=every_tangent, loss_alone=loss_alone)


def _captured(
    setting: _Setting, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, every_tangent: bool, loss_alone: bool
) -> Captured:
    model, device_type = setting.model, setting.device_type
    again = partial(_captured, args=args, kwargs=kwargs, every_tangent=every_tangent, loss_alone=loss_alone)
    further = setting.drawing.draws.among(with_counted(kwargs, model, setting.counted.places))
    leaves, spec = dense_inputs(model, args, further)
    setting = replace(setting, same=same_in(leaves) if asks_which(map(type, model.modules())) else {})
    copy = _ready_to_trace(setting, kwargs.get("use_cache") is not False)
    inputs = fake_inputs(leaves, spec, setting.mode, setting.device, setting.precision)
    alone = partial(setting.run_by_itself, inputs, copy.reads.caches)
    with (
        _ONE_AT_A_TIME, without_torchs_log(), naming_the_line(shown(leaves), alone, copy.reads.ahead),
        ExitStack() as stack, naming_autocast(device_type, setting.under_its_autocast),
        without_parametrization_cache(), one_tf32_setting(), scripted_as_written(),
    ):  # fmt: skip
        # Without oneDNN recurrent layers are steps that can be split, instead of one operator that only CPUs have.
        stack.enter_context(torch.backends.mkldnn.flags(False, None, None, None))  # type: ignore[arg-type]
        try:
            copy, exported, functions = _as_noted(setting, copy, inputs)
        except ArgumentsChanged as error:
            return again(replace(setting, mode=_fake_mode(), changed=error.paths))
        except Exception:
            is_known = random_state() == copy.drawn or setting.drawing.draws.are_there
            if is_known or not setting.drawing.look(copy.model, inputs.call(), setting.mode):
                raise
            return again(setting)  # what needs values may be what draws
        check_exported(exported, copy.reads.with_gradient, device_type)
        if not setting.under_its_autocast and has_autocast(exported.graph_module, device_type):
            return again(replace(setting, mode=_fake_mode(), under_its_autocast=True))
        if random_state() != copy.drawn:
            with computing_for_good(copy.reads.caches):
                setting.drawing.look(copy.model, inputs.call(), setting.mode)
        if not setting.drawing.is_settled():
            return again(setting)
        setting.drawing.run_again(model, copy.reads.asked)
        inner = read_before_assigned(exported.module(check_guards=False))
        with_functions(inner, functions)
        fakes = _spell_out_casts(setting, inner, inputs)
        if not stack.enter_context(traced_with(functions)):
            keep_attention(inner)
        own_leaves = without_own_leaves(inner, functions)
        beside = outputs_settled(inner, exported, every_tangent, loss_alone)
        keep_apart(inner)
        if device_type == "cpu":
            insert_autocast(inner, setting.autocast)
        called = pytree.tree_unflatten(requiring_grad(fakes, leaves), spec)
        with without_autocast():
            joint = aot_export_joint_with_descriptors(stack, inner, *called, decompositions=None)
        setting.drawing.refuse_others(copy.drawn)
    if loss_alone and not beside.has_loss:
        raise TraceError(
            "outputs='loss' was asked for, and forward returns no scalar that has a gradient; return the loss "
            "(transformers models do where they are given labels), or leave outputs= out"
        )
    return Captured(
        joint.graph_module, joint.out_spec, tuple(leaves), constants_of(joint.graph_module),
        plain_outputs(joint.graph_module), aliases(model), frozenset(beside.without_tangent), copy.reads,
        tuple(copy.notes), synced(model), device_type, frozenset(own_leaves),
    )  # fmt: skip


def _autocast_around(device_type: str) -> Autocast:
    """The present autocast of the device."""
    states = ((on, to) for device, on, to in autocast_for(device_type) if device == device_type)
    return next((Autocast(on, getattr(torch, to)) for on, to in states), NONE)


def _ready_to_trace(setting: _Setting, may_cache: bool, left: Sequence[torch.Tensor] = ()) -> _Watched:
    """A fake copy of the model, made ready to be traced."""
    originals: dict[int, Any] = {}
    copy, notes, reads = setting.copy(originals, left), list[str](), Reads()
    as_plain_modules(copy)
    make_traceable(copy)
    if setting.training is not None:
        copy.train(setting.training)
    caches = settle(copy, notes) and may_cache
    drawn = random_state()
    reads.count(setting.counted)
    reads.asked, reads.draws = Asked(setting.arguments, notes=notes), setting.drawing.draws
    reads.draws.written = reads.written
    returning(copy, reads, notes, setting.derivatives, setting.changed)
    watch_forward(copy, small_buffers(setting.model), sparse_buffers(setting.model), setting.same, notes, reads)
    return _Watched(copy, reads, notes, caches, may_cache, drawn, originals)


def _exported(
    setting: _Setting, copy: _Watched, inputs: FlatInputs
) -> tuple[torch.export.ExportedProgram, list[Any], Change | None]:
    """The copy's forward, exported while it is watched, the autograd functions that it calls, and what it changed."""
    with (
        autocast_as(setting.autocast),
        autocast_as_asked(setting.device_type),
        unsaved_as_attributes(copy.reads),
        watching(copy.model, copy.reads, copy.originals, classes_in(inputs.call())),
    ):
        with (
            setting.drawing.standing(copy.model),
            functions_kept() as functions,
            variables_seen(),
            checking_truths(lambda one: one.tensor if type(one) is Number else None),
            distributions_as_they_come(),
            masks_left_out(copy.notes, copy.caches),
            experts_kept(),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "The .*attribute.* assigned during export")  # which `returning` sees to
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # torch reads it
            with calling_forward(copy.model), leaving_modules(), keeping_grad_modes():
                exported = torch.export.export(copy.model, *inputs.call(), strict=False)
        copy.reads.of(copy.originals)
        changed = copy.reads.changed(copy.originals)
        return exported, functions, changed  # where nothing of ours is in the place of others' any more


def _as_noted(
    setting: _Setting, copy: _Watched, inputs: FlatInputs
) -> tuple[_Watched, torch.export.ExportedProgram, list[Any]]:
    """The copy, exported; where forward has noted something in a table, another one, with that in its place: einops
    does so for each type of tensor. Raises TraceError where it notes more, or what it computes hangs on what it noted.
    """
    exported, functions, changed = _exported(setting, copy, inputs)
    if changed is None:
        _see_what_hangs_on_it(setting, copy, inputs, exported)
        return copy, exported, functions
    if not changed.is_table:
        refuse(changed)
    before, copy = str(exported.graph), _ready_to_trace(setting, copy.may_cache)
    exported, functions, still = _exported(setting, copy, inputs)
    if still is not None or str(exported.graph) != before:
        refuse(still or changed)
    _see_what_hangs_on_it(setting, copy, inputs, exported)
    return copy, exported, functions


def _see_what_hangs_on_it(
    setting: _Setting, copy: _Watched, inputs: FlatInputs, exported: torch.export.ExportedProgram
) -> None:
    """Trace once more where forward leaves something outside of its modules, with that there."""

    def again(left: Sequence[torch.Tensor]) -> tuple[Left, torch.export.ExportedProgram, Change | None]:
        other = _ready_to_trace(setting, copy.may_cache, left)
        exported, _, changed = _exported(setting, other, inputs)
        return other.reads.left, exported, changed

    if copy.reads.left.writes:
        copy.reads.counting.found |= copy.reads.left.attributes
        hangs_on_nothing(copy.reads.left, setting.model, setting.mode, exported, again, setting.counted)
    refuse_fakes(setting.model, copy.reads, copy.originals)


def _spell_out_casts(setting: _Setting, inner: torch.fx.GraphModule, inputs: FlatInputs) -> list[Any]:
    """Put the casts of the precision and of the device's autocast into an exported module; its inputs from then on."""
    fakes = inputs.fakes
    if setting.precision is not None:
        copied = fake_copy(setting.model, setting.mode, device=setting.device)
        stored = dict(copied.named_parameters(remove_duplicate=False))
        insert_casts(inner, stored, inputs.to_cast(), setting.precision)
    if not setting.under_its_autocast:
        return fakes
    spell_out(inner, fakes, setting.around, setting.device_type, setting.mode)
    parameters = setting.model.named_parameters(remove_duplicate=False)
    bring_home(inner, {name for name, parameter in parameters if parameter.requires_grad}, setting.mode)
    with setting.mode:
        return [fake_of(leaf, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in fakes]
