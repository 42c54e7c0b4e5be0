"""narrowed: the graph that runs once it is decided where values wait; and `plain`, the graph that was traced.

A value that is offloaded has a node `autopar.store` behind it, whose result lies on the host, and a node
`autopar.fetch` right before its first reader in backward, or where it is said to come back. One that is recomputed has
a copy of its node there, whose `target` is the name of the node that it repeats. Views of what is there anyway
(parameters, inputs) are repeated, too.

A parameter that lies on the host has one `autopar.fetch` in the forward and one in backward, before its first reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.ir.graph import Graph, Node, Phase, Ref, map_node, map_refs
from autopar.ir.work import FETCH, STORE, draws
from autopar.rewrite.expose_choices import OFFLOAD, RECOMPUTE, SAVE, again_name, looks_at_source
from autopar.rewrite.gather_once import is_gathered_once


def narrowed(
    graph: Graph,
    modes: Mapping[str, str],
    hosted: Collection[str] = (),
    before: Mapping[str, Sequence[Ref]] | None = None,
) -> Graph:
    """`modes`: forward node -> save, recompute, offload or drop (left out: save). `hosted`: names of the parameters
    that lie on the host. `before`: node of backward -> the values that come back before it, though it may be a later
    one that reads them first: what they are made of is then held no longer.
    """
    return _Narrowing(graph, modes, hosted, before or {}).found()


class _Narrowing:
    def __init__(
        self, graph: Graph, modes: Mapping[str, str], hosted: Collection[str], before: Mapping[str, Sequence[Ref]]
    ) -> None:
        self.graph, self.node_of, self.modes, self.hosted = graph, graph.by_name, modes, frozenset(hosted)
        self.before = before
        self.head: list[Node] = []
        self.backward: list[Node] = []
        self.stores: dict[str, list[Node]] = defaultdict(list)  # forward node -> what sends its results to the host
        self.made: dict[Ref, Ref] = {}  # a value -> what backward reads instead
        self.fetched: dict[Ref, Ref] = {}  # a parameter on the host -> what the forward reads instead

    def found(self) -> Graph:
        for node in self.graph.nodes:
            if node.is_source:
                self.head.append(node)
            elif node.phase == "forward":
                self.head.append(map_node(node, self._here))
            else:
                for ref in self.before.get(node.name, ()):
                    self._again(ref)
                self.backward.append(map_node(node, self._again))
        forward = [part for node in self.head for part in (node, *self.stores[node.name])]
        return Graph((*forward, *self.backward), self.graph.results, self.graph.rounds)

    def _is_hosted(self, node: Node) -> bool:
        return node.op == "parameter" and node.target in self.hosted

    def _here(self, ref: Ref) -> Ref:
        """What the forward reads."""
        if not self._is_hosted(self.node_of[ref.name]):
            return ref
        if ref not in self.fetched:
            self.fetched[ref] = self._fetch(ref, f"{ref.name}_fetch", self.head, "forward")
        return self.fetched[ref]

    def _again(self, ref: Ref) -> Ref:
        """What backward reads."""
        node = self.node_of[ref.name]
        if self._is_hosted(node):
            if ref not in self.made:
                self.made[ref] = self._fetch(ref, f"{ref.name}_fetch_again", self.backward, "backward")
            return self.made[ref]
        if node.phase == "backward" or node.is_source or is_gathered_once(node):
            return ref
        if ref not in self.made:
            mode = RECOMPUTE if looks_at_source(node, self.node_of) else self.modes.get(node.name, SAVE)
            if mode == RECOMPUTE:
                repeated = replace(
                    map_node(node, self._again), name=again_name(node.name, self.node_of), phase="backward",
                    target=node.name,
                )  # fmt: skip
                self.backward.append(repeated)
                self.made |= {Ref(node.name, i): Ref(repeated.name, i) for i in range(len(node.outputs))}
            elif mode == OFFLOAD:
                self.made[ref] = self._offloaded(node, ref)
            else:
                self.made[ref] = ref
        return self.made[ref]

    def _offloaded(self, node: Node, ref: Ref) -> Ref:
        name = f"{node.name}_{ref.index}" if len(node.outputs) > 1 else node.name
        type = self.graph.type_of(ref)
        store = Node(
            f"{name}_store", STORE, (ref,), (), (type,), "forward", module=node.module, source=node.source
        )  # fmt: skip
        self.stores[node.name].append(store)
        return self._fetch(Ref(store.name), f"{name}_fetch", self.backward, "backward", node)

    def _fetch(self, ref: Ref, name: str, among: list[Node], phase: Phase, like: Node | None = None) -> Ref:
        node = like or self.node_of[ref.name]
        type = node.outputs[0] if like is None else self.stores[like.name][-1].outputs[0]
        among.append(Node(name, FETCH, (ref,), (), (type,), phase, module=node.module, source=node.source))
        return Ref(name)


def plain(graph: Graph) -> Graph:
    """The graph that was traced, of one that runs."""
    instead: dict[Ref, Ref] = {}

    def traced(ref: Ref) -> Ref:
        return instead.get(ref, ref)

    kept: list[Node] = []
    for node in graph.nodes:
        if node.op in (STORE, FETCH) or is_gathered_once(node):
            instead[Ref(node.name)] = traced(node.operands[0])
        elif not node.is_source and node.target:
            instead |= {Ref(node.name, i): Ref(node.target, i) for i in range(len(node.outputs))}
        else:
            kept.append(map_node(node, traced))
    results = tuple(replace(r, ref=None if r.ref is None else traced(r.ref)) for r in graph.results)
    return Graph(tuple(kept), results, graph.rounds) if len(kept) < len(graph.nodes) else graph


def false_claim_of(graph: Graph) -> tuple[Node, str] | None:
    """(node, cause) of the first node that `plain` would leave out though it is not what it claims to be: a copy of
    another node, a way to the host or back, a share. None where all are.
    """
    nodes: dict[str, Node] = {}
    instead: dict[Ref, Ref] = {}

    def traced(ref: Ref) -> Ref:
        return instead.get(ref, ref)

    def call(node: Node) -> object:
        kwargs = tuple((key, map_refs(arg, traced)) for key, arg in node.kwargs)
        return node.op, repr((map_refs(node.args, traced), kwargs)), node.outputs

    for node in graph.nodes:
        if node.op in (STORE, FETCH) or is_gathered_once(node):
            operand = nodes.get(node.operands[0].name) if len(node.operands) == 1 else None
            if operand is None or node.outputs != (operand.outputs[node.operands[0].index],) or len(node.args) != 1:
                return node, "is not what it moves"
            instead[Ref(node.name)] = traced(node.operands[0])
        elif not node.is_source and node.target:
            first = nodes.get(node.target)
            if first is None or first.is_source or first.phase != "forward" or node.phase != "backward":
                return node, f"says that it repeats {node.target!r}, which it cannot"
            if call(first) != call(node):
                return node, f"says that it repeats %{first.name}, and is another call"
            if draws(first):
                return node, f"repeats %{first.name}, which draws random numbers"
            instead |= {Ref(node.name, i): Ref(node.target, i) for i in range(len(node.outputs))}
        nodes[node.name] = node
    return None
