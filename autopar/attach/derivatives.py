"""Backward with `create_graph=True`: gradients that have gradients, for penalties on them, residuals of differential
equations, and steps that are differentiated.

What a call gives is computed again, by a program that goes on to its gradients (`autopar.trace.derivatives`). That is
planned as any program is, split as any is, and has a backward of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._compat import is_batched, is_wanted
from autopar.attach.again import Before, Given
from autopar.attach.generators import drawing_from
from autopar.attach.inputs import relaid_with_gradient, whole_with_gradient
from autopar.attach.prepared import Prepared
from autopar.attach.programs import Key, found, prepare
from autopar.attach.tensors import as_dtensor, is_on_host, layout_of
from autopar.ir.branches import idle
from autopar.ir.graph import output_types
from autopar.ir.layout import Layout
from autopar.trace.derivatives import Derivative, derived
from autopar.trace.outputs import given_and_kept, taken_of

PATH = "a backward with create_graph=True computes the call again, by a program that has its gradients"


def differentiated(before: Before, ctx: Any, given: Mapping[str, tuple[Tensor, Layout]]) -> tuple[Tensor | None, ...]:
    """The gradients of parameters, and of arguments that have one, in order. `ctx`: of the function that ran forward;
    `given`: output -> gradient, and how its pieces lie.
    """
    call = before.call
    derivative = _asked_for(before, len(call.tensors), ctx, given)
    state, device_mesh = before.state, ctx.step.device_mesh
    types = output_types(before.prepared.graph)
    tangents: list[Tensor] = []
    for place in derivative.outputs:
        piece, layout = given[str(place)]
        type = types[str(place)]
        assert type is not None
        piece = _with_gradient_times(piece, before.ranks_of_rows)
        tangents.append(whole_with_gradient(piece, type.shape, layout, state.mesh, device_mesh))
    call = derived(call, derivative, tangents)
    key = Key(call.key, True, before.key.ambient)
    with before.back(PATH):
        state.wants_tangents.add(key)
        full = found(state, key, call.tensors)
        if full is None:
            full = prepare(before.parallel, state, call, key, training=before.parallel.training)
        _refuse_other_draws(before.prepared, full)
    step = before.step(full, call)
    next_one = replace(before, prepared=full, key=key, given=Given.of(call, full, step))
    step.differentiated = partial(differentiated, next_one)
    # Those of the call: `torch.func.functional_call` may have put them there.
    held = dict(zip((node.target for node in ctx.runner.parameters), ctx.parameters, strict=True))
    with torch.enable_grad(), drawing_from(before.states):
        outputs, _ = full.runner(step, [held[node.target] for node in full.runner.parameters])
    step.skipped |= _not_taken(full, outputs)
    made = _by_name(before, full, derivative, outputs, held)
    # The first program's backward begins at outputs that have a tangent there: it says nothing of the others.
    tells = before.prepared.without_tangent.isdisjoint(given)
    left = idle(before.prepared.graph, given.keys(), ctx.step.skipped) if tells else set[str]()
    return tuple(None if name in left else made.get(name) for name in (*held, *ctx.step.through))


def _asked_for(before: Before, count: int, ctx: Any, given: Mapping[str, tuple[Tensor, Layout]]) -> Derivative:
    """Of a call of so many tensors. Raises RuntimeError where there is no program for it."""
    prepared, state, names = before.prepared, before.state, [node.target for node in ctx.runner.parameters]
    functions = [function for function, _ in ctx.next_functions]
    by_place = dict(zip(ctx.order, functions[: len(ctx.order)], strict=True))
    trained = tuple(name for place, name in enumerate(names) if is_wanted(by_place[place]))
    pairs = zip(ctx.step.through, functions[len(ctx.order) :], strict=True)
    through = tuple(path for path, function in pairs if is_wanted(function))
    arguments = {node.target for node, place, _ in prepared.inputs if place < count}
    if state.pipe is not None or ctx.runner.played is not None:
        _refuse("a step in stages, or in micro-batches, has ended by then")
    if any(is_batched(gradient) for gradient, _ in given.values()):
        raise RuntimeError(
            "backward was called with create_graph=True, and gradients are taken in a batch (is_grads_batched=True, "
            "vectorize=True): take them one by one, by torch.autograd.grad(y[i], x, create_graph=True) in a loop, or "
            "without vectorize"
        )
    if not arguments.issuperset(through):
        _refuse("gradients lead to what an earlier call has left in the module")
    if any(isinstance(one, DTensor) and is_on_host(one) for one in ctx.parameters):
        _refuse("parameters lie in the memory of the host")
    return Derivative(given_and_kept(prepared.out_spec), tuple(sorted(map(int, given))), through, trained)


def _refuse(why: str) -> NoReturn:
    raise RuntimeError(
        f"backward was called with create_graph=True, and {why}: put the model, the torch.autograd.grad and what is "
        "made of it into one module, and compile that"
    )


def _refuse_other_draws(first: Prepared, full: Prepared) -> None:
    """Both have to drop out the same."""
    if full.draws[: len(first.draws)] != first.draws:
        _refuse(
            "forward draws random numbers in a kernel that has no second derivatives (dropout of attention), where "
            "others would be drawn"
        )


def _not_taken(full: Prepared, outputs: list[Tensor | None]) -> set[str]:
    """The branches that this call does not take, as `Step.skipped` has them: what they alone use has no gradient."""
    taken = taken_of(full.out_spec)
    results = [result.target for result, _ in full.runner.results if result.kind == "output"]
    counts = {target: value for target, value in zip(results, outputs, strict=True) if target in taken}
    return {target for target, value in counts.items() if value is not None and not value}


def _by_name(
    before: Before, full: Prepared, derivative: Derivative, outputs: list[Tensor | None], held: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The gradients that this program gives, as what they are of lies; by name, or path. `held`: parameters."""
    state, first = before.state, before.prepared
    device_mesh, types = state.device_mesh, output_types(full.graph)
    results = [(result, layout) for result, layout in full.runner.results if result.kind == "output"]
    layouts = {node.target: layout for node, _, layout in first.inputs}
    made: dict[str, Tensor] = {}
    names = (*derivative.inputs, *derivative.parameters)
    for (result, layout), value in zip(results, outputs, strict=True):
        if int(result.target) >= len(names):  # what forward checks, as it did before
            continue
        name, type = names[int(result.target)], types[result.target]
        if value is None:  # no output is made of it
            continue
        assert type is not None
        parameter = held.get(name)
        if isinstance(parameter, DTensor):
            lies = layout_of(parameter)
            value = relaid_with_gradient(value, type.shape, layout, lies, device_mesh).to(parameter.dtype)
            made[name] = as_dtensor(value.contiguous(), type.shape, lies, device_mesh)
        elif parameter is not None:
            made[name] = whole_with_gradient(value, type.shape, layout, state.mesh, device_mesh).to(parameter.dtype)
        else:
            value = relaid_with_gradient(value, type.shape, layout, layouts[name], device_mesh)
            made[name] = _with_gradient_times(value, 1 / before.ranks_of_rows)
    return made


def _with_gradient_times(value: Tensor, factor: float) -> Tensor:
    """The same. Where each rank has rows of its own, gradients of arguments are those of its loss, which the loss of
    the whole batch is an average of; inside of programs they are those of the whole.
    """
    if factor != 1 and value.requires_grad:
        value = value.view_as(value)
        value.register_hook(lambda gradient: gradient * factor)
    return value
