"""The programs of a module: one for each way of calling it, found again by what the call is and by guards.

The first call, or example inputs, plan the training step. Where its plan lays parameters out, and where they reside, is
settled then: every later program (evaluation, another batch size, a parameter that trains from now on) is planned with
that given, so that no parameter moves between calls.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar._compat import with_torch_function
from autopar.attach import hooks
from autopar.attach.agree import agreed
from autopar.attach.batches import SameBatches, batch_dims_of, tell_other_rows
from autopar.attach.drawn_ahead import drawing_as_rank_0, serves
from autopar.attach.guards import guards_of, has_tensors, refuse_carried
from autopar.attach.host_parameters import resident
from autopar.attach.pipe import Pipe
from autopar.attach.placing import as_user_class, known_places, lay_out_new, layouts, newcomers
from autopar.attach.prepared import Prepared, Slot, given_before
from autopar.attach.run import Runner
from autopar.attach.runners import runner_of
from autopar.attach.staging import Staged
from autopar.attach.tensors import mesh_of
from autopar.attach.tracing import is_first_rank, tell_of_kinds, tell_of_traces, told_of
from autopar.attach.updates import Updates
from autopar.attach.watch import PATIENCE_S, Watch
from autopar.emit import forward_only
from autopar.errors import Infeasible
from autopar.ir.batch_norm import parts_of
from autopar.ir.graph import Graph, output_types
from autopar.ir.mesh import Mesh
from autopar.ir.outside import Rules
from autopar.plan import Plan
from autopar.trace import Captured, capture, flatten_inputs, graph_of
from autopar.trace.ambient import AmbientState, ambient_as
from autopar.trace.asked import Arguments, values_of
from autopar.trace.calls import Call, Caller
from autopar.trace.formulas import Computed, Counted, Place
from autopar.trace.installed import let_be_attributes
from autopar.trace.interrupts import interruptible
from autopar.trace.left import is_kept
from autopar.trace.looks import refuse_overlaps
from autopar.trace.modules import aliases
from autopar.trace.outputs import changed_of, memory_of
from autopar.trace.reads import Reads
from autopar.trace.sharing import NOWHERE
from autopar.trace.values import MISSING, made_anew

# How a graph becomes a plan: (graph, the training plan if there is one, layouts of the parameters then) -> plan;
# `loosely=True`: of a step that nobody takes yet. `in_stages` gives the plans of a pipeline.
Planner = Any

KEPT = 64  # programs of a module; the one that was used longest ago goes first
STATES, ANSWERS = 8, 256  # programs of one way of calling it: for states of the module, for what arguments answer
TOLD_AT, KINDS_TOLD_AT = 4, 16  # so many of them, and so many ways of calling it, are told of


class State:
    """Everything a ParallelModule knows beyond the user's module."""

    def __init__(
        self,
        model_class: type[nn.Module],
        device_mesh: DeviceMesh,
        planner: Planner,
        outputs: str,
        inputs: str,
        backend: str,
        precision: Any,
        batch_norm: str,
        patience_s: float = PATIENCE_S,
        rules: tuple[Rules, ...] = (),
        pipe: Pipe | None = None,
    ):
        self.model_class = model_class
        self.device_mesh = device_mesh  # of a pipeline, that of this rank's stage
        self.pipe = pipe
        self.has_new = False  # parameters that came since all were laid out
        self.buffers = set[str]()  # names of those that have rank 0's values
        self.is_plain, self.plain = False, WeakValueDictionary[int, Tensor]()  # those that are no DTensors, by id
        self.staged: Staged | None = None  # the stages of the training step
        self.alike: list[Any] = []  # of a pipeline without a plan: references to it and its copies (`copies.alike`)
        self.mesh = mesh_of(device_mesh)
        self.planner = planner
        self.outputs, self.inputs = outputs, inputs
        self.backend, self.precision = backend, precision
        self.batch_norm, self.rules = batch_norm, rules
        self.groups: dict[str, str] = {}  # axis, or several at once -> name of this rank's process group
        self.updates = Updates()
        self.watch = Watch(device_mesh, patience_s)
        self.same_batches = SameBatches(device_mesh)
        self.own_forward: Callable[..., Any] | None = None  # of the model, where it is not its class's
        self.caller: Caller | None = None
        self.seed: int | None = None
        self.drawing_calls = 0
        self.plan: Plan | None = None
        self.main: Prepared | None = None
        self.programs: OrderedDict[Key, list[Prepared]] = OrderedDict()
        # shape of a call -> the numbers in it, and what comes back
        self.calls: dict[Hashable, tuple[dict[str, int | float], dict[str, Any]]] = {}
        self.in_a_row: Counter[Key] = Counter()  # calls of which each was traced, and no program was there for it
        self.wants_tangents: set[Key] = set()
        self.counted: set[Place] = set()  # numbers of modules that programs take
        self.asked: dict[Any, int] = {}  # what programs ask of arguments (`trace.asked.Asked.settled`)
        self.asks_at_once = False  # forward cannot be traced otherwise (`trace.asked.Arguments`)

    def settle(self, mesh: Mesh) -> None:
        """Arrange the devices as the plan has it; all ranks have to call it."""
        if mesh == self.mesh:
            return
        kind = self.device_mesh.device_type
        self.mesh, self.device_mesh = mesh, init_device_mesh(kind, mesh.sizes, mesh_dim_names=mesh.names)
        self.same_batches = SameBatches(self.device_mesh)

    def trains_with(self, one: Prepared) -> None:
        """What is shown is the largest step of training; before there is one, the first that was planned."""
        main = self.main
        if self.pipe is None and (main is None or not main.has_trained or one.peak > main.peak):
            self.main = one
        one.has_trained = True

    def prepared(self) -> list[Prepared]:
        """All programs that there are."""
        return [one for kept in self.programs.values() for one in kept]

    def __deepcopy__(self, memo: Any) -> State:
        """A copy has parameters of its own, laid out as these are. Its programs are made when it is called."""
        made = State(
            self.model_class,
            self.device_mesh,
            self.planner,
            self.outputs,
            self.inputs,
            self.backend,
            self.precision,
            self.batch_norm,
            self.watch.patience_s,
            self.rules,
            self.pipe,
        )
        made.staged, made.is_plain, made.has_new = self.staged, self.is_plain, self.has_new
        made.buffers = {*self.buffers}
        made.plan, made.seed, made.drawing_calls = self.plan, self.seed, self.drawing_calls
        made.own_forward = copy.deepcopy(self.own_forward, memo)
        return made


