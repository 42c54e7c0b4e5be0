"""What a program reads in one call: parameters as they lie now, buffers, and pieces of the arguments."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.attach.drawn_ahead import drawn_ahead
from autopar.attach.generators import refuse_to_repeat
from autopar.attach.inputs import local_input, piece_with_gradient, type_of
from autopar.attach.placing import refuse_without_values
from autopar.attach.prepared import Prepared
from autopar.attach.programs import State
from autopar.attach.run import Step
from autopar.attach.tensors import as_dtensor, is_whole, layout_of, placements_of
from autopar.errors import PlanMismatch
from autopar.ir.graph import Node
from autopar.plan import Plan
from autopar.trace.calls import Call


def parameters_of(prepared: Prepared, device_mesh: DeviceMesh) -> list[Tensor]:
    """Parameters in the order of the program; what is still as it was checked before is not checked again."""
    held: list[Tensor] = []
    for number, (tensors, name) in enumerate(prepared.parameters):
        parameter = tensors[name]
        spec = getattr(parameter, "_spec", parameter.dtype)
        known, before = prepared.checked[number]
        if parameter is not known or spec is not before or parameter.is_meta:
            node = prepared.runner.parameters[number]
            if (piece := _in_pieces(parameter, node, prepared.plan, device_mesh)) is not parameter:
                held.append(piece)
                continue
            _check(parameter, node, prepared.plan)
            prepared.checked[number] = parameter, spec
        held.append(parameter)
    return held


def _in_pieces(given: Tensor, node: Node, plan: Plan, device_mesh: DeviceMesh) -> Tensor:
    """What `torch.func.functional_call` has put in the place of a parameter: where it is plain and whole, this rank's
    piece of it, with a gradient of its own.
    """
    layout, type = plan.choices[node.name].lies, plan.graph.stored_type(node)
    is_other = not isinstance(given, (nn.Parameter, DTensor)) and not is_whole(layout)
    if not is_other or type_of(given) != type or plan.residence.get(node.target) == "host":
        return given
    piece = piece_with_gradient(given, layout, plan.mesh, device_mesh)
    return as_dtensor(piece, type.shape, layout, device_mesh)


def step_of(state: State, prepared: Prepared, call: Call) -> Step:
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
    ahead = drawn_ahead(prepared, call.tensors, state.device_mesh) if prepared.drawn.steps else []
    tensors = (*call.tensors, *prepared.counting.tensors(prepared.modules), *ahead)
    for node, place, layout in prepared.inputs:
        given = tensors[place]
        if given.requires_grad and node.name not in prepared.takes_gradients:
            given = given.detach()  # autograd would go on from there, to what an earlier step may have freed
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
    return Step((*others, *watched), tuple(drawn), tuple(watched), state.device_mesh, through, prepared.packed)


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
