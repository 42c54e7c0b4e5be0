"""widened: the graph of all that could be decided about forward values, for a search to choose from.

Every forward value that backward reads, or that recomputing one of those would read, comes back as a node of backward,
right before its first reader there. Whether that node runs again, or stands for the value that was saved or fetched
from the host, is its mode:

    save        held from the forward to its last reader in backward
    recompute   run again, from operands that are there then
    offload     sent to the host when it is made, fetched when it comes back
    drop        not there in backward; only for values that backward itself does not read

A view is a value like others, as a layout change may stand in front of it: it may be saved where what it looks at is
not. It can always run again, which takes no time. Views of what is there anyway (parameters, inputs) do, or are
dropped. Random operators are never run again, nor is anything that reads a buffer which the forward changes: it would
give other values.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Node, Ref, map_node
from autopar.ir.work import VIEWS, draws
from autopar.rewrite.gather_once import is_gathered_once
from autopar.rewrite.regions import regions

SAVE, RECOMPUTE, OFFLOAD, DROP = MODES = ("save", "recompute", "offload", "drop")
SAVED = "autopar.saved"  # the operator of a node that cannot run again
LOOK = "autopar.look"  # the operator of a view's: it counts as storage of its own


@dataclass(frozen=True, slots=True)
class Again:
    """A forward value in backward: `origin`, the node that makes it in the forward, and the modes it may have.

    `reads`: those of its results that somebody reads in backward; `wanted`: backward itself does, and not only what is
    recomputed. A view of a source that backward wants has no modes: it runs again. `before`: the node of backward that
    it comes before, be it there for that one or for what comes before it, too.
    """

    origin: str
    modes: tuple[str, ...]
    reads: tuple[int, ...]
    wanted: bool
    before: str


@dataclass(frozen=True)
class Widened:
    """`graph` with `again[name]` for each node of backward that is a forward value; `base`: what it was made from."""

    graph: Graph
    again: Mapping[str, Again]
    base: Graph


def widened(graph: Graph, *, recompute: bool = True, offload: bool = True) -> Widened:
    """`recompute`, `offload`: which of these modes there are."""
    return _Widening(graph, recompute, offload).found()


def looks_at_source(node: Node, node_of: Mapping[str, Node]) -> bool:
    """Whether the node is a view, perhaps of views, of what is there anyway."""
    if node.op not in VIEWS:
        return False
    below = [node_of[ref.name] for ref in node.operands]
    return all(one.is_source or looks_at_source(one, node_of) for one in below)


def looked_at(ref: Ref, node_of: Mapping[str, Node]) -> list[Ref]:
    """What the value is a view of, perhaps of a view; itself if it is none."""
    node = node_of[ref.name]
    if node.op not in VIEWS:
        return [ref]
    return [below for operand in node.operands for below in looked_at(operand, node_of)]


class _Widening:
    def __init__(self, graph: Graph, recompute: bool, offload: bool) -> None:
        self.graph, self.node_of, self.recompute, self.offload = graph, graph.by_name, recompute, offload
        self.region = regions(graph)
        self.fixed = self._fixed()
        self.name_of: dict[str, str] = {}  # forward node -> its node in backward
        self.backward: list[Node] = []
        self.backward_of: dict[str, Node] = {}
        self.before: dict[str, str] = {}  # node in backward -> the traced one that it comes before
        self.read: dict[str, set[int]] = {}  # node in backward -> its results that are read
        self.wanted: dict[str, set[int]] = {}  # likewise, that backward itself reads
        self.next = ""  # the traced node of backward that is being added

    def found(self) -> Widened:
        forward = [node for node in self.graph.nodes if node.phase == "forward" or node.is_source]
        for node in self.graph.nodes:
            if node.phase == "backward" and not node.is_source:
                self.next = node.name
                self._add(self._rerouted(node))
                for ref in self.backward[-1].operands:
                    self._want(ref)
        graph = Graph((*forward, *self.backward), self.graph.results, self.graph.rounds)
        again = {
            name: Again(
                origin,
                self._modes(origin, name),
                tuple(sorted(self.read[name])),
                name in self.wanted,
                self.before[name],
            )
            for origin, name in self.name_of.items()
        }
        return Widened(graph, again, self.graph)

    def _fixed(self) -> set[str]:
        """Forward nodes that are not run again: what leaves its region, and what would not come out the same."""
        fixed: set[str] = set()
        for node in self.graph.nodes:
            if node.phase != "forward" or node.is_source:
                continue
            can = self.recompute or node.op in VIEWS
            if not can or draws(node) or self._reads_written(node):
                fixed.add(node.name)
            here = self.region[node.name]
            for ref in node.operands:
                if self.region.get(ref.name, here) != here:
                    fixed.update(one.name for one in looked_at(ref, self.node_of))
        return fixed

    def _reads_written(self, node: Node) -> bool:
        """Whether it reads a buffer that the forward writes to, or a view of one."""
        return any(below.name in self.graph.written for ref in node.operands for below in looked_at(ref, self.node_of))

    def _modes(self, origin: str, name: str) -> tuple[str, ...]:
        if looks_at_source(self.node_of[origin], self.node_of):
            return () if name in self.wanted else (RECOMPUTE, DROP)
        modes = [SAVE]
        if origin not in self.fixed:
            modes.append(RECOMPUTE)
        if self.offload and (len(self.read[name]) == 1 or self.wanted.get(name) == self.read[name]):
            modes.append(OFFLOAD)  # all that is read is read in any case, or what it costs would hang on who does
        if name not in self.wanted:
            modes.append(DROP)
        return tuple(modes)

    def _want(self, ref: Ref) -> None:
        node = self.backward_of.get(ref.name)
        if node is None or ref.index in self.wanted.get(ref.name, ()):
            return
        self.wanted.setdefault(ref.name, set()).add(ref.index)
        if looks_at_source(node, ChainMap(self.backward_of, self.node_of)):
            for below in node.operands:
                self._want(below)

    def _add(self, node: Node) -> None:
        self.backward.append(node)
        self.backward_of[node.name] = node

    def _rerouted(self, node: Node) -> Node:
        return map_node(node, self._again)

    def _rerouted_unless_fixed(self, node: Node) -> Node:
        if looks_at_source(node, self.node_of):
            return self._rerouted(node)
        if node.name in self.fixed:
            return replace(node, op=SAVED, args=(), kwargs=())
        return replace(self._rerouted(node), op=LOOK) if node.op in VIEWS else self._rerouted(node)

    def _again(self, ref: Ref) -> Ref:
        node = self.node_of[ref.name]
        if node.phase == "backward" or node.is_source or is_gathered_once(node):
            return ref
        if node.name not in self.name_of:
            name = again_name(node.name, self.node_of)
            made = replace(self._rerouted_unless_fixed(node), name=name, phase="backward", target=node.name)
            self._add(made)
            self.name_of[node.name] = name
            self.before[name] = self.next
            self.read[name] = set()
        self.read[self.name_of[node.name]].add(ref.index)
        return Ref(self.name_of[node.name], ref.index)


def again_name(name: str, taken: Mapping[str, object]) -> str:
    """What a forward value is called in backward."""
    found = f"{name}_again"
    while found in taken:
        found += "_"
    return found
