"""attach: the user's module again, with DTensor parameters under the original names and the program as its forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.attach.agree import agreed
from autopar.attach.inputs import by_name, local_inputs, match_inputs, planned_inputs, type_of
from autopar.attach.run import Runner
from autopar.attach.tensors import (
    as_dtensor,
    from_rank_zero,
    is_whole,
    layout_of,
    mesh_of,
    parameter_on,
    placements_of,
    take_plain_tensors,
    to_host,
    whole_parameter,
)
from autopar.attach.updates import Updates
from autopar.emit import Program, emit, forward_only
from autopar.graph import Graph, Node
from autopar.layout import Layout
from autopar.modules import aliases, tensors_by_name, with_tensors
from autopar.plan import Plan, PlanMismatch
from autopar.saving.resident import resident
from autopar.trace import Captured, capture, flatten_inputs, graph_of

# How a graph becomes a plan: (graph, layouts of parameters that are settled, whether this is the training step) ->
# plan.
Planner = Callable[[Graph, Mapping[str, Layout], bool], Plan]


@dataclass(frozen=True)
class _Mode:
    """What one way of calling the module runs: the program, its plan, and the call it was made for."""

    plan: Plan
    runner: Runner
    inputs: tuple[tuple[str, Any], ...]
    constants: Mapping[str, Tensor]
    out_spec: Any
    output_constants: Mapping[int, Any]

    @cached_property
    def input_nodes(self) -> dict[str, Node]:
        """Path -> node of every tensor among the arguments, in the order of the program."""
        return {node.target: node for node in self.runner.program.inputs if node.op == "input"}

    @cached_property
    def input_layouts(self) -> dict[str, Layout]:
        return {path: self.plan.choices[node.name].gives[0] for path, node in self.input_nodes.items()}


class _State:
    """Everything a ParallelModule knows beyond the user's module."""

    def __init__(
        self,
        model_class: type[nn.Module],
        device_mesh: DeviceMesh,
        planner: Planner,
        outputs: str,
        backend: str,
        precision: Any,
    ):
        self.precision = precision
        self.model_class = model_class
        self.device_mesh = device_mesh
        self.mesh = mesh_of(device_mesh)
        self.planner = planner
        self.outputs = outputs
        self.backend = backend
        self.updates = Updates()
        self.modes: dict[tuple[bool, bool], _Mode] = {}
        self.main: _Mode | None = None


