"""emit: a plan becomes two fx GraphModules at local shapes, forward and backward, with the collectives in them.

The forward takes the local parameters, buffers, constants, inputs, this rank's coordinates and, where numbers are
drawn, seeds; it returns results, then the values that backward needs. Backward takes those as one list and pops each
right before its first use, so that nothing outlives its last reader. One program serves all ranks: where ranks differ,
a coordinate or a seed comes in as a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.attention import OPERANDS_OF_ATTENTION, kernel_at
from autopar.emit import ops
from autopar.emit.attention import capability_of
from autopar.emit.seeded import drawing, seeded
from autopar.emit.writer import BodyWriter, Pending, Writer, target_of
from autopar.graph import Graph, Node, Phase, Ref, Result, TensorType, map_refs
from autopar.layout import Layout, local_type, show
from autopar.liveness import holds_storage
from autopar.plan import Choice, Delivery, Plan
from autopar.reshard import Reshard
from autopar.rules.bodies import BODIES
from autopar.rules.local import localise
from autopar.schedule import Advance, Copy, Read, Run, Send, Transfer, changes_of, leaves, schedule
from autopar.strategy import operand_types
from autopar.work import STORE

INPUT_KINDS = ("parameter", "buffer", "constant", "input")


@dataclass(frozen=True)
class Program:
    """What runs on every rank.

    `inputs`: the sources that the forward takes, in order (nodes of the graph); after them one coordinate per axis, and
    the seeds (`autopar.emit.seeded.seeds`) of the operators in `drawing`, each with the layout of what it draws. A
    program for one rank has none of these: there operators draw from the default generator, as the model does.
    `results`: (result, layout) of what the forward returns, in order, before the saved values. `tangents`, `gradients`:
    likewise for the backward, which is None for inference.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    inputs: tuple[Node, ...]
    results: tuple[tuple[Result, Layout], ...]
    tangents: tuple[Node, ...]
    gradients: tuple[tuple[Result, Layout], ...]
    drawing: tuple[tuple[Node, Layout], ...] = ()

    def compiled(self) -> Program:
        """The same program with both parts compiled by inductor at their first call."""
        return replace(
            self,
            forward=torch.compile(self.forward, backend="inductor"),
            backward=None if self.backward is None else torch.compile(self.backward, backend="inductor"),
        )

    @property
    def code(self) -> str:
        """Both parts as text, each line with the module it came from and the layout it gives."""
        parts = [_commented(self.forward)]
        if self.backward is not None:
            parts.append(_commented(self.backward).replace("def forward(", "def backward(", 1))
        return "\n".join(parts)


def emit(plan: Plan, groups: Mapping[str, str], device: str = "cpu", *, one_at_a_time: bool = False) -> Program:
    """Write the program of `plan`. `groups`: mesh axis -> name of this rank's process group on it.

    `one_at_a_time`: every collective is waited for as soon as it is launched, in the order in which the plan launches
    them. gloo needs that: several of its collectives in flight corrupt memory (docs/design/0018).
    """
    forward = _Emitter(plan, groups, device, "forward", None, one_at_a_time)
    sources = tuple(n for kind in INPUT_KINDS for n in plan.graph.nodes if n.op == kind)
    for node in sources:
        forward.values[Ref(node.name)] = forward.placeholder(node.name)
    forward.add_coordinates()
    drawn = forward.add_seeds()
    forward.run()
    backward, saved = None, []
    tangents = tuple(n for n in plan.graph.nodes if n.op == "tangent")
    if any(result.kind == "gradient" for result in plan.graph.results):
        backward = _Emitter(plan, groups, device, "backward", forward.values, one_at_a_time)
        for node in tangents:
            backward.values[Ref(node.name)] = backward.placeholder(node.name)
        backward.add_coordinates()
        backward.add_seeds()
        backward.run()
        saved = [forward.values[ref] for ref in reversed(backward.popped)]
    results = forward.delivered
    forward.graph.output(tuple([*(value for _, _, value in results), *saved]))
    if backward is not None:
        backward.graph.output(tuple(value for _, _, value in backward.delivered))
    return Program(
        forward.finish("Forward"),
        None if backward is None else backward.finish("Backward"),
        sources,
        tuple((result, layout) for result, layout, _ in results),
        tangents,
        () if backward is None else tuple((result, layout) for result, layout, _ in backward.delivered),
        tuple((node, plan.choices[node.name].gives[0]) for node in drawn),
    )


