"""One call of a program that is there: parameters, buffers and arguments in, the model's outputs out."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.attach.again import Before, Given, with_every_tangent
from autopar.attach.changed import outputs_of, refuse_shared, with_copies, write_back
from autopar.attach.derivatives import differentiated
from autopar.attach.hooks import refuse
from autopar.attach.inputs import type_of
from autopar.attach.outputs import hooks_of, is_by_rows, own_rows, whole_when_read
from autopar.attach.prepared import Prepared
from autopar.attach.programs import Key, State
from autopar.attach.run import Step
from autopar.attach.steps import parameters_of, step_of
from autopar.attach.tensors import as_dtensor, piece_as
from autopar.errors import CheckFailed, PlanMismatch
from autopar.ir.graph import output_types
from autopar.trace.calls import Call
from autopar.trace.counted import put_back
from autopar.trace.formulas import Computed
from autopar.trace.identity import refuse_one_for_two
from autopar.trace.outputs import Returned, arrays_of, memory_of, numbers_of, taken_of
from autopar.trace.writes import put


def invoke(parallel: Any, prepared: Prepared, call: Call, key: Key, own: Callable[[], Call]) -> Any:
    """What the model returns for this call. `own`: that, of the arguments as the caller has them."""
    state = parallel._autopar
    hooked, count = prepared.hooked
    if sum(map(len, hooked)) != count:
        refuse(parallel)
    positional, named = call.given
    held = (one for one in (*positional, *named.values()) if not isinstance(one, Tensor))
    refuse_one_for_two(chain((state.model_class,), map(type, parallel.modules())), held)
    parameters, computed = parameters_of(prepared, state.device_mesh), prepared.counting.computed(prepared.modules)
    before = _before(parallel, prepared, key)
    given = own() if prepared.changed or prepared.theirs else call
    if prepared.rewritten or prepared.left:
        refuse_shared(given, prepared)
    if prepared.changed:
        call = with_copies(call, given, prepared.changed)
    step = step_of(state, prepared, call)
    if not prepared.has_trained and key.gradients and prepared.runner.program.backward is not None:
        state.trains_with(prepared)
    if before is not None:
        before = replace(before, given=Given.of(call, prepared, step))
        step.states, step.without_tangent = before.states, prepared.without_tangent
        step.differentiated = partial(differentiated, before)
        if prepared.without_tangent and prepared.runner.played is None:
            step.again = with_every_tangent(before)
    beside = [tensors[name] for tensors, name in prepared.beside]
    outputs, written = prepared.runner(step, parameters, beside)
    rebound = memory_of(prepared.out_spec).rebound
    alone = prepared.written_alone - rebound
    with torch.no_grad():
        for name, value in written:
            tensors, leaf = prepared.buffers[name]
            held = tensors[leaf]  # a buffer, or a parameter that does not train
            if value.shape != held.shape:
                raise PlanMismatch(
                    f"an operator of forward resizes buffer {name} from {tuple(held.shape)} to {tuple(value.shape)}, "
                    "as observers of quantizers do: call the plain model once before it is compiled"
                )
            if before is not None and before.keep(name, held, value, name in alone):
                continue
            if name in rebound and not isinstance(held, DTensor):
                tensors[leaf] = value.clone()  # it may be what an output, or backward, has
            else:
                held.copy_(piece_as(value, held) if isinstance(held, DTensor) else value)
    return _assemble_outputs(state, prepared, outputs, given, step, computed)


def _before(parallel: Any, prepared: Prepared, key: Key) -> Before | None:
    """What backward needs to run the call again, if it has to."""
    if not key.gradients or prepared.runner.program.backward is None:
        return None
    changed = prepared.written if prepared.without_tangent else prepared.written_and_read
    if parallel._autopar.pipe is not None or prepared.runner.played is not None:
        changed = ()  # backward has no other way there
    return Before.of(parallel, prepared, key, changed)


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
    known = {place: computed.of(number) for place, number in prepared.counting.asked.returned.items()}
    leaves: dict[int, Any] = {**prepared.output_constants, **known}
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
        if shape and state.outputs == "sharded" and place not in arrays and place not in prepared.changed:
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
        if place in prepared.own_leaves:
            made = made.detach().requires_grad_()
        leaves[place] = made.item() if place in numbers else made.detach().cpu().numpy() if place in arrays else made
        if made.requires_grad and result.target in prepared.graph.leads_to:
            step.handed.append((result.target, weakref.ref(made), hooks_of(made)))
    made = pytree.tree_unflatten([leaves[i] for i in range(prepared.out_spec.num_leaves)], prepared.out_spec)
    assert isinstance(made, Returned)
    for check, wrong in made.checks.items():
        if wrong and all(bool(made.truths[place]) == is_some for place, is_some in check.where):
            raise CheckFailed(check.told)
    write_back(call, prepared.changed, leaves)
    if torch.is_grad_enabled():
        step.skipped |= {told for told, count in zip(taken_of(prepared.out_spec), made.taken, strict=True) if not count}
    _keep(prepared, made, computed)
    return outputs_of(call, made)
