"""cut_in_stages: the graphs of pipeline stages, of the graph of one micro-batch.

The forward is cut in its own order of execution: who stands behind a cut is in a later stage. What is made of inputs
alone (masks, positions), or of parameters alone (casts), is made again in each stage that reads it. Everything else
that crosses a cut is sent from stage to stage, also to a reader further on.

Backward operators follow: one that reads what forward has left runs where that is; the others run where the least bytes
cross, which is a small integer program. Gradients only go back. What crosses a cut forwards and what comes back across
it are pairs of equal shape and dtype, so that one channel carries both and a stage looks like a model of its own: a
received value is an input with a gradient, a sent one is an output with a tangent.

What crosses is there in both stages: where the plan would run it again or fetch it for backward, backward reads what
was made or received. Where a share of a value crosses, backward reads it in the place of the value behind the cut.

A parameter that several stages read is in each of them, and each gives its terms of the gradient (`Stage.tied`). So it
is with an argument that has a gradient, which every rank has.

Where backward is to run in two halves, what the gradients of a stage's inputs need comes first in it (`inputs_first`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autopar.errors import NotCut
from autopar.ir.graph import CHANNEL, Graph, Node, Ref, Result, TensorType, reading
from autopar.ir.rounds import LAST
from autopar.ir.work import STORE
from autopar.rewrite.backward import kept, with_first
from autopar.rewrite.backward_stages import least_crossing
from autopar.rewrite.placed import free_in, is_placed, looks_in, share_of
from autopar.rewrite.terms import Term, sums_of, terms_of


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage as a model of its own.

    graph       of one micro-batch; what it receives are inputs, what it sends are outputs, both called by channels
    receives    channels from the stage before; `gives_back`: those of them by which a gradient goes back
    sends       channels to the stage behind; `gets_back`: those by which one comes
    tied        parameters that other stages hold, too: each gives a term of the gradient
    copies      operators that stand for one of the whole graph under another name, for terms of such gradients
    """

    graph: Graph
    receives: tuple[str, ...]
    gives_back: tuple[str, ...]
    sends: tuple[str, ...]
    gets_back: tuple[str, ...]
    tied: tuple[str, ...]
    copies: Mapping[str, str]


def forward_order(graph: Graph) -> tuple[Node, ...]:
    """The forward operators that are in one stage each, in the order in which a cut divides them."""
    return _in_order(graph, free_in(graph))


def _in_order(graph: Graph, free: frozenset[str]) -> tuple[Node, ...]:
    return tuple(n for n in graph.nodes if is_placed(n, free) and n.phase == "forward" and n.op != STORE)


def cut_in_stages(graph: Graph, ends: Sequence[int], *, inputs_first: bool = False) -> tuple[Stage, ...]:
    """The stages of a graph. `ends`: behind how many operators of `forward_order` each stage but the last one ends,
    ascending. `inputs_first`: backward has what the gradients of inputs need in front of the rest, for schedules that
    run the two apart. Raises NotCut where a stage would be empty, or where what comes back across a cut is not what
    went.
    """
    try:
        stages = _Stages(graph, ends, True).found()
    except NotCut:  # where a later stage makes what backward of an earlier one shares, it is sent back
        stages = _Stages(graph, ends, False).found()
    return tuple(map(_inputs_first, stages)) if inputs_first else stages


def _inputs_first(stage: Stage) -> Stage:
    """The same stage, with another order of backward."""
    given = [one for one in stage.graph.results if one.kind == "gradient" and one.target in stage.gives_back]
    return replace(stage, graph=with_first(stage.graph, {one.ref.name for one in given if one.ref is not None}))


def parameters_read(graph: Graph) -> dict[str, list[str]]:
    """Forward operator -> the targets of the parameters that it reads, as they are or cast."""
    free, below, found = free_in(graph), dict[str, list[str]](), dict[str, list[str]]()
    for node in graph.nodes:
        read = [name for ref in node.operands for name in below.get(ref.name, ())]
        if node.op == "parameter":
            below[node.name] = [node.target]
        elif node.name in free:
            below[node.name] = read
        elif node.phase == "forward" and read:
            found[node.name] = read
    return found


def channel(ref: Ref) -> str:
    return f"{CHANNEL}{ref.name}.{ref.index}"


def ref_of(channel: str) -> Ref:
    """What goes forward over a channel."""
    name, _, index = channel.removeprefix(CHANNEL).rpartition(".")
    return Ref(name, int(index))