class _Emitter:
    """One phase. In backward, values of the forward are popped from the list `saved` when first needed."""

    def __init__(
        self,
        plan: Plan,
        groups: Mapping[str, str],
        device: str,
        phase: Phase,
        saved_from: Mapping[Ref, fx.Node] | None,
        one_at_a_time: bool,
    ) -> None:
        self.plan = plan
        self.phase: Phase = phase
        self.graph = fx.Graph()
        self.writer = Writer(self.graph, plan.mesh, groups, device, one_at_a_time)
        self.values: dict[Ref, fx.Node] = {}
        self.saved_from = saved_from
        self.saved = None if saved_from is None else self.placeholder("saved")
        self.popped: list[Ref] = []
        self.delivered: list[tuple[Result, Layout, fx.Node | None]] = []
        self.seed_of: dict[str, int] = {}
        self.under_way: dict[Transfer, Pending] = {}
        self.copies: dict[Transfer, list[tuple[Result | Ref, Layout, fx.Node, fx.Node]]] = {}  # what is made, from what
        self.node_of = plan.graph.by_name
        self.used = {ref for node in plan.graph.nodes for ref in node.operands} | {
            r.ref for r in plan.graph.results if r.ref
        }

    def placeholder(self, name: str) -> fx.Node:
        """A parameter of the function that is written, under the name that fx makes of `name`: what stands in the
        target is copied into the code as it is.
        """
        made = self.graph.placeholder(name)
        made.target = made.name
        return made

    def add_coordinates(self) -> None:
        self.writer.coordinates = {axis: self.placeholder(f"coordinate_{axis}") for axis in self.plan.mesh.names}

    def add_seeds(self) -> tuple[Node, ...]:
        """Take a seed for every operator that draws, in either phase."""
        drawn = drawing(self.plan.graph) if self.plan.mesh.ranks > 1 else ()
        self.seed_of = {node.name: place for place, node in enumerate(drawn)}
        if drawn:
            self.seeds = self.placeholder("seeds")
        return drawn

    def finish(self, name: str) -> fx.GraphModule:
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph, class_name=name)

    def run(self) -> None:
        for result, delivery in zip(self.plan.graph.results, self.plan.deliveries, strict=True):
            is_here = (result.kind == "gradient") == (self.phase == "backward")
            if is_here and (result.ref is None or delivery is None):
                self.delivered.append((result, (), None))
        for action in schedule(self.plan, self.phase, self.plan.prefetch):
            match action:
                case Run(name):
                    if not (node := self.node_of[name]).is_source:
                        self._node(node, self.plan.choices[name])
                case Advance(Read() as read):
                    self._bring(read)
                case Advance(Send() as send):
                    self._send(send)
                case Advance(Copy(name)):
                    self._copy(self.node_of[name])
        order = {result: place for place, result in enumerate(self.plan.graph.results)}
        self.delivered.sort(key=lambda item: order[item[0]])
        self._take_apart()

    def _bring(self, read: Read) -> None:
        """Take the layout change of an operand further; the reader finds it under way, at its end."""
        reader = self.node_of[read.reader]
        ref, layout = reader.operands[read.position], self.plan.choices[read.reader].takes[read.position]
        ahead = "" if self.plan.prefetch is None else f" for {reader.name}"
        self.writer.comment = f"{self._told(ref, self._given(ref))} -> {self._told(ref, layout)}{ahead}"
        if read in self.under_way:
            self.under_way[read] = self.writer.advance(self.under_way[read])
        else:
            self.under_way[read] = self.writer.begin(self.value(ref), changes_of(self.plan, read))

    def _send(self, send: Send) -> None:
        """Take results on their way further, and hand over those that have arrived."""
        pairs = [(self.plan.graph.results[place], self.plan.deliveries[place]) for place in send.results]
        sent = [(result, delivery) for result, delivery in pairs if result.ref is not None and delivery is not None]
        (first, _), *others = sent
        if others:
            self.writer.comment = "gradients of " + ", ".join(result.target for result, _ in sent)
        else:
            self.writer.comment = self._told_result(*sent[0])
        if send in self.copies:
            self.delivered += self._arrived(send)
            return
        if send in self.under_way:
            pending = self.writer.advance(self.under_way[send])
        elif others:
            pending = self._begin_row(sent)
        else:
            assert first.ref is not None
            pending = self.writer.begin(self.value(first.ref), changes_of(self.plan, send))
        self.under_way[send] = pending
        if pending.change is not None:
            return
        values = [pending.value]
        if others:
            shapes = [delivery.changes[0].local.shape for _, delivery in sent]
            parts = self.writer.make("gradients_apart", ops.unflatten, (pending.value, shapes), {})
            values = [self.writer.get(parts, index) for index in range(len(sent))]
        brought = [(result, delivery.layout, value) for (result, delivery), value in zip(sent, values, strict=True)]
        if not leaves(self.plan, send.results[0]):
            self.delivered += brought
            return
        self.copies[send] = [
            (result, layout, self.writer.store(value, f"gradient of {result.target}"), value)
            for result, layout, value in brought
        ]

    def _copy(self, node: Node) -> None:
        """Launch the copy of a store or a fetch, or wait for it."""
        choice, copy = self.plan.choices[node.name], Copy(node.name)
        self.writer.comment = "; ".join(filter(None, [node.module, node.source, self._layouts(node, choice)]))
        if copy in self.copies:
            for _, _, made in self._arrived(copy):
                self.values[Ref(node.name)] = made
            return
        brought = self.under_way.pop(Read(node.name, 0), None)
        value = self.value(node.operands[0]) if brought is None else brought.value
        launch = self.writer.store if node.op == STORE else self.writer.fetch
        self.copies[copy] = [(Ref(node.name), choice.gives[0], launch(value, node.name), value)]

    def _arrived(self, transfer: Transfer) -> list[tuple[Any, Layout, fx.Node]]:
        """Wait for the copies of a transfer."""
        found: list[tuple[Any, Layout, fx.Node]] = []
        for what, layout, made, source in self.copies.pop(transfer):
            self.writer.wait_copy(made, source)
            found.append((what, layout, made))
        return found

    def _begin_row(self, sent: list[tuple[Result, Delivery]]) -> Pending:
        """Put gradients in one row, and launch its sum."""
        values = [self.value(result.ref) for result, _ in sent if result.ref is not None]
        row = self.writer.make("gradients", ops.flatten, (values,), {})
        changes = sent[0][1].changes
        flat = [replace(change, local=TensorType((0,), change.local.dtype)) for change in changes]
        return self.writer.begin(row, flat, owned=True)

    def _take_apart(self) -> None:
        """Whoever is given a gradient may write to it: copy those that look at what somebody else has."""
        delivery_of = dict(zip(self.plan.graph.results, self.plan.deliveries, strict=True))
        taken: set[Ref] = set()
        for place, (result, layout, value) in enumerate(self.delivered):
            delivery = delivery_of[result]
            if result.kind != "gradient" or result.ref is None or value is None or delivery is None:
                continue
            if any(self._moves(change) for change in delivery.changes):
                continue
            below = self._below(result.ref)
            if below in taken or self.node_of[below.name].phase != self.phase or self.node_of[below.name].is_source:
                self.writer.comment = f"{self._told_result(result, delivery)}, a copy of its own"
                copy = self.writer.named(value, "copy", torch.ops.aten.clone.default, value)
                self.delivered[place] = (result, layout, copy)
            taken.add(below)

    def _below(self, ref: Ref) -> Ref:
        """The value whose storage this one looks at."""
        node = self.node_of[ref.name]
        while not holds_storage(node.op) and not any(map(self._moves, self.plan.choices[node.name].reads[0])):
            ref = node.operands[0]
            node = self.node_of[ref.name]
        return ref

    def _moves(self, change: Reshard) -> bool:
        """Whether a layout change makes a new tensor."""
        return self.plan.mesh.size(change.axis) > 1

    def _told_result(self, result: Result, delivery: Delivery) -> str:
        told = "" if result.ref is None else self._told(result.ref, delivery.layout)
        return f"{result.kind} {result.target}: {told}"

    def value(self, ref: Ref) -> fx.Node:
        """The value in its producer's layout; from the forward, it is popped off the saved list here, once."""
        if ref not in self.values:
            assert self.saved_from is not None and ref in self.saved_from, f"{ref} is not made before it is used"
            name = f"{self.saved_from[ref].name}_saved"
            popped = self.graph.create_node("call_method", "pop", (self.saved,), {}, name=name)
            popped.meta["comment"] = self._told(ref, self._given(ref))
            self.values[ref] = popped
            self.popped.append(ref)
        return self.values[ref]

    def _given(self, ref: Ref) -> Layout:
        return self.plan.choices[ref.name].gives[ref.index]

    def _told(self, ref: Ref, layout: Layout) -> str:
        type = self.node_of[ref.name].outputs[ref.index]
        return "" if type is None else show(layout, self.plan.mesh, len(type.shape))

    def _node(self, node: Node, choice: Choice) -> None:
        writer = self.writer
        moved: dict[tuple[Ref, Layout], fx.Node] = {}
        operands: list[fx.Node] = []
        for position, (ref, layout) in enumerate(zip(node.operands, choice.takes, strict=True)):
            if (ref, layout) not in moved:
                brought = self.under_way.pop(Read(node.name, position), None)
                moved[ref, layout] = self.value(ref) if brought is None else brought.value
            operands.append(moved[ref, layout])
        writer.comment = "; ".join(filter(None, [node.module, node.source, self._layouts(node, choice)]))
        if node.op == "autopar.share":
            self.values[Ref(node.name)] = operands[0]
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
            self._bind_body(node, choice, args, kwargs, local_in, local_out)
        else:
            target = target_of(node.op)
            if node.op in OPERANDS_OF_ATTENTION:
                device = writer.device
                args = (*args, kernel_at(device, node, local_in, capability_of(device)))
            if node.name in self.seed_of:
                seed = writer.call(torch.ops.aten.select.int, self.seeds, 0, self.seed_of[node.name])
                target, args = seeded(target), (seed, *args)
            value = writer.make(node.name, target, args, kwargs)
            self._bind(node, value, lambda index: writer.get(value, index))

    def _bind_body(
        self, node: Node, choice: Choice, args: Any, kwargs: dict[str, Any],
        local_in: tuple[TensorType, ...], local_out: tuple[TensorType | None, ...],
    ) -> None:  # fmt: skip
        body = BodyWriter(self.writer, choice.body_axes, choice.body_size, local_in, local_out)
        made = BODIES[choice.body].emit(body, node, args)
        if len(node.outputs) == 1 and not isinstance(made, tuple):
            made = (made,)
        self._bind(node, None, lambda index: made[index])

    def _bind(self, node: Node, single: fx.Node | None, pick: Callable[[int], fx.Node]) -> None:
        """Name the results; of several, only those that somebody reads."""
        if len(node.outputs) == 1 and single is not None:
            self.values[Ref(node.name)] = single
            return
        for index in range(len(node.outputs)):
            if (ref := Ref(node.name, index)) in self.used:
                self.values[ref] = pick(index)

    def _layouts(self, node: Node, choice: Choice) -> str:
        roles = [f"{role}@{axis}" for role, axis in zip(choice.roles, self.plan.mesh.names, strict=True) if role]
        told = [
            self._told(Ref(node.name, i), layout)
            for i, layout in enumerate(choice.gives)
            if node.outputs[i] is not None
        ]
        return f"{','.join(roles) or 'whole'} -> {', '.join(told)}"


def _commented(module: fx.GraphModule) -> str:
    comment_of = {node.name: node.meta.get("comment", "") for node in module.graph.nodes}
    lines: list[str] = []
    for line in module.code.strip().splitlines():
        made = re.match(r"    (\w+) = ", line)
        comment = comment_of.get(made.group(1), "") if made else ""
        lines.append(f"{line.split(';  ')[0]}  # {comment}" if comment else line)
    return "\n".join(lines) + "\n"


def forward_only(graph: Graph) -> Graph:
    """The graph of inference: what the outputs and the mutated buffers need, without gradients."""
    results = tuple(result for result in graph.results if result.kind != "gradient")
    needed = {result.ref.name for result in results if result.ref is not None}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in needed or node.op in ("parameter", "buffer", "input"):
            kept.append(node)
            needed.update(ref.name for ref in node.operands)
    return Graph(tuple(reversed(kept)), results)
