"""How the values of a plan lie in the memory of one rank, and so what is copied without a word in the graph.

A layout change leaves what it makes contiguous; else an operator finds its operand as the one before has left it.
"""

from __future__ import annotations

from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.layout import Layout, local_type
from autopar.ir.strides import Placed, Shape, Strides, contiguous
from autopar.plan.plan import Plan
from autopar.plan.value import Choice, Decision
from autopar.propose.strategies import operand_types
from autopar.rules.lie import copied, lie
from autopar.rules.patterns import is_pattern, offered


class Placing:
    """Found out for what is asked for, and for what that looks at."""

    def __init__(self, plan: Decision | Plan) -> None:
        self.plan, self.mesh = plan, plan.mesh
        self.graph: Graph = plan.graph
        self.node_of = plan.graph.by_name
        self._given: dict[Ref, Placed] = {}

    def copied(self, name: str) -> tuple[int, ...]:
        """The places of the operands that the node copies to read them."""
        node = self.node_of[name]
        if node.op != "autopar.einsum" or is_pattern(self.plan.choices[name].body):
            return ()
        return tuple(copied(node, [self.read(name, place) for place in range(len(node.operands))]))

    def read(self, name: str, place: int) -> Placed:
        """An operand, as the node finds it."""
        ref = self.node_of[name].operands[place]
        if self._is_changed(name, place):
            shape = self._shape(ref, self.plan.choices[name].takes[place])
            return shape, contiguous(shape)
        return self.given(ref)

    def given(self, ref: Ref) -> Placed:
        """A value, as it is made."""
        if ref not in self._given:
            self._find(ref)
        return self._given[ref]

    def _find(self, wanted: Ref) -> None:
        """Below it first, without recursion: models are deep."""
        stack = [wanted.name]
        while stack:
            node = self.node_of[stack[-1]]
            below = [
                ref.name
                for place, ref in enumerate(node.operands)
                if ref not in self._given and not self._is_changed(node.name, place)
            ]
            if below:
                stack += below
                continue
            stack.pop()
            choice = self.plan.choices[node.name]
            shapes = [
                None if type is None else self._shape(Ref(node.name, index), layout)
                for index, (type, layout) in enumerate(zip(node.outputs, choice.gives, strict=True))
            ]
            found = self._strides(node, choice, [self.read(node.name, at) for at in range(len(node.operands))], shapes)
            for index, (shape, strides) in enumerate(zip(shapes, found, strict=True)):
                if shape is not None:
                    self._given[Ref(node.name, index)] = shape, strides

    def _strides(
        self, node: Node, choice: Choice, operands: list[Placed], shapes: list[Shape | None]
    ) -> tuple[Strides, ...]:
        if not choice.body:
            return lie(node, operands, shapes)
        if not is_pattern(choice.body):
            return tuple(() if shape is None else contiguous(shape) for shape in shapes)
        offer = offered(node, operand_types(node, self.node_of), self.mesh, choice.body, choice.roles)
        assert offer is not None, f"%{node.name} has no {choice.body} {choice.roles}"
        given = iter(offer.loop.lies(operands))
        return tuple(() if shape is None else next(given) for shape in shapes)

    def _is_changed(self, name: str, place: int) -> bool:
        return any(self.mesh.size(change.axis) > 1 for change in self.plan.choices[name].reads[place])

    def _shape(self, ref: Ref, layout: Layout) -> tuple[int, ...]:
        return local_type(self.graph.type_of(ref), layout, self.mesh).shape