class Key(NamedTuple):
    """What a program is found by; guards do the rest. `call`: of `Call`; `gradients`: whether backward may follow."""

    call: Hashable
    gradients: bool
    ambient: AmbientState


def found(state: State, key: Key, tensors: Sequence[Tensor]) -> Prepared | None:
    """The program of this call, of these, if there is one that still means what the module does."""
    kept, known = [] if state.has_new else state.programs.get(key, []), dict[int, Any]()
    for place, prepared in enumerate(kept):
        if serves(prepared, tensors, state.device_mesh, known):
            state.programs.move_to_end(key)
            state.in_a_row[key] = 0
            if prepared.has_answers:  # the one that was used longest ago goes first
                kept.insert(0, kept.pop(place))
            return prepared
    return None


def asking(state: State, call: Call, key: Key) -> contextlib.AbstractContextManager[None]:
    """What is around the choice of a program: where programs ask arguments of which each rank has a part, all ranks put
    these together.
    """
    asks = state.inputs == "local" and any(one.asks for one in state.programs.get(key, ()))
    return state.watch.call(f"what {told_of(call, key.gradients)} asks") if asks else contextlib.nullcontext()


@contextlib.contextmanager
def laid_out_for_it() -> Iterator[None]:
    """Inside, a first call without gradients is planned, whose step of training is planned and laid out: where it does
    not fit, the refusal says that it has done so much.
    """
    try:
        yield
    except Infeasible as error:
        told = (
            "Parameters lie by now as a step of training with this batch wants them, which may not be best for others: "
            "compile the model anew, with a batch that it trains with (example_inputs=, example_kwargs=)."
        )
        raise Infeasible(f"{error} {told}", error.at_least, error.enough) from None


def why_new(state: State, key: Key, call: Call) -> str:
    """What has changed since the last program of such a call, in words; what it is where there is none."""
    known = state.programs.get(key)
    return (
        told_of(call, key.gradients)
        if not known
        else "it has new parameters"
        if state.has_new
        else known[0].fits(call.tensors) or ""
    )


