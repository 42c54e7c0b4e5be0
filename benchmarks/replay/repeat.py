"""A plan of few layers becomes the plan of many: the layers of a transformer are equal, so one is copied.

The model is traced with three layers and planned; copies of the middle one are put behind it in the forward pass, and
in front of it in the backward pass. A copy reads from the copy before it what the last layer reads from the middle
one, and in backward from the copy behind it what the first layer reads from the middle one. `tests/benchmarks` compares
the result with a plan traced and planned at full length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from autopar.ir.graph import Graph, Node, Ref, Result, map_refs
from autopar.plan import Choice, Delivery, Plan
from benchmarks.replay.recompute import LAYER, layer_of

TRACED = 3  # layers that a plan must have: the first, one to copy, the last
FIRST, MIDDLE, LAST = range(TRACED)
Part = tuple[str, int | None]  # which part of the program, of which layer


def repeated(plan: Plan, layers: int) -> Plan:
    """The plan of the same model with so many layers. Raises ValueError where the three layers are not equal."""
    if layers < TRACED:
        raise ValueError(f"{layers} layers; a plan of {TRACED} can only grow")
    return _Repeating(plan, layers - TRACED).plan()


class _Repeating:
    def __init__(self, plan: Plan, copies: int) -> None:
        self.old, self.copies = plan, copies
        self.node_of = plan.graph.by_name
        self.constant = self._constants()
        self.parts: dict[Part, list[Node]] = defaultdict(list)
        self.at: dict[str, tuple[Part, int]] = {}  # node -> its part, and its place there
        for node in plan.graph.nodes:
            part = self._kind(node), self._layer(node)
            self.at[node.name] = part, len(self.parts[part])
            self.parts[part].append(node)
        for kind in dict.fromkeys(kind for kind, _ in self.parts):
            ops = [[node.op for node in self.parts[kind, layer]] for layer in range(TRACED)]
            # But for what stands at the very end: a result that only one operator reads is not shared (the last layer's
            # in forward, the first one's in backward), and what else reads the first one's gradient follows it.
            common = len(ops[MIDDLE]) - 1
            if any(ops[layer][:common] != ops[MIDDLE][:common] for layer in (FIRST, LAST)):
                raise ValueError(f"the {kind} operators of the {TRACED} layers differ; no layer can be copied")
        self.choices: dict[str, Choice] = {}

    def _kind(self, node: Node) -> str:
        """Parts of a layer that stand together: its parameters, and in each phase their casts and its operators."""
        if node.is_source:
            return "source"
        is_cast = len(node.operands) == 1 and self.node_of[node.operands[0].name].op == "parameter"
        return f"{node.phase} cast" if is_cast else node.phase

    def _constants(self) -> set[str]:
        """Names of what is made of constants alone, such as the tables of the rotary embedding: of no layer."""
        found: set[str] = set()
        for node in self.old.graph.nodes:
            is_source = node.op in ("buffer", "constant")
            if is_source or (not node.is_source and all(ref.name in found for ref in node.operands)):
                found.add(node.name)
        return found

    def _layer(self, node: Node) -> int | None:
        """The layer of a node; what is made of one parameter, such as its cast, is of the parameter's."""
        if node.name in self.constant:
            return None
        end = node
        while not end.module and len(end.operands) == 1:
            end = self.node_of[end.operands[0].name]
        return layer_of(end if end.op == "parameter" else node)

    def plan(self) -> Plan:
        nodes: list[Node] = []
        for node, copy in self._order():
            made = self._copied(node, copy)
            nodes.append(made)
            self.choices[made.name] = self.old.choices[node.name]
        results: list[Result] = []
        deliveries: list[Delivery | None] = []
        for result, delivery in zip(self.old.graph.results, self.old.deliveries, strict=True):
            for copy in self._copies_of(result):
                ref = None if result.ref is None else self._named(result.ref, copy)
                results.append(
                    replace(result, target=_numbered(result.target, self._number(result.target, copy)), ref=ref)
                )
                deliveries.append(delivery)
        graph = Graph(tuple(nodes), tuple(results))
        return replace(self.old, graph=graph, choices=self.choices, deliveries=tuple(deliveries), notes=(), search={})

    def _order(self) -> Iterable[tuple[Node, int]]:
        """Every node with the number of its copy, in the order of the new program; 0 is the node itself.

        A part begins where its first node stands and is copied as a whole; what stands between its nodes (values made
        of constants, say) comes before or after.
        """
        for node in self.old.graph.nodes:
            part, place = self.at[node.name]
            kind, layer = part
            if layer != MIDDLE:
                yield node, 0
            elif place == 0:
                # Forward: the middle one, then its copies; backward: the last copy first.
                order = range(self.copies + 1)
                if kind.startswith("backward"):
                    order = reversed(order)
                for copy in order:
                    yield from ((other, copy) for other in self.parts[part])

    def _copied(self, node: Node, copy: int) -> Node:
        (_, layer), _ = self.at[node.name]

        def now(ref: Ref) -> Ref:
            return self._read(node, ref, layer, copy)

        kwargs = tuple((key, map_refs(arg, now)) for key, arg in node.kwargs)
        number = self._number(node.target or node.module, copy)
        return replace(
            node, name=self._name(node.name, copy), args=map_refs(node.args, now), kwargs=kwargs,
            target=_numbered(node.target, number) if node.op == "parameter" else node.target,
            module=_numbered(node.module, number),
        )  # fmt: skip

    def _read(self, node: Node, ref: Ref, layer: int | None, copy: int) -> Ref:
        """What a node reads in the new program: from below come activations, from above their gradients."""
        (_, other), _ = self.at[ref.name]
        if layer == MIDDLE and other == FIRST and copy > 0:
            return self._named(self._twin(node, ref, LAST), copy - 1)
        if layer == MIDDLE and other == LAST and copy < self.copies:
            return self._named(self._twin(node, ref, FIRST), copy + 1)
        if layer == LAST and other == MIDDLE:
            return self._named(ref, self.copies)
        return self._named(ref, copy)

    def _twin(self, node: Node, ref: Ref, layer: int) -> Ref:
        """What the node that plays the same part in another layer reads in the place of `ref`."""
        (kind, _), place = self.at[node.name]
        return self.parts[kind, layer][place].operands[node.operands.index(ref)]

    def _named(self, ref: Ref, copy: int) -> Ref:
        (_, layer), _ = self.at[ref.name]
        return Ref(self._name(ref.name, copy), ref.index) if layer == MIDDLE else ref

    def _name(self, name: str, copy: int) -> str:
        return f"{name}_copy{copy}" if copy and self.at[name][0][1] == MIDDLE else name

    def _copies_of(self, result: Result) -> range:
        found = LAYER.search(result.target)
        return range(self.copies + 1) if found is not None and int(found[1]) == MIDDLE else range(1)

    def _number(self, path: str, copy: int) -> int:
        """The number of the layer in the new model."""
        found = LAYER.search(path)
        layer = MIDDLE if found is None else int(found[1])
        return layer + (self.copies if layer == LAST else copy)


def _numbered(path: str, number: int) -> str:
    found = LAYER.search(path)
    return path if found is None else f"{path[: found.start(1)]}{number}{path[found.end(1) :]}"