class ParallelModule(nn.Module):
    """A model that runs its plan. It is still an instance of the user's class, with the user's attributes and names.

    Parameters are DTensors (replicated until the plan exists); buffers are whole on every rank. Plain tensors among the
    arguments are whole (global) values, the same on every rank; DTensors say where their pieces lie.
    """

    _autopar: _State

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._autopar
        positional, named = by_name(_original_forward(self), args, kwargs)
        leaves, _ = flatten_inputs(positional, named)
        if state.main is None:
            plan_module(self, positional, named, held=True)
        return _run(self, _mode_for(self, positional, named), leaves)

    @property
    def plan(self) -> Plan:
        """The plan of the training step. Raises RuntimeError before there is one."""
        return self._main().plan

    @property
    def program(self) -> Program:
        """The generated code of the training step: `print(parallel.program.code)`."""
        return self._main().runner.program

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The forward of the training step as a torch.fx GraphModule; `program` has the backward too."""
        return self._main().runner.program.forward

    def shard_batch(self, batch: Any) -> Any:
        """Whole tensors -> DTensors in the plan's input layout, of which this rank keeps only its piece.

        `batch` is the mapping of keyword arguments of a call (or the tuple of its positional ones).
        """
        mode = self._main()
        named = isinstance(batch, Mapping)
        positional, keywords = by_name(
            _original_forward(self), () if named else tuple(batch), dict(batch) if named else {}
        )
        leaves, _ = flatten_inputs(positional, keywords)
        wanted = dict(mode.inputs)
        sharded: dict[int, Tensor] = {}
        layouts = mode.input_layouts
        for path, value in leaves:
            if isinstance(value, Tensor) and path in wanted:
                whole = match_inputs([(path, value)], ((path, wanted[path]),))[path]
                (local,) = local_inputs(
                    [mode.input_nodes[path]],
                    layouts,
                    {path: whole},
                    self._autopar.mesh,
                    self._autopar.device_mesh,
                )
                sharded[id(value)] = as_dtensor(local, value.shape, layouts[path], self._autopar.device_mesh)
        return pytree.tree_map(lambda leaf: sharded.get(id(leaf), leaf), batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._autopar.updates.finish()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._autopar.updates.finish()
        return super().load_state_dict(*args, **kwargs)

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
        residence = {} if self._autopar.main is None else self._autopar.main.plan.residence
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

    def _main(self) -> _Mode:
        mode = self._autopar.main
        if mode is None:
            raise RuntimeError("there is no plan yet: call the module once, or give example_inputs= to autopar.compile")
        return mode


def attach(
    model: nn.Module, device_mesh: DeviceMesh, planner: Planner, outputs: str, backend: str, precision: Any = None
) -> ParallelModule:
    """A ParallelModule beside `model`, which stays as it is. Nothing is planned yet."""
    fresh: dict[int, Tensor] = {}
    for parameter in model.parameters():
        fresh[id(parameter)] = whole_parameter(parameter, device_mesh)
    for buffer in model.buffers():
        fresh[id(buffer)] = buffer.detach().clone().to(device_mesh.device_type if not buffer.is_meta else "meta")
    copied = with_tensors(model, fresh)
    model_class = type(model)
    copied.__class__ = type(f"Parallel{model_class.__name__}", (ParallelModule, model_class), {})
    take_plain_tensors(copied)
    parallel = cast(ParallelModule, copied)
    object.__setattr__(parallel, "_autopar", _State(model_class, device_mesh, planner, outputs, backend, precision))
    return parallel


def plan_module(
    parallel: ParallelModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, held: bool = False
) -> None:
    """Plan the training step (with gradients, in train mode unless the model is in eval mode) and lay parameters out.

    `held`: somebody may hold parameters already, so that each has to stay the object that it is.
    """
    state = parallel._autopar
    training = parallel.training or any(parameter.requires_grad for parameter in parallel.parameters())
    captured, graph = _capture(parallel, args, kwargs, training=training)
    with torch.inference_mode(False):  # parameters made here are trained later
        plan = state.planner(graph, {}, True)
        main = _mode(state, captured, plan)
        _lay_out(parallel, plan)
        if not held and not plan.residence and all(map(is_whole, plan.parameters.values())):
            _make_plain(parallel)
    state.main = state.modes[training, True] = main


def _capture(
    parallel: ParallelModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool
) -> tuple[Captured, Graph]:
    """The joint graph, also where the caller is in no_grad; on all ranks or on none."""
    precision, device_mesh = parallel._autopar.precision, parallel._autopar.device_mesh
    parallel._autopar.updates.finish()  # while torch traces, optimizers compute in other ways
    mode = None if training == parallel.training else training

    def trace() -> tuple[Captured, Graph]:
        with _as_user_class(parallel), torch.inference_mode(False), torch.enable_grad():
            captured = capture(parallel, args, kwargs, training=mode, precision=precision)
        return captured, graph_of(captured, precision)

    return agreed(trace, device_mesh)


@contextlib.contextmanager
def _as_user_class(parallel: ParallelModule) -> Iterator[None]:
    """While tracing, the module is what the user wrote: their forward, not ours."""
    ours = parallel.__class__
    state = parallel.__dict__.pop("_autopar")
    parallel.__class__ = state.model_class
    try:
        yield
    finally:
        parallel.__class__ = ours
        object.__setattr__(parallel, "_autopar", state)


def _original_forward(parallel: ParallelModule) -> Callable[..., Any]:
    return parallel._autopar.model_class.forward.__get__(parallel)


def _lay_out(parallel: ParallelModule, plan: Plan) -> None:
    """Every parameter becomes a DTensor in the plan's layout, in place: optimizers that hold it already see the new
    one.

    Buffers stay whole; as with parameters, rank 0's values win.
    """
    state = parallel._autopar
    parameters, _ = tensors_by_name(parallel)
    for buffer in parallel.buffers():
        if not buffer.is_meta:
            buffer.copy_(from_rank_zero(buffer, state.device_mesh))
    done: set[int] = set()
    for name, layout in plan.parameters.items():
        parameter = parameters[name]
        done.add(id(parameter))
        on_host = plan.residence.get(name) == "host"
        laid_out = parameter_on(state.mesh, state.device_mesh, parameter, layout, on_host=on_host)
        torch.utils.swap_tensors(parameter, laid_out)
    for name, parameter in parameters.items():
        if id(parameter) not in done:
            raise AssertionError(f"parameter {name} is not in the plan")


def _make_plain(parallel: ParallelModule) -> None:
    """DTensors that are whole on every rank become plain tensors: each operator of an optimizer is quicker on those."""
    plain: dict[int, nn.Parameter] = {}
    for module in parallel.modules():
        for name, held in module._parameters.items():
            if isinstance(held, DTensor):
                made = nn.Parameter(cast(DTensor, held.detach()).to_local(), requires_grad=held.requires_grad)
                module._parameters[name] = plain.setdefault(id(held), made)


def _mode(state: _State, captured: Captured, plan: Plan) -> _Mode:
    groups = {axis: state.device_mesh.get_group(place).group_name for place, axis in enumerate(state.mesh.names)}
    device = state.device_mesh.device_type
    program = emit(plan, groups, device, one_at_a_time=device == "cpu")
    if state.backend == "inductor":
        program = program.compiled()
    coordinate = state.device_mesh.get_coordinate()
    assert coordinate is not None
    coordinates = tuple(torch.tensor(index, device=device) for index in coordinate)
    runner = Runner(program, state.mesh, coordinates, state.updates)
    constants = {name: value.to(device) for name, value in captured.constants.items()}
    return _Mode(plan, runner, planned_inputs(captured.leaves), constants, captured.out_spec, captured.output_constants)


def _mode_for(parallel: ParallelModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Mode:
    """The program for the present mode: planned at its first use, with the parameters where the training plan has
    them.
    """
    state = parallel._autopar
    key = (parallel.training, torch.is_grad_enabled())
    if key not in state.modes:
        captured, graph = _capture(parallel, args, kwargs, training=parallel.training)
        if not torch.is_grad_enabled():
            graph = forward_only(graph)
        known = None if state.main is None else state.main.plan
        plan = state.planner(graph, {} if known is None else known.parameters, False)
        state.modes[key] = _mode(state, captured, plan if known is None else resident(plan, known.residence))
    return state.modes[key]


def _run(parallel: ParallelModule, mode: _Mode, leaves: list[tuple[str, Any]]) -> Any:
    state = parallel._autopar
    tensors = match_inputs(leaves, mode.inputs)
    parameters, buffers = tensors_by_name(parallel)
    for node in mode.runner.parameters:
        _check(parameters[node.target], node, mode.plan)
    others: list[Tensor] = []
    for node in mode.runner.program.inputs:
        if node.op == "buffer":
            others.append(buffers[node.target])
        elif node.op == "constant":
            others.append(mode.constants[node.target.rpartition(":")[0]])
    others += local_inputs(mode.input_nodes.values(), mode.input_layouts, tensors, state.mesh, state.device_mesh)
    outputs, written = mode.runner([parameters[node.target] for node in mode.runner.parameters], others)
    with torch.no_grad():
        for name, value in written:
            buffers[name].copy_(value)
    return _assemble_outputs(state, mode, outputs)


def _check(parameter: Tensor, node: Node, plan: Plan) -> None:
    """Raises where something was done to a parameter that the plan does not know of."""
    if parameter.is_meta:
        raise RuntimeError(
            f"parameter {node.target} is on the meta device and has no values: "
            "call to_empty(device=...) on the parallel module, then load or initialise its parameters"
        )
    layout, (type,) = plan.choices[node.name].gives[0], node.outputs
    assert type is not None
    if not isinstance(parameter, DTensor) and is_whole(layout) and type_of(parameter) == type:
        return
    if not isinstance(parameter, DTensor) or layout_of(parameter) != layout or type_of(parameter) != type:
        now = f"{type_of(parameter)} in {parameter.placements}" if isinstance(parameter, DTensor) else "a plain tensor"
        raise PlanMismatch(
            f"parameter {node.target} is {now}, the plan has it as {type} in {placements_of(layout)}; "
            "change values in place or with load_state_dict, and compile again for another dtype"
        )
    lies, belongs = parameter.device.type, _lies_on(plan, node.target, parameter.device_mesh)
    if lies != belongs:
        raise PlanMismatch(
            f"parameter {node.target} lies on {lies}, the plan has it on {belongs}; "
            "move the parallel module as a whole, or change values in place"
        )


def _lies_on(plan: Plan, parameter: str, device_mesh: DeviceMesh) -> str:
    return "cpu" if plan.residence.get(parameter) == "host" else device_mesh.device_type


def _assemble_outputs(state: _State, mode: _Mode, outputs: list[Tensor | None]) -> Any:
    """Scalars and whole outputs as plain tensors where the caller wants that, the rest as DTensors; in the model's
    own structure.
    """
    results = [(result, layout) for result, layout in mode.runner.program.results if result.kind == "output"]
    leaves: dict[int, Any] = dict(mode.output_constants)
    for (result, layout), value in zip(results, outputs, strict=True):
        if value is None or result.ref is None:
            continue
        shape = mode.plan.graph.type_of(result.ref).shape
        plain = not shape or state.outputs == "global"
        leaves[int(result.target)] = value if plain else as_dtensor(value, shape, layout, state.device_mesh)
    return pytree.tree_unflatten([leaves[i] for i in range(mode.out_spec.num_leaves)], mode.out_spec)