class _Stages:
    def __init__(self, graph: Graph, ends: Sequence[int], looks: bool) -> None:
        """`looks`: each stage looks itself at what it has of forward, where several operators of backward share it."""
        self.graph, self.free = graph, free_in(graph)
        self.node_of: Mapping[str, Node] = graph.by_name
        leaves = (*(node for node in graph.nodes if node.op == "parameter"), *graph.inputs_with_gradient)
        self.leaves = {node.target: node.name for node in leaves}  # where gradients go
        self.count = len(ends) + 1
        self.order = order = _in_order(graph, self.free)
        if [*ends] != sorted({*ends}) or not all(0 < end < len(order) for end in ends):
            raise NotCut(f"cuts behind {[*ends]} of {len(order)} operators leave a stage without any; cut elsewhere")
        self.stage_of = {node.name: sum(at >= end for end in ends) for at, node in enumerate(order)}
        self.outputs = [r for r in graph.results if r.kind != "gradient" and r.ref is not None]
        self.last_read = self._last_reads()
        self.forwards = [
            [ref for ref, last in self.last_read.items() if self.stage_of[ref.name] <= cut < last]
            for cut in range(self.count - 1)
        ]
        everywhere = {Ref(name, at) for name in self.free for at in range(len(self.node_of[name].outputs))}
        crosses = {ref for went in self.forwards for ref in went}
        self.share_of = share_of(graph)
        shared = {ref for ref, share in self.share_of.items() if share in crosses}
        self.graph = graph = kept(graph, everywhere | crosses | shared)
        self.node_of, self.looks = graph.by_name, looks_in(graph, self.free) if looks else frozenset[str]()
        self.free |= self.looks
        stores = [node for node in graph.nodes if node.op == STORE]
        self.stage_of |= {node.name: self.stage_of[node.operands[0].name] for node in stores}
        self.kinds = [{graph.type_of(ref) for ref in went} for went in self.forwards]
        self.holders = self._holders()
        shared = [r for r in graph.results if r.kind == "gradient" and len(self._holders_of(r)) > 1]
        self.terms = {self.leaves[result.target]: terms_of(graph, result) for result in shared}
        self._place_backward()

    # --- where forward values are ------------------------------------------------------------------------------------

    def _is_sent(self, ref: Ref) -> bool:
        """Whether a forward value can cross a cut: it is made in one stage."""
        node = self.node_of[ref.name]
        return is_placed(node, self.free) and node.phase == "forward"

    def _last_reads(self) -> dict[Ref, int]:
        """Of forward values that are sent, the last stage whose forward reads them; what the model gives back is read
        behind the last one.
        """
        found: dict[Ref, int] = {}
        for node in self.order:
            for ref in node.operands:
                if self._is_sent(ref):
                    found[ref] = max(found.get(ref, 0), self.stage_of[node.name])
        for result in self.outputs:
            if result.ref is not None and self._is_sent(result.ref) and result.kind == "output":
                found[result.ref] = self.count - 1
        return found

    def _holders(self) -> dict[str, list[int]]:
        """Parameter, or argument that has a gradient -> the stages whose forward reads it; the first one where none
        does.
        """
        below: dict[str, set[str]] = {}
        found: dict[str, set[int]] = {name: set() for name in self.leaves.values()}
        for node in self.graph.nodes:
            read = {name for ref in node.operands for name in below.get(ref.name, ())}
            if node.name in found:
                below[node.name] = {node.name}
            elif node.name in self.free:
                below[node.name] = read
            elif node.phase == "forward" and not node.is_source:
                for name in read:
                    found[name].add(self.stage_of[node.name])
        self.below = below
        return {name: sorted(stages) or [0] for name, stages in found.items()}

    def _stages_with(self, ref: Ref) -> set[int]:
        """Where a backward operator may read a forward value without another message."""
        if ref.name in self.looks:
            (ref,) = self.node_of[ref.name].operands
        if self._is_sent(ref):
            made, same = self.stage_of[ref.name], (ref, self.share_of.get(ref, ref))
            return set(range(made, max(made, *(self.last_read.get(one, 0) for one in same)) + 1))
        found = set(range(self.count))
        for name in self.below.get(ref.name, ()):
            found &= {*self.holders[name]}
        return found

    # --- where backward runs -----------------------------------------------------------------------------------------

    def _place_backward(self) -> None:
        summed = {name for terms in self.terms.values() for term in terms for name in (*term.behind, *term.adds)}
        placed = [  # sums are made anew in each stage
            node
            for node in self.graph.nodes
            if node.phase == "backward" and is_placed(node, self.free) and node.name not in summed
        ]
        allowed = {node.name: self._allowed(node) for node in placed}
        for result in self.graph.results:
            if result.kind == "gradient" and result.ref is not None and result.ref.name in allowed:
                holders = self._holders_of(result)
                if len(holders) == 1:
                    allowed[result.ref.name] &= {*holders}
        for name, terms in self.terms.items():
            for term in terms:
                if term.ref.name in allowed:
                    allowed[term.ref.name] &= {*self.holders[name]}
        for node in placed:
            if not allowed[node.name]:
                raise NotCut(
                    f"{node.source or node.module or node.name}: the gradients of {node.op} read what different stages "
                    "hold, so that the model cannot be cut there; cut it elsewhere"
                )
        crossing = cache(self._crossing)  # repeated layers have few types
        self.stage_of |= least_crossing(placed, allowed, self.count, lambda ref: crossing(self.graph.type_of(ref)))

    def _holders_of(self, result: Result) -> list[int]:
        """None of an argument that nothing is made of."""
        return self.holders.get(self.leaves.get(result.target, ""), [])

    def _allowed(self, node: Node) -> set[int]:
        if node.op == "tangent":
            return {self.count - 1}
        found = set(range(self.count))
        for ref in node.operands:
            if self.node_of[ref.name].phase == "forward" or ref.name in self.free:
                found &= self._stages_with(ref)
        return found

    def _crossing(self, type: TensorType) -> NDArray[np.float64]:
        """[stage that makes it, stage that reads it]: bytes for each cut on the way back, across which something of
        its kind went.
        """
        cost = np.full((self.count, self.count), np.inf)
        for made in range(self.count):
            for read in range(made + 1):
                if all(type in self.kinds[cut] for cut in range(read, made)):
                    cost[made, read] = float(type.nbytes) * (made - read)
        return cost

    # --- the graphs --------------------------------------------------------------------------------------------------

    def found(self) -> tuple[Stage, ...]:
        pairs = [self._pairs(went, back) for went, back in zip(self.forwards, self._coming_back(), strict=True)]
        self.members = self._members()
        return tuple(self._stage(number, self.forwards, pairs) for number in range(self.count))

    def _coming_back(self) -> list[list[Ref]]:
        """Over each cut, the gradients of stages behind it that are read in front of it."""
        found: list[dict[Ref, None]] = [{} for _ in range(self.count - 1)]
        for node in self.graph.nodes:
            read = self.stage_of.get(node.name)
            if node.phase != "backward" or read is None:
                continue
            for ref in node.operands:
                if self.node_of[ref.name].phase == "backward":
                    for cut in range(read, self.stage_of.get(ref.name, -1)):
                        found[cut][ref] = None
        return [[*one] for one in found]

    def _members(self) -> list[list[Node]]:
        """Of each stage, the nodes that are its own or may be: those of inputs and weights, and sources, in order."""
        found: list[list[Node]] = [[] for _ in range(self.count)]
        for node in self.graph.nodes:
            number = self.stage_of.get(node.name)
            if number is not None:
                found[number].append(node)
            elif node.is_source or node.name in self.free:
                for members in found:
                    members.append(node)
        return found

    def _pairs(self, went: Sequence[Ref], back: Sequence[Ref]) -> dict[Ref, Ref]:
        """Gradient that comes back -> the value that went, by the channel of which it comes."""
        left, found = [*went], dict[Ref, Ref]()
        for ref in back:
            type = self.graph.type_of(ref)
            like = next((one for one in left if self.graph.type_of(one) == type), None)
            if like is None:
                node = self.node_of[ref.name]
                raise NotCut(
                    f"{node.source or node.module or node.name}: a gradient ({type}) comes back across the cut for "
                    "which nothing of that shape went; cut the model elsewhere"
                )
            left.remove(like)
            found[ref] = like
        return found

    def _stage(self, number: int, forwards: Sequence[Sequence[Ref]], pairs: Sequence[Mapping[Ref, Ref]]) -> Stage:
        none, last = dict[Ref, Ref](), number == self.count - 1
        comes, back_out = (forwards[number - 1], pairs[number - 1]) if number else (list[Ref](), none)
        goes, back_in = (list[Ref](), none) if last else (forwards[number], pairs[number])
        same = {ref: Ref(_received(share)) for ref, share in self.share_of.items() if share in comes}
        seen = same | {ref: Ref(_received(ref)) for ref in comes} | {ref: Ref(_returned(ref)) for ref in back_in}
        sums = sums_of(self.graph, self._own_terms(number), seen, f"of_{number}")
        results = self._results(number, goes, back_out, seen, sums.ends)
        made = self._nodes(number, comes, back_in, seen, [r.ref for r, _ in results if r.ref is not None])
        nodes = (*made, *sums.nodes)
        rounds, names = self.graph.rounds, {node.name for node in nodes}
        cut = {name: dim for name, dim in rounds.cut.items() if name in names}
        joined = tuple(join for _, join in results) if rounds.joined else ()
        stored = {name: dtype for name, dtype in rounds.stored.items() if name in names}
        whole = Graph(nodes, tuple(one for one, _ in results), replace(rounds, cut=cut, joined=joined, stored=stored))
        held = {node.name: node.target for node in nodes if node.op == "parameter"}
        return Stage(
            whole,
            tuple(map(channel, comes)),
            tuple(channel(ref) for ref in back_out.values()),
            tuple(map(channel, goes)),
            tuple(channel(ref) for ref in back_in.values()),
            tuple(target for name, target in held.items() if len(self.holders[name]) > 1),
            sums.copies,
        )

    def _results(
        self,
        number: int,
        goes: Sequence[Ref],
        back_out: Mapping[Ref, Ref],
        seen: Mapping[Ref, Ref],
        ends: Mapping[str, Ref | None],
    ) -> list[tuple[Result, str | int]]:
        """Results of the stage in the stage's own names, each with how those of micro-batches are put together."""
        found: list[tuple[Result, str | int]] = []
        joins = self.graph.rounds.joined or (LAST,) * len(self.graph.results)
        for result, join in zip(self.graph.results, joins, strict=True):
            if result.kind == "gradient":
                if number in self._holders_of(result):
                    ref = ends.get(result.target, result.ref)
                    found.append((replace(result, ref=ref and seen.get(ref, ref)), join))
            elif self._gives(result, number):
                found.append((replace(result, ref=result.ref and seen.get(result.ref, result.ref)), join))
        found += [(Result("output", channel(ref), seen.get(ref, ref)), LAST) for ref in goes]
        found += [(Result("gradient", channel(went), seen.get(ref, ref)), LAST) for ref, went in back_out.items()]
        return found

    def _gives(self, result: Result, number: int) -> bool:
        """Outputs leave the last stage, buffers the one that makes them."""
        if result.kind == "output" or result.ref is None or not self._is_sent(result.ref):
            return number == self.count - 1
        return self.stage_of[result.ref.name] == number

    def _own_terms(self, number: int) -> dict[str, list[Term]]:
        """Of the gradients of parameters that several stages hold, the terms that this one makes."""
        found: dict[str, list[Term]] = {}
        for result in self.graph.results:
            if result.kind == "gradient" and (terms := self.terms.get(self.leaves.get(result.target, ""))):
                found[result.target] = [term for term in terms if self.stage_of.get(term.ref.name) == number]
        return found

    def _nodes(
        self, number: int, comes: Sequence[Ref], back_in: Mapping[Ref, Ref], seen: Mapping[Ref, Ref],
        wanted: Sequence[Ref],
    ) -> tuple[Node, ...]:  # fmt: skip
        members = self.members[number]
        own = [node for node in members if node.name in self.stage_of]
        needed = {ref.name for node in own for ref in node.operands if ref not in seen} | {ref.name for ref in wanted}
        for node in reversed(members):
            if node.name in needed and node.name in self.free:
                needed |= {ref.name for ref in node.operands}
        here = {node.name for node in own}
        for node in members:
            if number in self.holders.get(node.name, ()) or (
                node.name in needed and (node.is_source or node.name in self.free) and node.op != "tangent"
            ):
                here.add(node.name)
        received = [self._source("input", ref, _received(ref), channel(ref)) for ref in comes]
        returned = [self._source("tangent", ref, _returned(ref), channel(went)) for ref, went in back_in.items()]
        sources, forward, backward = list[Node](), list[Node](), list[Node]()

        for node in members:
            if node.name in here:
                among = backward if node.phase == "backward" else sources if node.is_source else forward
                among.append(reading(node, seen))
        return (*sources, *received, *forward, *returned, *backward)

    def _source(self, op: str, ref: Ref, name: str, target: str) -> Node:
        of = self.node_of[ref.name]
        phase = "backward" if op == "tangent" else "forward"
        return Node(name, op, (), (), (self.graph.type_of(ref),), phase, target, of.module, of.source, of.outside)


def _received(ref: Ref) -> str:
    return f"{ref.name}_{ref.index}_received"


def _returned(ref: Ref) -> str:
    return f"{ref.name}_{ref.index}_returned"
