"""The program as one autograd function: parameters as they are held and local tensors in, local tensors out, explicit
collectives in both directions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar._compat import keeps_graph, without_torch_function
from autopar.attach.generators import States, drawing_from
from autopar.attach.results import apart_from, behind_a_function, check_saved, own, refuse_batches, told_apart, versions
from autopar.attach.rounds import Played
from autopar.attach.rows import Rows
from autopar.attach.tensors import as_stored, gradient_of, local_of, relaid
from autopar.attach.updates import Updates
from autopar.attach.watch import BACKWARD, Watch
from autopar.attach.whole_values import of_whole_batch
from autopar.emit import Emitted
from autopar.emit.moves import settle
from autopar.emit.seeded import seeds
from autopar.ir.branches import idle
from autopar.ir.graph import Graph, Node, Result, input_type
from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.trace.ambient import without_autocast


@dataclass(frozen=True)
class Runner:
    """A program with what every call of it needs: this rank's coordinates, which pieces of random numbers it draws, and
    the updates of parameters that may still be under way. `played`: how a step of several micro-batches is; None: it is
    one.
    """

    program: Emitted
    plan: Plan
    mesh: Mesh
    coordinates: tuple[Tensor, ...]
    pieces: tuple[int, ...]
    updates: Updates
    watch: Watch
    played: Played | None = None

    @property
    def parameters(self) -> tuple[Node, ...]:
        return tuple(node for node in self.program.inputs if node.op == "parameter")

    @property
    def graph(self) -> Graph:
        """Of the whole model; of several micro-batches one of them."""
        return self.plan.graph

    @cached_property
    def rows(self) -> Rows:
        """In what a step's micro-batches add up their gradients."""
        return Rows.of(self.plan, self.program, {})

    @property
    def terms(self) -> list[torch.dtype | None]:
        """The dtypes of the program's gradients."""
        refs = [result.ref for result, _ in self.program.gradients]
        return [None if ref is None else getattr(torch, self.plan.graph.type_of(ref).dtype) for ref in refs]

    @property
    def results(self) -> tuple[tuple[Result, Layout], ...]:
        """What a call gives back, and how it lies."""
        return self.program.results

    @property
    def differentiable(self) -> frozenset[str]:
        """Outputs that have a gradient."""
        return frozenset(node.target for node in self.program.tangents)

    @property
    def gradients(self) -> tuple[tuple[Result, Layout], ...]:
        """Those of parameters, as backward gives them."""
        return self.program.gradients

    @property
    def beside(self) -> tuple[str, ...]:
        """Parameters of other stages, which get gradients of no elements."""
        return ()

    @cached_property
    def order(self) -> Sequence[int]:
        """Places of the program's parameters and of those beside, by name: autograd calls hooks of gradients in it,
        which may ask for numbers of all stages, and so in the same one on all ranks.
        """
        names = [*(node.target for node in self.parameters), *self.beside]
        return sorted(range(len(names)), key=names.__getitem__)

    @property
    def own_inputs(self) -> tuple[Node, ...]:
        """What a call brings."""
        return self.program.inputs

    def seeds(self, seed: int, call: int) -> tuple[Tensor, ...]:
        """Those of one micro-batch: `seed` of the module, and how many drew before."""
        return (seeds(seed, call, self.pieces),) if self.pieces else ()

    def as_read(self, pieces: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Parameters as the program reads them: cast, where all micro-batches of a step read one cast."""
        stored = self.plan.graph.rounds.stored
        if not stored:
            return pieces
        types = [node.outputs[0] if node.name in stored else None for node in self.parameters]
        return tuple(
            one if type is None else one.to(getattr(torch, type.dtype)) for one, type in zip(pieces, types, strict=True)
        )

    def play(
        self, step: Step, pieces: Sequence[Tensor], trains: bool
    ) -> tuple[tuple[Tensor | None, ...], list[Tensor | None] | None]:
        """All of a step that runs inside the call: (results, gradients). `pieces`: parameters, local."""
        assert self.played is not None
        return _all_rounds(self, step, pieces, self.played, trains)

    @property
    def outputs(self) -> dict[str, tuple[int, Layout]]:
        """Index of an output -> its place among the results, and its layout."""
        told = enumerate(self.results)
        return {result.target: (i, layout) for i, (result, layout) in told if result.kind == "output"}

    def __call__(
        self, step: Step, parameters: Sequence[Tensor], beside: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor | None], list[tuple[str, Tensor]]]:
        """(outputs in the model's order, new values of the buffers it writes). Outputs carry gradients where those of
        the model do. `parameters`: those of the program; `beside`: those of `self.beside`.
        """
        given, order = (*parameters, *beside), self.order if beside else range(len(parameters))
        if step.through and torch.is_grad_enabled():
            given = behind_a_function(given)
        found: Any = _Step.apply(self, step, order, *(given[at] for at in order), *step.through.values())
        if not torch.is_grad_enabled():
            settle()  # what is fetched from the host may be changed there from now on
        outputs: list[Tensor | None] = []
        buffers: list[tuple[str, Tensor]] = []
        for (result, _), value in zip(self.results, found, strict=True):
            if result.kind == "buffer":
                assert value is not None
                buffers.append((result.target, value))
            else:
                outputs.append(value)
        return outputs, buffers

    def ones(self) -> list[Tensor]:
        """1 for each output that backward begins at."""
        device = self.coordinates[0].device
        types = [node.outputs[0] for node in self.program.tangents]
        return [torch.ones(t.shape, dtype=getattr(torch, t.dtype), device=device) for t in types if t is not None]

    def tangents(self, given: dict[str, tuple[Tensor, Layout]], device_mesh: Any) -> list[Tensor]:
        """The gradients of the outputs that backward takes, in its order; an output that nobody used counts as zero.
        `given`: output -> gradient and the layout it has.
        """
        layout_of = {target: layout for target, (_, layout) in self.outputs.items()}
        found: list[Tensor] = []
        for node in self.program.tangents:
            (type,) = node.outputs
            assert type is not None
            if node.target in given:
                gradient, layout = given[node.target]
                found.append(as_stored(relaid(gradient, type.shape, layout, layout_of[node.target], device_mesh)))
                continue
            shape = local_shape(type.shape, layout_of[node.target], self.mesh)
            assert shape is not None
            found.append(torch.zeros(shape, dtype=getattr(torch, type.dtype), device=self.coordinates[0].device))
        return found


@dataclass
class Step:
    """One call: what the program reads besides parameters. `again`: gives the same call as a step with the gradients
    of `without_tangent`, outputs whose gradients this program does not take. `seeds`: of each micro-batch. `handed`:
    outputs that others are made of, as the caller got them, and their hooks. `averaged`: those of which each rank has
    its own rows, and whose gradients count as DDP has it; `of_all_ranks`: those that each has whole, and makes
    gradients for of its own rows. `differentiated`: gives gradients that have gradients, of the function that runs
    backward and the gradients given. `states`: of generators, for who runs it again. `skipped`: branches that forward
    has not taken (`autopar.ir.branches`). `packed`: as `Memory.packed`.
    """

    others: tuple[Tensor, ...]
    seeds: tuple[tuple[Tensor, ...], ...]
    watched: tuple[Tensor, ...]  # of the user's, which have to be the same when backward runs
    device_mesh: Any
    through: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # pieces of inputs that get gradients
    packed: frozenset[int] = frozenset()
    without_tangent: frozenset[str] = frozenset()
    again: Callable[[], tuple[Runner, Step]] | None = None
    differentiated: Callable[[Any, Mapping[str, tuple[Tensor, Layout]]], tuple[Any, ...]] | None = None
    states: States = field(default_factory=list[Any])
    skipped: set[str] = field(default_factory=set[str])
    averaged: set[str] = field(default_factory=set[str])
    of_all_ranks: set[str] = field(default_factory=set[str])
    handed: list[tuple[str, weakref.ref[Tensor], Mapping[int, Any]]] = field(default_factory=list[Any])


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runner: Runner, step: Step, order: Sequence[int], *ordered: Tensor) -> tuple[Any, ...]:
        by_place, ctx.order = dict(zip(order, ordered[: len(order)], strict=True)), order
        given = tuple(by_place[at] for at in range(len(order)))
        program, count = runner.program, len(given) - len(runner.beside)
        parameters, ctx.beside = given[:count], given[count:]
        pieces = runner.as_read(tuple(map(local_of, parameters)))
        count = len(runner.results)
        ctx.added_up = None
        with without_autocast():
            if runner.played is None:
                outputs = program.forward(*pieces, *step.others, *runner.coordinates, *step.seeds[0])
            else:
                outputs, ctx.added_up = runner.play(step, pieces, any(ctx.needs_input_grad))
        ctx.runner, ctx.step, ctx.parameters = runner, step, parameters
        ctx.saved = apart_from(outputs[count:], outputs[:count])
        ctx.versions = [(one, one._version) for one in (*parameters, *step.watched) if not one.is_inference()]
        ctx.exposed = versions(outputs[count:], program.exposed)
        read = (*pieces, *step.others)
        results = tuple(own(value, read, place in program.alone) for place, value in enumerate(outputs[:count]))
        told = runner.differentiable | step.without_tangent
        results, constant = told_apart(runner.results, results, told, step.packed)
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        runner = ctx.runner
        behind = (function for function, _ in ctx.next_functions[: len(ctx.order)])
        refuse_batches(ctx.step.device_mesh.size(), *gradients, of_parameters=behind)
        with runner.watch.call(BACKWARD):
            left = idle(runner.graph, runner.differentiable, ctx.step.skipped) if ctx.beside else set[str]()
            nothing = [
                gradient_of(one, None if name in left else torch.zeros_like(local_of(one)))
                for name, one in zip(runner.beside, ctx.beside, strict=True)
            ]
            found = _backward(ctx, gradients)
            made = (*found[: len(ctx.parameters)], *nothing)
            return None, None, None, *(made[at] for at in ctx.order), *found[len(ctx.parameters) :]


def _all_rounds(
    runner: Runner, step: Step, pieces: Sequence[Tensor], played: Played, trains: bool
) -> tuple[tuple[Tensor | None, ...], list[Tensor | None] | None]:
    """(results of all micro-batches, gradients added up over them). Backward runs behind each forward, from a gradient
    of 1 for the loss: gradients are linear in it, and are multiplied by the user's when that arrives.
    """
    program, coordinates = runner.program, runner.coordinates
    results: list[Tensor | None] = [None] * len(program.results)
    dtypes: list[tuple[torch.dtype | None, ...]] = []
    so_far = runner.rows.begun(coordinates[0].device)[0] if trains and program.backward is not None else None
    for number in range(played.count):
        seeds = step.seeds[number]
        outputs = program.forward(*pieces, *played.part(step.others, number), *coordinates, *seeds)
        own, saved = outputs[: len(results)], list(outputs[len(results) :])
        del outputs
        played.put(results, own, number)
        dtypes.append(_dtypes(own))
        del own
        if so_far is not None:
            assert program.backward is not None
            made = program.backward(saved, *runner.ones(), *coordinates, *seeds, so_far)
            settle()
            for place in range(len(made)):  # by no name that would hold the last one while the next round runs
                played.put_gradient(so_far, place, made[place], number)
            del made
    return tuple(as_terms(results, dtypes[0])), None if so_far is None else as_terms(so_far, runner.terms)


def _dtypes(values: Sequence[Tensor | None]) -> tuple[torch.dtype | None, ...]:
    return tuple(None if value is None else value.dtype for value in values)


def as_terms(values: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    """Sums in the dtypes of their terms."""
    return [None if value is None else value.to(dtype) for value, dtype in zip(values, dtypes, strict=True)]


def _delivered(ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What was added up over micro-batches, times the gradient of the loss."""
    (loss,) = ctx.runner.differentiable
    place, _ = ctx.runner.outputs[loss]
    beside = [at for at, gradient in enumerate(gradients) if gradient is not None and at != place]
    if beside:
        which = f"(output {ctx.runner.results[beside[0]][0].target}; the loss is output {loss})"
        raise RuntimeError(
            f"a gradient arrives for an output beside the loss {which}, and in micro-batches backward runs before it "
            "is known: make what it is needed for part of the loss that forward returns, or compile without "
            "micro_batches="
        )
    times, added_up = gradients[place], ctx.added_up
    assert times is not None
    ctx.added_up = None
    return [None if gradient is None else gradient.mul_(times) for gradient in added_up]


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    runner, step, parameters, skipped = ctx.runner, ctx.step, ctx.parameters, ctx.step.skipped
    names = {node.target: parameter for node, parameter in zip(runner.parameters, parameters, strict=True)}
    names |= step.through
    if all(gradient is None for gradient in gradients):
        # Of a later call, which was given what this one has made, and reads it without its gradient (`.detach()`).
        return tuple(None for _ in names)
    if runner.program.backward is None:
        raise RuntimeError("this call ran the inference program, which has no backward; call the module in grad mode")
    if not torch.is_grad_enabled():
        check_saved(ctx.saved, ctx.exposed)
    places = {target: place for target, (place, _) in runner.outputs.items()}
    gradients = of_whole_batch(gradients, places, step.averaged, step.of_all_ranks, step.device_mesh)
    given = {
        target: (one, layout)
        for target, (place, layout) in runner.outputs.items()
        if (one := gradients[place]) is not None
    }
    _no_hooks_between(runner, step, given.keys())
    with without_torch_function():
        is_changed = any(one._version != version for one, version in ctx.versions)
    if is_changed:
        raise RuntimeError(
            "a parameter or an input was changed in place between forward and backward, which needs what it was: "
            "call backward before the optimizer's step, or the module again after it"
        )
    runner.updates.finish()  # of parameters whose next gradients are made now
    if torch.is_grad_enabled():
        assert step.differentiated is not None
        return step.differentiated(ctx, given)
    if keeps_graph() and ctx.runner.played is None:
        saved, ctx.exposed = runner.program.to_keep(ctx.saved), versions(ctx.saved, range(len(ctx.saved)))
    else:
        saved, ctx.saved = ctx.saved, None
    if ctx.added_up is not None:
        made = _reached(runner, _delivered(ctx, gradients), given.keys(), skipped)
        return _to_parameters(runner, names, made)
    if step.without_tangent & given.keys():
        saved.clear()
        assert step.again is not None
        runner, step = step.again()
        held = [local_of(names[node.target]) for node in runner.parameters]
        with drawing_from(step.states), without_autocast():
            outputs = runner.program.forward(*held, *step.others, *runner.coordinates, *step.seeds[0])
        saved = list(outputs[len(runner.program.results) :])
    program = runner.program
    with without_autocast():
        made = program.backward(saved, *runner.tangents(given, step.device_mesh), *runner.coordinates, *step.seeds[0])
    settle()  # gradients on the host have arrived, and parameters there have been read
    made = _reached(runner, made, given.keys(), skipped)
    made = _as_given(ctx.runner, runner, made, step.device_mesh)
    return _to_parameters(runner, names, made)


def _no_hooks_between(runner: Runner, step: Step, given: Set[str]) -> None:
    """Raises RuntimeError where somebody wants to see, or to change, a gradient that autograd does not have: of an
    output, from others that are made of it. `given`: the outputs whose gradients arrive.
    """
    for target, held, hooks in step.handed:
        output, others = held(), runner.graph.leads_to[target] & given
        if others and (hooks or (output is not None and output.retains_grad)):
            raise RuntimeError(
                f"output {target} of the module has a hook, or retains its gradient, and output {min(others)}, whose "
                "gradient arrives, was made of it: between them gradients stay inside the program, which calls no "
                "hooks. Leave it out, or take that gradient of the model without autopar"
            )


def _reached(runner: Runner, made: Sequence[Tensor | None], given: Set[str], skipped: Set[str]) -> list[Tensor | None]:
    """The gradients, but for those that are idle: an optimizer leaves what has none alone, and would let zeros decay
    it.
    """
    left = idle(runner.graph, given, skipped)
    return [None if result.target in left else one for (result, _), one in zip(runner.gradients, made, strict=True)]


def _as_given(first: Runner, runner: Runner, made: list[Tensor | None], device_mesh: Any) -> list[Tensor | None]:
    """The gradients, of which those of arguments lie as `first`, which ran forward, has cut them."""
    if runner is first:
        return made
    layouts = {node.target: first.plan.choices[node.name].gives[0] for node in first.graph.nodes if node.op == "input"}
    types = {node.target: input_type(runner.graph, node) for node in runner.graph.nodes if node.op == "input"}
    return [
        relaid(one, types[result.target].shape, layout, layouts[result.target], device_mesh)
        if one is not None and result.target in layouts
        else one
        for (result, layout), one in zip(runner.gradients, made, strict=True)
    ]


def _to_parameters(runner: Runner, names: Mapping[str, Tensor], made: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """What autograd wants of backward: the gradients of parameters, and of inputs that have one, in order. `names`:
    these by name.
    """
    by_name = {result.target: value for (result, _), value in zip(runner.gradients, made, strict=True)}
    with without_torch_function():
        return tuple(gradient_of(parameter, by_name.get(name)) for name, parameter in names.items())