def prepare(
    parallel: nn.Module, state: State, call: Call, key: Key, *, training: bool, loosely: bool = False
) -> Prepared:
    """Trace, plan and emit the program of this call; `training`: of the module in train mode. `loosely`: nobody trains
    with it yet.

    Raises what `autopar.compile` says.
    """
    new = newcomers(parallel, state)
    with ambient_as(key.ambient), interruptible() as check:
        captured, graph = _capture(parallel, state, call, key, training)
        check()
    if not key.gradients:
        graph = forward_only(graph)
    with torch.inference_mode(False):  # parameters made here are trained later
        with state.watch.working():
            fixed = {} if state.plan is None else layouts(parallel, state, new)
            staged = None
            if state.pipe is not None:
                state.staged = known_places(parallel, state, new)
                staged = state.planner.in_stages(graph, state.pipe, state.staged, fixed, loosely=loosely)
                plan = staged.plan_at(state.pipe.place)
            else:
                plan = state.planner(graph, state.plan, fixed, loosely=loosely)
            state.settle(plan.mesh)
        if state.plan is not None and not key.gradients:
            if staged is not None:
                staged = staged.residing(state.plan.residence)
            plan = resident(plan, state.plan.residence)
        plan = replace(plan, notes=(*plan.notes, *captured.notes))
        runner = runner_of(state, plan, staged)
        if state.plan is not None:
            lay_out_new(parallel, state, runner, new)
        prepared = _prepared(parallel, state, call, key, captured, graph, runner)
    kept = state.programs.setdefault(key, [])
    if len(kept) + 1 in (TOLD_AT, STATES):
        tell_of_traces(kept[0].fits(call.tensors), len(kept) + 1)
    kept.insert(0, prepared)
    state.in_a_row[key] += 1
    del kept[ANSWERS if prepared.has_answers else STATES :]
    state.calls.setdefault(call.shape, (dict(call.numbers), output_types(prepared.graph)))
    if len(state.programs) == KINDS_TOLD_AT and not kept[1:]:
        tell_of_kinds(KINDS_TOLD_AT)
    while len(state.programs) > KEPT:
        state.programs.popitem(last=False)
    return prepared


def varying(state: State, call: Call) -> set[str]:
    """Paths of the numbers that were others when a call like this one was traced."""
    known, _ = state.calls.get(call.shape, (call.numbers, []))
    return {path for path, value in call.numbers.items() if known.get(path) != value}


def _capture(parallel: nn.Module, state: State, call: Call, key: Key, training: bool) -> tuple[Captured, Graph]:
    """The joint graph, also where the caller is in no_grad; on all ranks or on none."""
    leaves, _ = flatten_inputs(call.args, call.kwargs)
    if state.inputs == "local" and state.mesh.ranks > 1 and is_first_rank():
        tell_other_rows(leaves, state.mesh.ranks)
    state.updates.finish()  # while torch traces, optimizers compute in other ways
    mode = None if training == parallel.training else training
    numbers = set[str]() if state.caller is None else state.caller.varying  # which have programs of their own
    values = {path: value for path, value in values_of(leaves).items() if path not in numbers}

    def captured_with() -> Captured:
        return capture(
            parallel,
            call.args,
            call.kwargs,
            training=mode,
            precision=state.precision,
            every_tangent=key in state.wants_tangents,
            loss_alone=state.outputs == "loss" and key.gradients and not call.derivatives,
            device_type=state.device_mesh.device_type,
            counted=state.counted,
            derivatives=call.derivatives,
            tensors=state.inputs != "local",  # whose rows nobody knows
            arguments=Arguments(values, state.asks_at_once),
        )

    def trace() -> tuple[Captured, Graph]:
        hooks.refuse(parallel)
        with (
            state.watch.working(),
            as_user_class(parallel),
            torch.inference_mode(False),
            torch.set_grad_enabled(key.gradients),
            with_torch_function(),
        ):
            captured = captured_with()
            if captured.without_tangent and not captured.reads.left.is_independent:
                state.wants_tangents.add(key)  # backward could not trace it again, with what forward has left there
                captured = captured_with()
        let_be_attributes(captured.reads.unregistered, dict(parallel.named_modules(remove_duplicate=False)))
        state.counted |= captured.reads.counting.filled
        state.asks_at_once |= captured.reads.asked.arguments.at_once
        known = state.programs.get(key, ())
        refuse_carried(captured.reads, [one.writes for one in known], state.in_a_row[key] >= STATES - 1)
        parts = parts_of(state.batch_norm, state.mesh)
        graph = graph_of(captured, state.precision, parts=parts, rules=state.rules)
        refuse_overlaps(parallel, graph)
        return captured, graph

    with drawing_as_rank_0(state.device_mesh):
        return agreed(trace, state.device_mesh)


