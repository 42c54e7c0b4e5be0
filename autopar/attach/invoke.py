"""One call of a program that is there: parameters, buffers and arguments in, the model's outputs out."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.attach.generators import refuse_to_repeat
from autopar.attach.hooks import refuse
from autopar.attach.inputs import local_input, type_of
from autopar.attach.outputs import hooks_of, is_by_rows, own_rows, whole_when_read
from autopar.attach.placing import refuse_without_values
from autopar.attach.prepared import Prepared
from autopar.attach.programs import Key, State, prepare
from autopar.attach.run import Step
from autopar.attach.tensors import (
    as_dtensor,
    is_whole,
    layout_of,
    piece_as,
    placements_of,
)
from autopar.errors import CheckFailed, PlanMismatch
from autopar.ir.graph import Node, output_types
from autopar.plan import Plan
from autopar.trace.calls import Call
from autopar.trace.counted import put_back, standing
from autopar.trace.formulas import Computed
from autopar.trace.outputs import Returned, arrays_of, memory_of, numbers_of
from autopar.trace.writes import put


def invoke(parallel: Any, prepared: Prepared, call: Call, key: Key) -> Any:
    """What the model returns for this call."""
    state = parallel._autopar
    hooked, count = prepared.hooked
    if sum(map(len, hooked)) != count:
        refuse(parallel)
    parameters, computed = parameters_of(prepared), prepared.counting.computed(prepared.modules)
    step = _step(state, prepared, call)
    if not prepared.has_trained and key.gradients and prepared.runner.program.backward is not None:
        state.trains_with(prepared)
    if prepared.without_tangent and key.gradients:
        step.without_tangent = prepared.without_tangent
        if prepared.runner.played is None:
            step.again = _with_every_tangent(parallel, prepared, call, key, step)
    beside = [tensors[name] for tensors, name in prepared.beside]
    outputs, written = prepared.runner(step, parameters, beside)
    rebound = memory_of(prepared.out_spec).rebound
    with torch.no_grad():
        for name, value in written:
            tensors, leaf = prepared.buffers[name]
            held = tensors[leaf]  # a buffer, or a parameter that does not train
            if value.shape != held.shape:
                raise PlanMismatch(
                    f"an operator of forward resizes buffer {name} from {tuple(held.shape)} to {tuple(value.shape)}, "
                    "as observers of quantizers do: call the plain model once before it is compiled"
                )
            if name in rebound and not isinstance(held, DTensor):
                tensors[leaf] = value.clone()  # it may be what an output, or backward, has
            else:
                held.copy_(piece_as(value, held) if isinstance(held, DTensor) else value)
    return _assemble_outputs(state, prepared, outputs, call, step, computed)


def parameters_of(prepared: Prepared) -> list[Tensor]:
    """Parameters in the order of the program; what is still as it was checked before is not checked again."""
    held: list[Tensor] = []
    for number, (tensors, name) in enumerate(prepared.parameters):
        parameter = tensors[name]
        spec = getattr(parameter, "_spec", parameter.dtype)
        known, before = prepared.checked[number]
        if parameter is not known or spec is not before or parameter.is_meta:
            _check(parameter, prepared.runner.parameters[number], prepared.plan)
            prepared.checked[number] = parameter, spec
        held.append(parameter)
    return held


def _step(state: State, prepared: Prepared, call: Call) -> Step:
    others: list[Tensor] = []
    for node in prepared.runner.own_inputs:
        if node.op == "buffer":
            tensors, leaf = prepared.buffers[node.target]
            held = tensors[leaf]
            if isinstance(held, DTensor) and not isinstance(held, nn.Parameter):  # a mask made of a parameter, say
                tensors[leaf] = held = cast(DTensor, held.detach()).full_tensor()
            others.append(_checked_buffer(_whole(held), node))
        elif node.op == "constant":
            others.append(prepared.constants[node.target.rpartition(":")[0]])
    watched, through = list[Tensor](), dict[str, Tensor]()
    with_gradient = {node.name for node in prepared.graph.inputs_with_gradient}
    tensors = (*call.tensors, *prepared.counting.tensors(prepared.modules))
    for node, place, layout in prepared.inputs:
        given = tensors[place]  # outputs beside the loss may turn out to have a gradient that leads to it
        if given.requires_grad and node.name not in with_gradient and not prepared.without_tangent:
            given = given.detach()
        piece = local_input(given, layout, state.mesh, state.device_mesh)
        if place >= len(call.tensors) and not piece.requires_grad:
            piece = piece.detach()  # of a module, which may have another memory behind the call
        if piece.requires_grad:
            through[node.target], piece = piece, piece.detach()
        watched.append(piece)
    drawn: list[tuple[Tensor, ...]] = []
    if prepared.runner.pieces or state.pipe is not None:
        refuse_to_repeat()
    for _ in range(prepared.plan.graph.rounds.count):
        if not prepared.runner.pieces and state.pipe is None:
            drawn.append(())
            continue
        drawing = state.drawing_calls
        state.drawing_calls += 1  # of a pipeline on every rank, whichever stages draw
        if not prepared.runner.pieces:
            drawn.append(())
            continue
        assert state.seed is not None
        drawn.append(prepared.runner.seeds(state.seed, drawing))
    return Step((*others, *watched), tuple(drawn), tuple(watched), state.device_mesh, through)


def _whole(held: Tensor) -> Tensor:
    if not isinstance(held, DTensor):
        return held.detach() if isinstance(held, nn.Parameter) else held
    value = cast(DTensor, held.detach())
    return value.to_local() if is_whole(layout_of(held)) else value.full_tensor()


def _checked_buffer(buffer: Tensor, node: Node) -> Tensor:
    (type,) = node.outputs
    assert type is not None
    if buffer.shape != type.shape or type_of(buffer) != type:
        raise PlanMismatch(f"buffer {node.target} is {type_of(buffer)}, the plan was made for {type}; compile again")
    return buffer


def _with_every_tangent(parallel: Any, prepared: Prepared, call: Call, key: Key, step: Step) -> Callable[[], Any]:
    """What backward calls when a gradient arrives for an output that the program has none for: the same call with a
    program that has, which from now on serves all calls like this one.
    """
    state = parallel._autopar
    changed = {result.target for result, _ in prepared.runner.program.results if result.kind == "buffer"}
    before = {name: prepared.buffers[name][0][prepared.buffers[name][1]].clone() for name in changed}
    drawing, hooks = state.drawing_calls - 1, prepared.hooks.held()
    attributes = prepared.attributes_now()

    def again() -> tuple[Any, Step, list[Tensor]]:
        with torch.enable_grad(), prepared.hooks.back(hooks), standing(attributes, prepared.modules):
            state.wants_tangents.add(key)
            if (changed := prepared.fits()) is not None:
                raise RuntimeError(
                    f"a gradient arrives for an output beside the loss, for which the step is planned again now, but "
                    f"since its forward {changed}; change it behind backward"
                )
            full = next((one for one in state.programs[key] if not one.without_tangent and one.fits() is None), None)
            if full is None:
                state.programs[key].remove(prepared)
                full = prepare(parallel, state, call, key, training=parallel.training)
            told = [[write.told for write in one.left] for one in (prepared, full)]
            if full.out_spec != prepared.out_spec or told[0] != told[1]:
                raise RuntimeError(
                    "a gradient arrives for an output beside the loss, for which the step is planned again now, but "
                    "what forward gives and keeps is something else by now; call the module again, then backward"
                )
        counted, state.drawing_calls = state.drawing_calls, drawing
        values = {name: slot[0][slot[1]] for name, slot in full.buffers.items()}
        for name, value in before.items():
            full.buffers[name][0][full.buffers[name][1]] = value
        try:
            with standing(attributes, prepared.modules):
                remade = _step(state, full, call)
        finally:
            state.drawing_calls = counted
            for name, (tensors, leaf) in full.buffers.items():
                tensors[leaf] = values[name]
        return full.runner, remade, parameters_of(full)

    return again


def _check(parameter: Tensor, node: Node, plan: Plan) -> None:
    """Raises where something was done to a parameter that the plan does not know of."""
    refuse_without_values(node.target, parameter)
    layout, type = plan.choices[node.name].lies, plan.graph.stored_type(node)
    if not isinstance(parameter, DTensor) and is_whole(layout) and type_of(parameter) == type:
        return
    if not isinstance(parameter, DTensor) or layout_of(parameter) != layout or type_of(parameter) != type:
        now = (
            f"{type_of(parameter)} in {parameter.placements}"
            if isinstance(parameter, DTensor)
            else f"plain {type_of(parameter)}"
        )
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


def _keep(prepared: Prepared, made: Returned, computed: Computed) -> None:
    """Let attributes of modules, and what is elsewhere, be what forward has set it to."""
    modules, lists = prepared.modules, prepared.counting.lists(prepared.modules)
    holders = [write.holder(modules) for write in prepared.left]  # before attributes are others
    kept, known = {place: value_of(computed) for place, value_of in prepared.sets} | made.kept, dict[int, Any]()
    for (path, name), value in kept.items():
        before, after, _ = prepared.writes[path, name]
        if before is after and _put_in_place(vars(modules[path]).get(name), value):
            continue
        if id(after) not in known:  # else another attribute is the same
            known[id(after)] = put_back(after, value, lists)
        put(vars(modules[path]), name, known[id(after)])
    for write, holder, value in zip(prepared.left, holders, made.left, strict=True):
        write.make_in(holder, value)


def _put_in_place(held: Any, value: Any) -> bool:
    """Let a tensor that forward has written to in place be `value`, and stay the object that it is. What backward has
    saved of it keeps its old memory. False where it has a gradient, or is put together when somebody reads it.
    """
    if not isinstance(held, Tensor) or type(value) is not Tensor or held.requires_grad or value.requires_grad:
        return False
    if held.is_inference() or value.is_inference() or (held.dtype, held.device) != (value.dtype, value.device):
        return False
    held.data = value
    return True


def _given(prepared: Prepared, call: Call, leaf: int) -> Tensor | None:
    """What forward gives at this leaf, where it lies where a plain tensor of the call or a buffer does."""
    if leaf not in prepared.given:
        return None
    where, look = prepared.given[leaf]
    base = call.tensors[where] if isinstance(where, int) else where[0][where[1]]
    if isinstance(base, DTensor):
        return None
    return base if look is None else look.at(base)


def _assemble_outputs(
    state: State, prepared: Prepared, outputs: list[Tensor | None], call: Call, step: Step, computed: Computed
) -> Any:
    """Scalars as plain tensors, the rest as `outputs=` has it; in the model's own structure. `computed`: of the
    numbers that were there when the call began.
    """
    results = [(result, layout) for result, layout in prepared.runner.results if result.kind == "output"]
    leaves: dict[int, Any] = dict(prepared.output_constants)
    types = output_types(prepared.graph)
    is_local, numbers, arrays = state.inputs == "local", numbers_of(prepared.out_spec), arrays_of(prepared.out_spec)
    for (result, layout), value in zip(results, outputs, strict=True):
        if value is None or (type := types[result.target]) is None:
            continue
        shape, dim = type.shape, prepared.batch_dims.get(result.target)
        place = int(result.target)
        if (given := _given(prepared, call, place)) is not None and type_of(given) == type:
            leaves[place] = given
            continue
        if shape and state.outputs == "sharded" and place not in arrays:
            made = as_dtensor(value, shape, layout, state.device_mesh)
        elif dim is not None and is_by_rows(layout, dim):
            made = value
            step.averaged.add(result.target)
        elif dim is not None:
            made = own_rows(value, shape, layout, state.device_mesh, dim)
        else:
            made = whole_when_read(value, shape, layout, state.mesh, state.device_mesh, averages=is_local)
            if is_local and made is value:
                step.of_all_ranks.add(result.target)
        leaves[place] = made.item() if place in numbers else made.detach().cpu().numpy() if place in arrays else made
        if made.requires_grad and result.target in prepared.graph.leads_to:
            step.handed.append((result.target, weakref.ref(made), hooks_of(made)))
    made = pytree.tree_unflatten([leaves[i] for i in range(prepared.out_spec.num_leaves)], prepared.out_spec)
    assert isinstance(made, Returned)
    for told, wrong in made.checks.items():
        if wrong:
            raise CheckFailed(told)
    _keep(prepared, made, computed)
    return made.outputs
