"""round_of: the graph of one micro-batch, of the graph of a step and the way in which each node is cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.ir.graph import Graph, Node, Ref, Result, TensorType, map_node
from autopar.ir.layout import REPLICATE, Layout, Partial, Placement, Shard, local_type
from autopar.ir.mesh import Mesh
from autopar.ir.rounds import LAST, SUM, Rounds
from autopar.propose.strategies import Strategy, operand_types
from autopar.rewrite.rows import ROWS, counted_rows
from autopar.rules.local import localise

OFFSET = "+offset"  # the role of what adds a number to a sum over rounds
BESIDE = "_of_all"  # what a node is called that is made for the whole batch beside one for its part
SHARE, RESHAPE = "share", "reshape"  # bodies that are an operator, or two, of the graph
WHOLE: Layout = (REPLICATE,)
TERM: Layout = (Partial("sum"),)


def round_of(graph: Graph, mesh: Mesh, picked: Mapping[str, Strategy]) -> Graph:
    """`mesh`: of one axis, the rounds; `picked`: node -> how it is cut along it."""
    return _Round(graph, mesh, picked).written()


class _Round:
    def __init__(self, graph: Graph, mesh: Mesh, picked: Mapping[str, Strategy]) -> None:
        self.graph, self.mesh, self.picked = graph, mesh, picked
        self.count, self.node_of = mesh.ranks, graph.by_name

    def written(self) -> Graph:
        needed = self._needed_whole()
        sources: list[Node] = []
        nodes: list[Node] = []
        cut: dict[str, int] = {}
        for node in self.graph.nodes:
            way, among = self.picked[node.name], sources if node.is_source and node.op != "tangent" else nodes
            outputs = tuple(
                None if type is None else local_type(type, gives, self.mesh)
                for type, gives in zip(node.outputs, way.gives, strict=True)
            )
            if node.op == "input" and isinstance(place := way.gives[0][0], Shard):
                cut[node.name] = place.dim
            among += [replace(node, outputs=outputs)] if node.is_source else self._local(node, way, outputs)
            if node.name in needed:
                among.append(_with(node, node.name + BESIDE, self._beside))
        results = tuple(self._result(result, nodes) for result in self.graph.results)
        joined = tuple(_joined(r, r.ref and self.picked[r.ref.name].gives[r.ref.index]) for r in self.graph.results)
        return Graph((*sources, *nodes), results, Rounds(self.count, cut, joined))

    def _result(self, result: Result, nodes: list[Node]) -> Result:
        """Of a gradient that is alike in all rounds, each gives its share."""
        ref = result.ref
        if result.kind != "gradient" or ref is None or self.picked[ref.name].gives[ref.index] != WHOLE:
            return result
        target = re.sub(r"\W+", "_", result.target).strip("_")
        share = self._share(ref, f"{ref.name}_{target}_share", self.node_of[ref.name])
        nodes.append(replace(share, phase="backward", target=""))
        return replace(result, ref=Ref(nodes[-1].name))

    def _is_cut(self, ref: Ref) -> bool:
        return self.picked[ref.name].gives[ref.index] != WHOLE

    def _beside(self, ref: Ref) -> Ref:
        """The whole value, whatever is picked."""
        return Ref(ref.name + BESIDE, ref.index) if self._is_cut(ref) else ref

    def _needed_whole(self) -> set[str]:
        """Nodes that are made whole beside what is picked."""
        needed: set[str] = set()
        for node in reversed(self.graph.nodes):
            takes = self.picked[node.name].takes
            for ref, take in zip(node.operands, takes, strict=True):
                if self._is_cut(ref) and (take == WHOLE or node.name in needed):
                    needed.add(ref.name)
        return needed

    def _local(self, node: Node, way: Strategy, outputs: Sequence[TensorType | None]) -> list[Node]:
        taken, shares = iter(way.takes), dict[Ref, Node]()

        def seen(ref: Ref) -> Ref:
            take, give = next(taken), self.picked[ref.name].gives[ref.index]
            if (give, take) == (WHOLE, TERM):
                shares[ref] = self._share(ref, f"{node.name}_share{len(shares)}", node)
                return Ref(shares[ref].name)
            return self._beside(ref) if take == WHOLE else ref

        types = [
            local_type(type, take, self.mesh)
            for type, take in zip(operand_types(node, self.node_of), way.takes, strict=True)
        ]
        sized = replace(node, args=localise(node, node.args, outputs, types), outputs=tuple(outputs))
        made = _with(sized, node.name, seen)
        if way.body == SHARE:  # of a mean the round has its share
            part = replace(made, name=f"{node.name}_part")
            return [*shares.values(), part, replace(self._share(Ref(part.name), node.name, node), outputs=made.outputs)]
        if way.body == RESHAPE:
            (type,) = outputs
            assert type is not None
            return [replace(made, op="aten.reshape.default", args=(made.args[0], type.shape), kwargs=())]
        if way.roles[0] == ROWS:
            return [*shares.values(), *counted_rows(made, types[0].shape[0], self.graph)]
        if way.roles[0] == OFFSET:
            made = replace(made, args=(made.args[0], made.args[1] / self.count, *made.args[2:]))
        return [*shares.values(), made]

    def _share(self, ref: Ref, name: str, of: Node) -> Node:
        """What a round has of what is alike in all of them."""
        type = self.graph.type_of(ref) if ref.name in self.node_of else None
        return replace(of, name=name, op="aten.div.Tensor", args=(ref, self.count), kwargs=(), outputs=(type,))


def _with(node: Node, name: str, change: Callable[[Ref], Ref]) -> Node:
    return replace(map_node(node, change), name=name)


def _joined(result: Result, layout: Layout | None) -> str | int:
    """How rounds are put together of a result that has this layout in time; gradients that are whole give shares."""
    if result.kind == "gradient" and (layout is None or layout == WHOLE):
        return SUM
    place: Placement = REPLICATE if layout is None else layout[0]
    match place:
        case Shard(dim):
            return dim
        case Partial():
            return SUM
        case _:
            return LAST
