"""emit: a plan becomes two fx GraphModules at local shapes, forward and backward, with the collectives in them.

The forward takes the local parameters, buffers, constants, inputs, this rank's coordinates and, where numbers are
drawn, seeds; it returns results, then the values that backward needs. Backward takes those as one list and pops each
right before its first use, so that nothing outlives its last reader. One program serves all ranks: where ranks differ,
a coordinate or a seed comes in as a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.emit import ops
from autopar.emit.attention import capability_of, cudnn_first
from autopar.emit.emitted import Emitted, added_up
from autopar.emit.seeded import drawing, seeded
from autopar.emit.writer import BodyWriter, Writer, gives_list, target_of
from autopar.ir.attention import OPERANDS_OF_ATTENTION, kernel_at
from autopar.ir.graph import Graph, Node, Phase, Ref, Result, TensorType, map_refs
from autopar.ir.layout import Layout, local_type, show
from autopar.lower import Program, lower
from autopar.lower.program import (
    Alloc,
    Copy,
    Free,
    Inner,
    Instruction,
    Launch,
    Local,
    Loop,
    Operator,
    Read,
    Run,
    Send,
    Transfer,
    Update,
    Wait,
    Within,
)
from autopar.lower.verify import verify
from autopar.plan import Choice, Delivery, Plan
from autopar.price.reshard import Work
from autopar.propose.strategies import operand_types
from autopar.rules.bodies import BODIES
from autopar.rules.local import localise
from cost_models.steps import DEVICE, Comm, Move

INPUT_KINDS = ("parameter", "buffer", "constant", "input")


def emit(plan: Plan, groups: Mapping[str, str], device: str = "cpu", *, one_at_a_time: bool = False) -> Emitted:
    """Write the code of `plan`. `groups`: mesh axis, or several at once, -> name of this rank's process group.

    `one_at_a_time`: every collective is waited for as soon as it is launched, in the order in which the plan launches
    them. gloo needs that: several of its collectives in flight corrupt memory (docs/design/0018).
    """
    program = lower(plan, plan.prefetch)
    verify(program)
    forward = _Emitter(plan, program, groups, device, "forward", None, one_at_a_time)
    sources = tuple(n for kind in INPUT_KINDS for n in plan.graph.nodes if n.op == kind)
    for node in sources:
        forward.source(node)
    forward.add_coordinates()
    drawn = forward.add_seeds()
    forward.run()
    backward, kept = None, []
    tangents = tuple(n for n in plan.graph.nodes if n.op == "tangent")
    if any(result.kind == "gradient" for result in plan.graph.results):
        backward = _Emitter(plan, program, groups, device, "backward", forward, one_at_a_time)
        for node in tangents:
            backward.source(node)
        backward.add_coordinates()
        backward.add_seeds()
        backward.add_sums()
        backward.run()
        kept = backward.popped[::-1]
    results = forward.delivered()
    forward.graph.output(tuple([*(value for _, _, value in results), *(forward.values[value] for value in kept)]))
    gradients = [] if backward is None else backward.delivered()
    if backward is not None:
        backward.graph.output(tuple(value for _, _, value in gradients))
    return Emitted(
        forward.finish("Forward"),
        None if backward is None else backward.finish("Backward"),
        sources,
        tuple((result, layout) for result, layout, _ in results),
        tangents,
        tuple((result, layout) for result, layout, _ in gradients),
        tuple((node, plan.choices[node.name].gives[0]) for node in drawn),
        added_up(plan),
        *_shared(plan.graph, program, kept),
        one_at_a_time,
    )


def _shared(graph: Graph, program: Program, kept: Sequence[int]) -> tuple[tuple[int, ...], frozenset[int]]:
    """`Emitted.exposed` and `Emitted.alone`. `kept`: the values that are saved."""
    delivered = [place for place, result in enumerate(graph.results) if result.kind != "gradient"]
    lies = [program.values[program.results[place]] if place in program.results else () for place in delivered]
    outputs = [one for one, place in zip(lies, delivered, strict=True) if graph.results[place].kind == "output"]
    sources = [program.values[value] for value in program.sources.values()]
    buffers = [program.values[program.sources[node.name]] for node in graph.nodes if node.op == "buffer"]
    seen = {buffer for one in (*outputs, *buffers) for buffer in one}
    exposed = tuple(place for place, value in enumerate(kept) if not seen.isdisjoint(program.values[value]))
    times = Counter(buffer for one in (*lies, *sources, *map(program.values.__getitem__, kept)) for buffer in set(one))
    return exposed, frozenset(place for place, one in enumerate(lies) if all(times[buffer] == 1 for buffer in one))


class _Emitter:
    """One phase. In backward, values of the forward are popped from the list `saved` when first needed."""

    def __init__(
        self, plan: Plan, program: Program, groups: Mapping[str, str], device: str, phase: Phase,
        saved_from: _Emitter | None, one_at_a_time: bool,
    ) -> None:  # fmt: skip
        self.plan, self.program = plan, program
        self.phase: Phase = phase
        self.graph = fx.Graph()
        self.writer = Writer(self.graph, plan.mesh, groups, device, one_at_a_time)
        self.values: dict[int, fx.Node] = {}
        self.ref_of: dict[int, Ref] = {}  # of values of the graph
        self.launched: dict[int, Launch] = {}
        self.saved_from = saved_from
        self.saved = None if saved_from is None else self.placeholder("saved")
        self.popped: list[int] = []
        self.seed_of: dict[str, int] = {}
        self.node_of = plan.graph.by_name
        self.used = {ref for node in plan.graph.nodes for ref in node.operands} | {
            r.ref for r in plan.graph.results if r.ref
        }

    def source(self, node: Node) -> None:
        self._bind_value(self.program.sources[node.name], Ref(node.name), self.placeholder(node.name))

    def placeholder(self, name: str) -> fx.Node:
        """A parameter of the function that is written, under the name that fx makes of `name`: what stands in the
        target is copied into the code as it is.
        """
        made = self.graph.placeholder(name)
        made.target = made.name
        return made

    def add_coordinates(self) -> None:
        self.writer.coordinates = {axis: self.placeholder(f"coordinate_{axis}") for axis in self.plan.mesh.groups}

    def add_seeds(self) -> tuple[Node, ...]:
        """Take a seed for every operator that draws, in either phase."""
        drawn = drawing(self.plan.graph) if self.plan.mesh.ranks > 1 else ()
        self.seed_of = {node.name: place for place, node in enumerate(drawn)}
        if drawn:
            self.seeds = self.placeholder("seeds")
        return drawn

    def add_sums(self) -> None:
        """Take the sums of gradients so far, where a step is several micro-batches."""
        gradients = [place for place, result in enumerate(self.plan.graph.results) if result.kind == "gradient"]
        self.at = {place: at for at, place in enumerate(gradients)}
        if added_up(self.plan):
            self.so_far = self.placeholder("so_far")

    def finish(self, name: str) -> fx.GraphModule:
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph, class_name=name)

    def run(self) -> None:
        self._write(self.program.instructions[self.phase], 0)

    def _write(self, instructions: Sequence[Instruction], turn: int) -> None:
        """`turn`: of the loop that these are the body of. Rounds are written one behind the other."""
        for instruction in instructions:
            match instruction:
                case Run(Operator(name), reads=reads, makes=makes):
                    self._node(self.node_of[name], [self.value(read) for read in reads], makes)
                case Run(Local(Work.ADD_UP, Send((place,)) as of), reads=(value, _)):
                    self.writer.comment = f"{self._comment(of)}, with those before"
                    self.writer.make("added", ops.add_up, (self.so_far, self.at[place], self.value(value)), {})
                case Run(Local() as what, reads=reads, makes=makes):
                    self.writer.comment = self._comment(what.of)
                    self._local(what, [self.value(read) for read in reads], makes)
                case Run(Inner() as what):
                    self._inner(what, instruction, turn)
                case Loop(rounds, body, carried):
                    for number in range(rounds):
                        self._write(body, number + 1)
                        for head, foot in carried:
                            self.values[head] = self.values[foot]
                case Launch():
                    self._launch(instruction)
                case Wait(number):
                    self._wait(self.launched.pop(number))
                case Alloc() | Free():
                    pass  # the code lets go of a value behind its last use
                case _:
                    raise ValueError(f"no code is written of {instruction}")

    def delivered(self) -> list[tuple[Result, Layout, fx.Node | None]]:
        """What this phase gives back, in the order of the graph's results."""
        found: list[tuple[Result, Layout, fx.Node | None]] = []
        for place, (result, delivery) in enumerate(zip(self.plan.graph.results, self.plan.deliveries, strict=True)):
            if (result.kind == "gradient") != (self.phase == "backward"):
                continue
            if result.ref is None or delivery is None:
                found.append((result, (), None))
            elif self.plan.graph.adds_up(result):
                found.append((result, delivery.layout, None))
            else:
                found.append((result, delivery.layout, self.value(self.program.results[place])))
        return found

    # --- transfers ---------------------------------------------------------------------------------------------------

    def _local(self, what: Local, values: list[fx.Node], makes: Sequence[int | None]) -> None:
        match what.work:
            case Work.FLATTEN:
                made = [self.writer.make("gradients", ops.flatten, (values,), {})]
            case Work.UNFLATTEN:
                assert isinstance(what.of, Send)
                sent = [self.plan.deliveries[place] for place in what.of.results]
                shapes = [delivery.changes[0].local.shape for delivery in sent if delivery is not None]
                parts = self.writer.make("gradients_apart", ops.unflatten, (values[0], shapes), {})
                made = [self.writer.get(parts, index) for index in range(len(shapes))]
            case _:
                axis = "" if what.change is None else what.change.axis
                made = [self.writer.local(what.work, values[0], what.dim, axis)]
        for value, one in zip(makes, made, strict=True):
            assert value is not None
            self.values[value] = one

    def _launch(self, launch: Launch) -> None:
        (read,), (made,), writer = launch.reads, launch.makes, self.writer
        value = self.value(read)
        writer.comment = self._comment(launch.of)
        self.launched[launch.number] = launch
        match launch.step, launch.of:
            case Comm() as step, Within():
                self.values[made] = writer.send(value, step)
            case Move(), Copy(name):
                fetches = launch.step.dst == DEVICE
                self._bind_value(made, Ref(name), (writer.fetch if fetches else writer.store)(value, name))
            case Move(), Send():
                self.values[made] = writer.store(value, self.program.values[made][0].owner)
            case _:
                assert launch.change is not None
                self.values[made] = writer.launch(value, launch.change, launch.in_place)

    def _wait(self, launch: Launch) -> None:
        (read,), (made,) = launch.reads, launch.makes
        self.writer.comment = self._comment(launch.of)
        if isinstance(launch.of, Within):
            self.values[made] = self.writer.sent(self.values[made])
        elif launch.change is None:
            self.writer.wait_copy(self.values[made], self.values[read])
        else:
            self.values[made] = self.writer.waited(self.values[made], launch.change)

    def _comment(self, of: Transfer | Update | Within) -> str:
        match of:
            case Within(name):
                return f"{self.plan.choices[name].body} of {name}"
            case Read(name, position):
                ref, layout = self.node_of[name].operands[position], self.plan.choices[name].takes[position]
                ahead = "" if self.plan.prefetch is None else f" for {name}"
                return f"{self._told(ref, self._given(ref))} -> {self._told(ref, layout)}{ahead}"
            case Copy(name):
                return self._told_node(self.node_of[name])
            case Send(places):
                results = [self.plan.graph.results[place] for place in places]
                if len(results) > 1:
                    return "gradients of " + ", ".join(result.target for result in results)
                delivery = self.plan.deliveries[places[0]]
                assert delivery is not None
                return self._told_result(results[0], delivery)
            case Update(parameter):
                return f"update of {parameter}"

    def _told_result(self, result: Result, delivery: Delivery) -> str:
        told = "" if result.ref is None else self._told(result.ref, delivery.layout)
        return f"{result.kind} {result.target}: {told}"

    def _inner(self, what: Inner, run: Run, turn: int) -> None:
        """One part of the loop that stands in for a node."""
        values = [self.value(read) for read in run.reads]
        node, choice = self.node_of[what.node], self.plan.choices[what.node]
        self.writer.comment = f"{self._told_node(node)}: {what.do.name}"
        body = BodyWriter(self.writer, choice.body_axes, choice.body_size, (), ())
        made = what.do.write(body, turn if what.turn is None else what.turn, *values)
        for value, result, one in zip(run.makes, what.results, made if what.do.also else (made,), strict=True):
            assert value is not None
            self.values[value] = one
            if result is not None:
                self.ref_of[value] = Ref(node.name, result)

    def value(self, value: int) -> fx.Node:
        """What a value is called in this phase; from the forward, it is popped off the saved list here, once."""
        if value not in self.values:
            before = self.saved_from
            assert before is not None and value in before.values, f"value {value} is not made before it is used"
            popped = self.graph.create_node(
                "call_method", "pop", (self.saved,), {}, name=f"{before.values[value].name}_saved"
            )
            ref = before.ref_of[value]
            popped.meta["comment"] = self._told(ref, self._given(ref))
            self.values[value] = popped
            self.popped.append(value)
        return self.values[value]

    def _bind_value(self, value: int, ref: Ref, made: fx.Node) -> None:
        self.values[value], self.ref_of[value] = made, ref

    def _given(self, ref: Ref) -> Layout:
        return self.plan.choices[ref.name].gives[ref.index]

    def _told(self, ref: Ref, layout: Layout) -> str:
        type = self.node_of[ref.name].outputs[ref.index]
        return "" if type is None else show(layout, self.plan.mesh, len(type.shape))

    def _node(self, node: Node, operands: list[fx.Node], makes: Sequence[int | None]) -> None:
        writer, choice = self.writer, self.plan.choices[node.name]
        writer.comment = self._told_node(node)
        if node.op == "autopar.share":
            (value,) = makes
            assert value is not None
            self._bind_value(value, Ref(node.name), operands[0])
            if Ref(node.name) not in self.used:  # it is there to be held until here
                writer.make(node.name, torch.ops.aten.alias.default, (operands[0],), {})
            return
        types = operand_types(node, self.node_of)
        local_in = tuple(local_type(t, layout, self.plan.mesh) for t, layout in zip(types, choice.takes, strict=True))
        local_out = tuple(
            None if t is None else local_type(t, layout, self.plan.mesh)
            for t, layout in zip(node.outputs, choice.gives, strict=True)
        )
        values = iter(operands)
        args = map_refs(localise(node, node.args, local_out, local_in), lambda _: next(values))
        kwargs = {key: map_refs(arg, lambda _: next(values)) for key, arg in node.kwargs}
        if choice.body:
            self._bind_body(node, choice, args, local_in, local_out, makes)
        else:
            target = target_of(node.op)
            if node.op in OPERANDS_OF_ATTENTION:
                device = writer.device
                args = (*args, kernel_at(device, node, local_in, capability_of(device), cudnn_first(device)))
            if node.name in self.seed_of:
                seed = writer.call(torch.ops.aten.select.int, self.seeds, 0, self.seed_of[node.name])
                target, args = seeded(target), (seed, *args)
            value = writer.make(node.name, target, args, kwargs)
            self._bind(node, makes, None if gives_list(target) else value, lambda index: writer.get(value, index))

    def _bind_body(
        self, node: Node, choice: Choice, args: Any, local_in: tuple[TensorType, ...],
        local_out: tuple[TensorType | None, ...], makes: Sequence[int | None],
    ) -> None:  # fmt: skip
        body = BodyWriter(self.writer, choice.body_axes, choice.body_size, local_in, local_out)
        made = BODIES[choice.body].emit(body, node, args)
        if len(node.outputs) == 1 and not isinstance(made, tuple):
            made = (made,)
        self._bind(node, makes, None, lambda index: made[index])

    def _bind(
        self, node: Node, makes: Sequence[int | None], single: fx.Node | None, pick: Callable[[int], fx.Node]
    ) -> None:
        """Name the results; of several, only those that somebody reads."""
        for index, value in enumerate(makes):
            ref = Ref(node.name, index)
            if value is None:
                continue
            if len(makes) == 1 and single is not None:
                self._bind_value(value, ref, single)
            elif ref in self.used:
                self._bind_value(value, ref, pick(index))

    def _told_node(self, node: Node) -> str:
        return "; ".join(filter(None, [node.module, node.source, self._layouts(node, self.plan.choices[node.name])]))

    def _layouts(self, node: Node, choice: Choice) -> str:
        roles = [f"{role}@{axis}" for role, axis in zip(choice.roles, self.plan.mesh.names, strict=True) if role]
        told = [
            self._told(Ref(node.name, i), layout)
            for i, layout in enumerate(choice.gives)
            if node.outputs[i] is not None
        ]
        return f"{','.join(roles) or 'whole'} -> {', '.join(told)}"
