"""attach: the user's module again, with DTensor parameters under the original names and the program as its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._compat import is_transforming, pytree, without_torch_function
from autopar.attach import batches
from autopar.attach.agree import text_from
from autopar.attach.collectives import mend_collectives
from autopar.attach.copies import alike, copied, copied_shallowly, enlist, hand_on, unpicklable, unshareable
from autopar.attach.draws import draw_whole
from autopar.attach.dtensors import mend_dtensors
from autopar.attach.edits import mend_edits
from autopar.attach.elsewhere import held_elsewhere
from autopar.attach.foreach import mend_lists, mend_total_norm
from autopar.attach.full_state import full_state, received_state
from autopar.attach.inputs import local_input, settled, type_of
from autopar.attach.invoke import invoke
from autopar.attach.losses import mend_losses
from autopar.attach.mixed import mend_mixed
from autopar.attach.optimizers import refuse_optimizers_of
from autopar.attach.parameters import take_plain_tensors, whole_parameter
from autopar.attach.pipe import Pipe
from autopar.attach.placing import adopt, lay_out, make_plain
from autopar.attach.prepared import Prepared
from autopar.attach.programs import Key, Planner, State, asking, found, laid_out_for_it, prepare, varying, why_new
from autopar.attach.scaling import share_infinities
from autopar.attach.shared import tell_of_shared
from autopar.attach.stage_run import StageRunner
from autopar.attach.tensors import as_dtensor, is_whole, layout_of, to_host
from autopar.attach.watch import PATIENCE_S
from autopar.attach.whole_values import mend_whole_values
from autopar.attach.wrappers import parallel_class
from autopar.emit import Emitted
from autopar.errors import PlanMismatch, TraceError
from autopar.ir.batch_norm import GLOBAL
from autopar.ir.graph import input_type, output_types
from autopar.ir.outside import Rules
from autopar.plan import Plan
from autopar.search.micro_batches import GUESSED
from autopar.search.pipeline import Pipeline
from autopar.trace import flatten_inputs
from autopar.trace.ambient import ambient_state
from autopar.trace.calls import Call, Caller
from autopar.trace.looks import mark_looks
from autopar.trace.modules import aliases, check_tensors, computed_tensors, tensors_by_name, with_tensors

NEW = "the first forward of its kind"  # ranks compare what they pass then, and each gets an error of its own


class ParallelModule(nn.Module):
    """A model that runs its plan. It is still an instance of the user's class, with the user's attributes and names.

    Parameters are DTensors (replicated until the plan exists); buffers are whole on every rank. Plain tensors among the
    arguments are whole (global) values, the same on every rank; DTensors say where their pieces lie.
    """

    _autopar: State

    def __init_subclass__(cls) -> None:
        """Not the model's: that one is for classes that its author writes."""

    @torch.compiler.disable  # the program is compiled already (backend=), and planning cannot be
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._autopar
        if is_transforming():
            raise RuntimeError(
                "a parallel module is called within a transform of torch.func (grad, vmap, jvp, jacrev), which its "
                "program cannot take: call it outside (loss.backward() and torch.autograd.grad work), or transform the "
                "plain model with full_state_dict() loaded into it"
            )
        own = args, kwargs
        if state.inputs == "local":
            args, kwargs = self.from_local(own)
        call = call_of(self, args, kwargs)
        key = Key(call.key, torch.is_grad_enabled(), ambient_state())
        with without_torch_function(), asking(state, call, key):
            prepared = found(state, key, call.tensors)
            why = "" if prepared is not None else why_new(state, key, call)
        watch = state.watch
        with watch.call(NEW, alone=True, why=why) if prepared is None else watch.call(prepared.told):
            if prepared is None:
                state.same_batches.compare(call.key, call.tensors, is_new=True)
                prepared, call = _new_program(self, call, key)
            else:
                state.same_batches.compare(call.key, call.tensors, is_new=False)
            with without_torch_function():
                return invoke(self, prepared, call, key, lambda: call_of(self, *own))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and "_autopar" in vars(self):
            raise RuntimeError(
                "another forward on a parallel module would run in the place of its plan; set it on the model, then "
                "compile that"
            )
        super().__setattr__(name, value)
        if isinstance(value, (nn.Module, nn.Parameter)):
            adopt(self)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        adopt(self)
        return super().named_parameters(*args, **kwargs)

    @property
    def plan(self) -> Plan:
        """The plan of the largest training step so far, of the whole model. Raises RuntimeError before there is one."""
        main, first = self._autopar.main, self._autopar.plan
        return first if main is None and first is not None else self._main().plan

    @property
    def pipeline(self) -> Pipeline:
        """The training step in stages. Raises RuntimeError before there is one, or where the mesh has no `pipe`."""
        runner = self._main().runner
        if not isinstance(runner, StageRunner) or runner.staged.pipeline is None:
            raise RuntimeError(f"mesh {self._autopar.mesh} has no axis `pipe`: there is a plan, and no pipeline")
        return runner.staged.pipeline

    @property
    def program(self) -> Emitted:
        """The generated code of the training step: `print(parallel.program.code)`; of a rank's first stage."""
        return self._main().runner.program

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The forward of the training step as a torch.fx GraphModule; `program` has the backward too."""
        return self._main().runner.program.forward

    @property
    def data_ranks(self) -> int:
        """How many parts a batch has where each rank loads one: `num_replicas` of a sampler."""
        return self._autopar.device_mesh.size()

    @property
    def data_rank(self) -> int:
        """Which of these parts this rank loads: `rank` of a sampler."""
        pipe = self._autopar.pipe
        return self._autopar.device_mesh.get_rank() if pipe is None else pipe.rank_within

    def from_local(self, batch: Any) -> Any:
        """Each rank's own part of a batch (any structure of tensors) -> DTensors of the whole batch, to call the module
        with. Parts have the same shape on every rank and stand in the order of ranks along dim 0. What has no dims, or
        is no tensor, has to be the same on every rank.
        """
        return batches.from_local(batch, self._autopar.device_mesh, averages=self._autopar.inputs == "local")

    def manual_seed(self, seed: int) -> None:
        """Draw random numbers (dropout and the like) from `seed` on, the same on every rank. Without it the seed is
        rank 0's `torch.initial_seed()` at the first call. On a mesh of one rank the default generator draws.
        """
        self._autopar.seed, self._autopar.drawing_calls = seed, 0

    def shard_batch(self, batch: Any) -> Any:
        """Whole tensors -> DTensors in the plan's input layout, of which this rank keeps only its piece.

        `batch` is the mapping of keyword arguments of a call (or the tuple of its positional ones).
        """
        state, named = self._autopar, isinstance(batch, Mapping)
        call = _caller(self)(() if named else tuple(batch), dict(batch) if named else {})
        leaves = dict(flatten_inputs(call.args, call.kwargs)[0])
        sharded: dict[int, Tensor] = {}
        inputs = [(node, layout) for node, _, layout in self._main().inputs if node.target in leaves]
        layouts = settled((id(leaves[node.target]), layout) for node, layout in inputs)
        for node, _ in inputs:
            value, layout = leaves[node.target], layouts[id(leaves[node.target])]
            if type_of(value) != (wanted := input_type(self.plan.graph, node)):
                raise PlanMismatch(
                    f"argument {node.target} is {type_of(value)}, the plan was made for {wanted}; "
                    "pass whole tensors, not this rank's part"
                )
            local = local_input(value, layout, state.mesh, state.device_mesh)
            sharded[id(value)] = as_dtensor(local, value.shape, layout, state.device_mesh)
        return pytree.tree_map(lambda leaf: sharded.get(id(leaf), leaf), batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._autopar.updates.finish()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._autopar.updates.finish()
        return super().load_state_dict(*args, **kwargs)

    def full_state_dict(self, *, rank0_only: bool = True) -> dict[str, Any]:
        """The state dict that the plain model loads: `state_dict()` with whole tensors, copied to the host.

        All ranks have to call it, and with `rank0_only` only rank 0 gets the tensors, the others {}. A rank that gets
        none holds one piece of one tensor at a time beside its own.
        """
        keep = not rank0_only or torch.distributed.get_world_size() == 1 or torch.distributed.get_rank() == 0
        with self._autopar.watch.call("full_state_dict", alone=True):
            return full_state(self.state_dict(), self._autopar.device_mesh, keep=keep, holders=self._holders())

    def load_full_state_dict(self, state_dict: Mapping[str, Any] | None = None, strict: bool = True) -> Any:
        """`load_state_dict` of what rank 0 alone has; what other ranks give is not read. All ranks have to call it.

        Whole tensors are sent one after the other, and each rank keeps its pieces. Where all ranks have the state dict,
        `load_state_dict` takes it as it is.
        """
        with self._autopar.watch.call("load_full_state_dict", alone=True):
            received = received_state(state_dict, self.state_dict(), self._autopar.device_mesh)
            return self.load_state_dict(received, strict=strict)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        self._autopar.updates.finish()
        return copied(self, self._autopar, memo)

    def __copy__(self) -> ParallelModule:
        return copied_shallowly(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unpicklable(self)

    def share_memory(self) -> Any:
        raise unshareable(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What `to_empty`, `to` and the like do to each tensor; one that has several names is one afterwards too, and
        one that the plan has on the host lies there.
        """
        self._autopar.updates.finish()
        tied = aliases(self)
        super()._apply(self._keeping(fn), recurse)
        for name, first in tied.items():
            (owner, _, leaf), (first_owner, _, first_leaf) = name.rpartition("."), first.rpartition(".")
            tensors = self.get_submodule(owner)._parameters
            tensors = tensors if leaf in tensors else self.get_submodule(owner)._buffers
            tensors[leaf] = getattr(self.get_submodule(first_owner), first_leaf)
        return self

    def _keeping(self, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """`fn`, behind which what lies on the host is brought back to it."""
        residence = {} if self._autopar.plan is None else self._autopar.plan.residence
        parameters, _ = tensors_by_name(self)
        held = [parameters[name] for name, where in residence.items() if where == "host"]
        hosted = {id(tensor) for parameter in held for tensor in (parameter, parameter.grad)}

        def kept(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            if id(tensor) not in hosted:
                return made
            if not isinstance(made, DTensor):
                return to_host(made)
            return as_dtensor(to_host(made.to_local()), made.shape, layout_of(made), made.device_mesh)

        return kept

    def _holders(self) -> dict[str, DeviceMesh]:
        """Of a pipeline, the mesh of the first place that has each parameter; under every name of it."""
        pipe, staged = self._autopar.pipe, self._autopar.staged
        if pipe is None or staged is None:
            return {}
        found = {name: pipe.meshes[places[0]] for name, places in staged.holders.items()}
        return found | {name: found[first] for name, first in aliases(self).items() if first in found}

    def _main(self) -> Prepared:
        main = self._autopar.main
        if main is None:
            raise RuntimeError("there is no plan yet: call the module once, or give example_inputs= to autopar.compile")
        return main


def attach(
    model: nn.Module,
    device_mesh: DeviceMesh,
    planner: Planner,
    outputs: str,
    backend: str,
    precision: Any = None,
    inputs: str = "global",
    batch_norm: str = GLOBAL,
    patience_s: float = PATIENCE_S,
    rules: tuple[Rules, ...] = (),
    pipe: Pipe | None = None,
) -> ParallelModule:
    """A ParallelModule beside `model`, which stays as it is. Nothing is planned yet. `device_mesh`: of a pipeline, that
    of this rank's stage.
    """
    share_infinities()
    mend_dtensors()
    mend_collectives()
    mend_lists()
    mend_total_norm()
    mend_edits()
    mend_losses()
    mend_mixed()
    if inputs == "local":
        mend_whole_values()
    draw_whole()
    check_tensors(model)
    fresh: dict[int, Tensor] = {}
    for parameter in model.parameters():
        fresh[id(parameter)] = whole_parameter(parameter, device_mesh)
    for buffer in model.buffers():
        fresh[id(buffer)] = buffer.detach().clone().to(device_mesh.device_type if not buffer.is_meta else "meta")
    fresh |= {id(tensor): tensor.detach().clone() for tensor in computed_tensors(model)}
    beside = with_tensors(model, fresh, originals := dict[int, Any](), held_elsewhere(model, fresh))
    mark_looks(model, beside)
    enlist(beside, originals)
    model_class = type(model)
    beside.__class__ = parallel_class(model_class, ParallelModule)
    take_plain_tensors(beside)
    parallel = cast(ParallelModule, beside)
    state = State(
        model_class, device_mesh, planner, outputs, inputs, backend, precision, batch_norm, patience_s, rules, pipe
    )
    state.watch.begin()
    state.own_forward = vars(parallel).pop("forward", None)
    object.__setattr__(parallel, "_autopar", state)
    refuse_optimizers_of(model, parallel)
    tell_of_shared(model, parallel)
    return parallel


def plan_module(parallel: ParallelModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Plan the training step (with gradients; in train mode, but for a model in eval mode) and lay parameters out."""
    call = call_of(parallel, args, kwargs)
    key = Key(call.key, True, ambient_state())
    with parallel._autopar.watch.call(NEW, alone=True):
        _first_program(parallel, call, key, held=False)


def call_of(parallel: ParallelModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """What `parallel(*args, **kwargs)` is, as far as its program hangs on it."""
    return _caller(parallel)(args, kwargs)


def _caller(parallel: ParallelModule) -> Caller:
    state = parallel._autopar
    if state.caller is None:
        forward = state.own_forward or state.model_class.forward.__get__(parallel)
        state.caller = Caller(forward, (state.model_class, *map(type, parallel.modules())))
    return state.caller


def _first_program(parallel: ParallelModule, call: Call, key: Key, *, held: bool, loosely: bool = False) -> None:
    """`held`: somebody may hold parameters already, so that each has to stay the object that it is. `loosely`: for a
    call without gradients.
    """
    state = parallel._autopar
    if state.seed is None:
        state.seed = int(text_from(0, str(torch.initial_seed()), state.device_mesh))
    training = parallel.training or any(parameter.requires_grad for parameter in parallel.parameters())
    try:
        main = prepare(parallel, state, call, key, training=training, loosely=loosely)
    except TraceError:  # perhaps at a line that only runs in train mode, in which it may never be
        if training == parallel.training:
            raise
        main = prepare(parallel, state, call, key, training=parallel.training, loosely=loosely)
    with torch.inference_mode(False):  # parameters made here are trained later
        try:
            for one in alike(parallel):
                lay_out(one, one._autopar, main.runner)
        except Exception:  # no memory, on some rank: nothing may run on what lies otherwise than it was planned
            state.programs.clear(), state.calls.clear()
            raise
        is_plain = state.pipe is None and not main.plan.residence
        if not held and is_plain and all(map(is_whole, main.plan.parameters.values())):
            make_plain(parallel, state)
            main.hold()
    state.plan, state.main = main.plan, main
    if GUESSED in main.plan.search:  # who trains with this batch is told, as if they had begun with it
        state.programs.pop(key)
    if isinstance(main.runner, StageRunner):
        state.staged = main.runner.staged
        hand_on(parallel)


def _new_program(parallel: ParallelModule, call: Call, key: Key) -> tuple[Prepared, Call]:
    """The program of a call that none serves. A number that was another one before becomes a tensor, if it can."""
    state = parallel._autopar
    if state.plan is None:
        _first_program(parallel, call, key._replace(gradients=True), held=True, loosely=not key.gradients)
        if (prepared := found(state, key, call.tensors)) is not None:
            return prepared, call
        with laid_out_for_it():
            return _new_program(parallel, call, key)
    if paths := varying(state, call):
        caller = _caller(parallel)
        caller.wide = any(parameter.dtype is torch.float64 for parameter in parallel.parameters())
        caller.varying |= paths
        try:
            again = caller(call.args, call.kwargs)
            key_again = key._replace(call=again.key)
            prepared = found(state, key_again, again.tensors) or prepare(
                parallel, state, again, key_again, training=parallel.training
            )
            if output_types(prepared.graph) == state.calls[call.shape][1]:
                return prepared, again
        except TraceError:
            pass  # Python's own control flow, or a size, hangs on it: each value has a program of its own
        caller.varying -= paths
    prepared = prepare(parallel, state, call, key, training=parallel.training)
    state.main = state.main or prepared  # of a copy, which has the plan of what it was copied from, and no program
    return prepared, call