def _prepared(
    parallel: nn.Module, state: State, call: Call, key: Key, captured: Captured, graph: Graph, runner: Runner
) -> Prepared:
    plan, slots, buffers = runner.plan, _slots(parallel, "_parameters"), _slots(parallel, "_buffers")
    written = {node.target for node in graph.nodes if node.op == "buffer"} & slots.keys()  # that do not train
    leaves, _ = flatten_inputs(call.args, call.kwargs)
    paths = [path for path, leaf in leaves if isinstance(leaf, Tensor)]
    # Weakly: who drops the module frees it, and what it holds of a device, without Python's search for circles.
    modules = WeakValueDictionary(parallel.named_modules(remove_duplicate=False))
    paths += captured.reads.counting.paths(modules) + captured.reads.draws.paths()
    places = {path: place for place, path in enumerate(paths)}
    memory = NOWHERE if state.outputs == "sharded" else memory_of(captured.out_spec)
    changed = {leaf: places[path] for leaf, path in changed_of(captured.out_spec).items()}
    held = [slots[node.target] for node in runner.parameters]
    beside = [slots[name] for name in runner.beside]
    whole = [slots[node.target] for node in graph.nodes if node.op == "parameter" or node.target in written]
    tensors = (*call.tensors, *captured.reads.counting.tensors(modules), *captured.reads.draws.examples)
    sets = [(place, _setting(place, captured.reads)) for place in captured.reads.written]
    hooked = hooks.hooked(parallel)
    tied = {**slots, **buffers}
    buffers |= {name: slots[name] for name in written}
    return Prepared(
        plan,
        runner,
        tuple(
            (node, places[node.target], plan.choices[node.name].gives[0])
            for node in runner.own_inputs
            if node.op == "input"
        ),
        held,
        beside,
        buffers,
        {name: value.to(state.device_mesh.device_type) for name, value in captured.constants.items()},
        captured.out_spec,
        captured.output_constants,
        guards_of(captured.reads, parallel),
        [((tensors, name), tensors[name].requires_grad) for tensors, name in whole],
        [(tied[name], tied[first]) for name, first in aliases(parallel).items()],
        [tensors[name] for tensors, name in whole],
        (hooked, sum(map(len, hooked))),
        hooks.Registered(parallel),
        captured.without_tangent if runner.program.backward is not None else frozenset(),
        captured.reads.written,
        modules,
        [(place, value) for place, value in sets if value is not None],
        captured.reads.left.writes,
        [(MISSING, None)] * len(held),
        captured.reads.counting,
        captured.reads.draws,
        told_of(call, key.gradients),
        batch_dims_of(graph, tensors, places, state.device_mesh, changed) if state.inputs == "local" else {},
        given_before(memory, {} if state.inputs == "local" else places, buffers, changed),
        captured.reads.asked.settled(state.asked),
        {path: at for path in captured.reads.asked.paths if (at := places[path]) < len(call.tensors)},
        changed,
        captured.own_leaves,
    )


def _setting(place: Place, reads: Reads) -> Callable[[Computed], Any] | None:
    """What forward sets an attribute to, of the numbers that are there; None where the program gives it."""
    _, after, _ = reads.written[place]
    if isinstance(after, Counted):
        number = after.formula.number
        return lambda made: made.of(number)
    if has_tensors(after) or is_kept(after):
        return None
    return (lambda _: made_anew(after)) if place in reads.anew else (lambda _: after)


def _slots(parallel: nn.Module, kind: str) -> dict[str, Slot]:
    """Name -> where a parameter or buffer is found."""
    return {
        f"{path}.{name}" if path else name: (getattr(module, kind), name)
        for path, module in parallel.named_modules(remove_duplicate=False)
        for name, tensor in getattr(module, kind).items()
        if tensor is not None
    }
