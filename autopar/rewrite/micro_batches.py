"""in_rounds: the graph of one micro-batch, of the graph of a whole step.

Rounds of a step are an axis of the mesh that lies in time, and the rules that split operators over devices say what a
round may do: a value that is split along the axis is made for its own part of the batch, one that is whole is made
alike in every round, and one that is a partial sum is added up over the rounds, as gradients are. Nothing can travel
along this axis while a round runs, so that only layouts that meet without a layout change are of use; where none do,
the model makes something of the whole batch, such as its statistics, and its step cannot be cut.

Which nodes are split is a small integer program: as much as possible. What is made of inputs alone may be read in both
ways, as by a loss that divides by the number of all labels: it is then made twice, for the part and for the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.errors import NotCut
from autopar.ir.graph import Graph, Node, Ref, TensorType, batch_size
from autopar.ir.layout import Layout, Partial, Shard, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.unused import without_idle_draws
from autopar.ir.work import draws
from autopar.propose.strategies import Signature, Strategy, node_strategies, operand_types, signature_of
from autopar.rewrite.of_labels import counted
from autopar.rewrite.one_loss import why_not_cut
from autopar.rewrite.one_round import OFFSET, RESHAPE, SHARE, TERM, WHOLE, round_of
from autopar.rewrite.rows import INDICES_AT, PUTS, by_rows, by_terms
from autopar.rules.table import rule_of
from solver import Edge, Problem, solve

Array = NDArray[np.float64]
TIME = "time"
OFFSETS = ("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar", "aten.rsub.Scalar")
MOST_WHOLE = 0.1  # of what is cut, what may be made whole in every round
OTHER_DIM = 1.01  # times the cost: of two ways to cut an input, the one along the leading dim


def in_rounds(graph: Graph, count: int) -> Graph:
    """One round of `graph`, a training step, in `count` micro-batches. Raises NotCut, which names the operator that
    needs the whole batch, or the size that `count` does not divide.
    """
    if count == 1:
        return graph
    if graph.rounds.count != 1:
        raise ValueError(f"the graph is one of {graph.rounds.count} rounds already")
    if (why := why_not_cut(graph, count)) is not None:
        raise NotCut(why)
    return _Cut(counted(without_idle_draws(graph)), count).found()


class _Cut:
    def __init__(self, graph: Graph, count: int) -> None:
        self.graph, self.count = graph, count
        self.mesh = Mesh((TIME,), (count,))
        self.node_of = graph.by_name
        self.ways: dict[str, tuple[Strategy, ...]] = {}
        known: dict[Signature, tuple[Strategy, ...]] = {}
        for node in graph.nodes:
            types = operand_types(node, self.node_of)
            key = signature_of(node, types)
            if node.is_source:
                self.ways[node.name] = tuple(map(_source, self._layouts(node)))
                continue
            if key not in known or node.op in (*INDICES_AT, *PUTS):  # what an index is made of is in no signature
                known[key] = self._ways(node, types)
            self.ways[node.name] = known[key]
        self.place = {node.name: place for place, node in enumerate(graph.nodes)}
        self.of_inputs = _of_inputs(graph)

    def found(self) -> Graph:
        picked = self._picked()
        if self._is_idle(picked):
            raise self._refusal()
        return round_of(self.graph, self.mesh, picked)

    # --- what may be chosen ------------------------------------------------------------------------------------------

    def _ways(self, node: Node, types: tuple[TensorType, ...]) -> tuple[Strategy, ...]:
        """Of the strategies of a node those with no communication, and no arithmetic of their own that needs to know
        which round it is.
        """
        found = list(node_strategies(node, types, rule_of(node, types), self.mesh))
        rows = by_rows(node, self.graph)
        of_indices = [*([] if rows is None else [rows]), *by_terms(node, self.graph)]
        found += [one for one in of_indices if self._is_even(one, types)]
        if node.op == "aten.scalar_tensor.default" and node.args[0] == 0:  # zeros are terms of zero, too
            found.append(replace(found[0], gives=(TERM,)))
        if node.op in OFFSETS and isinstance(node.args[1], (int, float)):  # of a number each round adds its share
            found.append(replace(found[0], roles=(OFFSET,), takes=(TERM,), gives=(TERM,)))
        return tuple(
            one
            for one in found
            if one.body in ("", SHARE, RESHAPE)
            and not (draws(node) and self._is_whole(one))  # each round would draw other numbers
            and not any(
                isinstance(place, Partial) and place.op != "sum"  # rounds are added up
                for layout in (*one.takes, *one.gives)
                for place in layout
            )
        )

    def _is_even(self, way: Strategy, types: tuple[TensorType, ...]) -> bool:
        pairs = zip(types, way.takes, strict=True)
        return all(local_shape(type.shape, take, self.mesh) is not None for type, take in pairs)

    def _layouts(self, node: Node) -> list[Layout]:
        (type,) = node.outputs
        assert type is not None
        if node.op not in ("input", "tangent"):
            return [WHOLE]
        even = [dim for dim, size in enumerate(type.shape) if size and size % self.count == 0]
        return [WHOLE, *((Shard(dim),) for dim in even)]

    def _is_input(self, name: str) -> bool:
        return self.node_of[name].op == "input"

    def _is_idle(self, picked: Mapping[str, Strategy]) -> bool:
        """Whether a good part of what the forward makes of batch and parameters would be made whole in every round."""
        made = {True: 0.0, False: 0.0}
        of_batch = self._of_batch()
        for node in self.graph.nodes:
            if node.name in of_batch and node.name not in self.of_inputs and node.phase == "forward":
                whole = all(layout == WHOLE for layout in picked[node.name].gives)
                made[whole] += sum(type.numel for type in node.outputs if type is not None)
        return made[True] > MOST_WHOLE * made[False]

    def _of_batch(self) -> set[str]:
        """Nodes that read what is made of inputs that may be cut: a number, as what is drawn, is whole."""
        found = {node.name for node in self.graph.nodes if node.op == "input" and len(self.ways[node.name]) > 1}
        for node in self.graph.nodes:
            if any(ref.name in found for ref in node.operands):
                found.add(node.name)
        return found

    def _uneven(self) -> NotCut | None:
        """The leading size that most inputs have is the batch, and has to be divided."""
        batch = batch_size(self.graph)
        if batch % self.count == 0:
            return None
        return NotCut(
            f"a batch of {batch} cannot be cut into {self.count} equal micro-batches; choose a number that divides "
            f"{batch}"
        )

    # --- which is chosen ---------------------------------------------------------------------------------------------

    def _picked(self) -> dict[str, Strategy]:
        costs = [self._costs(node) for node in self.graph.nodes]
        edges = [
            Edge(self.place[ref.name], self.place[node.name], self._meeting(ref, node, position))
            for node in self.graph.nodes
            for position, ref in enumerate(node.operands)
        ]
        edges += self._tangents() + self._gradients_of_inputs()
        self._close_results(costs)
        if any(not np.isfinite(cost).any() for cost in costs):
            raise self._refusal()
        names = tuple(node.name for node in self.graph.nodes)
        solution = solve(Problem(tuple(costs), tuple(edges), names=names))
        if solution.picks is None:
            raise self._refusal()
        return {
            node.name: self.ways[node.name][pick] for node, pick in zip(self.graph.nodes, solution.picks, strict=True)
        }

    def _costs(self, node: Node) -> Array:
        """Elements that a round makes: the fewer, the more is split."""
        if node.is_source:
            return np.array([0.0 if w.gives[0] in (WHOLE, (Shard(0),)) else OTHER_DIM for w in self.ways[node.name]])
        made = float(sum(type.numel for type in node.outputs if type is not None))
        return np.array([made if self._is_whole(way) else made / self.count for way in self.ways[node.name]])

    def _is_whole(self, way: Strategy) -> bool:
        return not way.roles[0] or way.roles[0].startswith("+")

    def _meeting(self, ref: Ref, node: Node, position: int) -> Array:
        """0 where what is given is what is taken. What is made of inputs may be made whole, too; and of what is alike
        in all rounds, each may take its share.
        """
        given = [way.gives[ref.index] for way in self.ways[ref.name]]
        taken = [way.takes[position] for way in self.ways[node.name]]
        again = float(self.graph.type_of(ref).numel)
        whole_too = again if ref.name in self.of_inputs else np.inf
        share = again if self._has_shares(ref) else np.inf

        def cost(give: Layout, take: Layout) -> float:
            if give == take:
                return 0.0
            return whole_too if take == WHOLE else share if (give, take) == (WHOLE, TERM) else np.inf

        return np.array([[cost(give, take) for take in taken] for give in given]).reshape(len(given), len(taken))

    def _has_shares(self, ref: Ref) -> bool:
        return self.graph.type_of(ref).dtype.startswith(("float", "bfloat", "complex"))

    def _tangents(self) -> list[Edge]:
        """A gradient of an output comes as the output goes: whole where the output is a sum over rounds, else cut as it
        is.
        """
        output = {result.target: result.ref for result in self.graph.results if result.kind == "output"}
        found: list[Edge] = []
        for node in self.graph.nodes:
            ref = output.get(node.target) if node.op == "tangent" else None
            if ref is None:
                continue
            given = [way.gives[ref.index] for way in self.ways[ref.name]]
            wanted = [WHOLE if give == TERM else give if give != WHOLE else None for give in given]
            comes = [way.gives[0] for way in self.ways[node.name]]
            cost = np.where([[one == other for other in comes] for one in wanted], 0.0, np.inf)
            found.append(Edge(self.place[ref.name], self.place[node.name], cost))
        return found

    def _gradients_of_inputs(self) -> list[Edge]:
        """A gradient of an input goes as the input comes; of one that all rounds read whole it is a sum over them."""
        inputs = {node.target: node.name for node in self.graph.inputs_with_gradient}
        found: list[Edge] = []
        for result in self.graph.results:
            name = inputs.get(result.target) if result.kind == "gradient" else None
            if result.ref is None or name is None:
                continue
            given = [way.gives[result.ref.index] for way in self.ways[result.ref.name]]
            comes = [way.gives[0] for way in self.ways[name]]
            fits = [[give in (TERM, WHOLE) if come == WHOLE else give == come for come in comes] for give in given]
            found.append(Edge(self.place[result.ref.name], self.place[name], np.where(fits, 0.0, np.inf)))
        return found

    def _close_results(self, costs: list[Array]) -> None:
        """A gradient of a parameter is a sum over rounds, or alike in all; a buffer is that."""
        inputs = {node.target for node in self.graph.inputs_with_gradient}
        for result in self.graph.results:
            if result.ref is None or result.kind == "output" or result.target in inputs:
                continue
            wanted = (TERM, WHOLE) if result.kind == "gradient" else (WHOLE,)
            place = self.place[result.ref.name]
            gives = [way.gives[result.ref.index] in wanted for way in self.ways[result.ref.name]]
            costs[place] = np.where(gives, costs[place], np.inf)

    def _refusal(self) -> NotCut:
        """What first makes something of the whole batch: what it reads is cut, or a sum over rounds, and then it has no
        way. What is made of inputs alone may be whole beside.
        """
        if (uneven := self._uneven()) is not None:
            return uneven
        reach: dict[Ref, set[Layout]] = {}
        of_batch = self._of_batch()
        for node in self.graph.nodes:
            ways = [way for way in self.ways[node.name] if self._is_reached(way, node, reach)]
            if not ways:
                return self._named(node)
            if node.name in of_batch and node.name not in self.of_inputs:  # whatever can be cut is
                ways = [way for way in ways if _splits(way)] or ways
            for index in range(len(node.outputs)):
                reach[Ref(node.name, index)] = {way.gives[index] for way in ways}
        for result in self.graph.results:
            if result.kind == "buffer" and result.ref is not None and WHOLE not in reach[result.ref]:
                return NotCut(
                    f"forward writes the buffer {result.target} from the whole batch, and {self.count} micro-batches "
                    "would each write their own; choose micro_batches=1"
                )
        return NotCut(
            f"the outputs or gradients of this model are no sums over {self.count} micro-batches, nor parts of it: "
            "let forward return a loss that is a sum or a mean over samples, or choose micro_batches=1"
        )

    def _is_reached(self, way: Strategy, node: Node, reach: Mapping[Ref, set[Layout]]) -> bool:
        return all(
            take in reach[ref] or (take == TERM and WHOLE in reach[ref] and self._has_shares(ref))
            for take, ref in zip(way.takes, node.operands, strict=True)
        )

    def _named(self, node: Node) -> NotCut:
        where, op = node.source or node.module or node.name, node.op.removeprefix("aten.")
        if draws(node):
            return NotCut(
                f"{where}: {op} draws numbers once for the whole batch, and {self.count} micro-batches would each draw "
                "their own; choose micro_batches=1"
            )
        return NotCut(
            f"{where}: {op} works on the whole batch at once, so that the step cannot run in {self.count} "
            "micro-batches; choose micro_batches=1"
        )


def _splits(way: Strategy) -> bool:
    return any(isinstance(layout[0], Shard) for layout in (*way.takes, *way.gives))


def _of_inputs(graph: Graph) -> set[str]:
    """Nodes that are made of inputs, buffers and constants alone, with no numbers drawn: the same whenever they are
    made.
    """
    found = {node.name for node in graph.nodes if node.op in ("input", "buffer", "constant")}
    for node in graph.nodes:
        if not node.is_source and not draws(node) and all(ref.name in found for ref in node.operands):
            found.add(node.name)
    return found


def _source(layout: Layout) -> Strategy:
    return Strategy(("",), (), (layout,), "", (), 1, ())
