"""Activation checkpointing, and the order in which FSDP2 works, as a rewriting of the traced graph.

autopar's plans do not decide yet what to recompute; the published runs did. So the replay writes it into the graph,
and everything behind (layouts, prices, timeline, memory) sees ordinary operators:

- A layer's forward operators whose results backward needs, and which are not kept, run a second time in backward, in
  front of the first backward operator of that layer which needs one of them: the whole layer at once, as
  `torch.utils.checkpoint` unpacks it. Kept are the layer's input and what the policy keeps:
      "full"   nothing else
      "op"     attention and every second product, from the first: torchtitan's selective checkpointing per operator
      "core"   all but what a module `core` makes before its last product (scores, softmax, dropout): Megatron's
               selective recomputing
      "fused"  products, attention and the residual sums behind them: what is between, norms, rotary embeddings and
               gates, a compiler makes again within the kernels of backward that read it (torch.compile's min-cut)
      "none"   everything; nothing is recomputed
  What backward does not need is not run again (torch stops early; a compiler drops it): a layer's last product. With
  `whole` it is run all the same, collectives included, as reentrant checkpointing does (Megatron).
- With `keep_sums` "op" also keeps the residual sums behind products: torchtitan keeps what a reduce-scatter gives, and
  under tensor parallel that is what such a sum reads (same bytes; the product need not run again).
- With `hold_saved` whatever "op" keeps is held until the layer's backward even if backward does not read it, as the
  eager implementation caches every such output; a compiler drops it.
- Backward casts and gathers a layer's parameters once more, once for all their readers; what belongs to no layer
  (embedding, logits) stays gathered between its uses, as FSDP2's root does. All casts stand at the head of the forward
  pass, and of the layers' backward pass, so that nothing keeps a gather from being launched ahead.
- What a product outside the layers reads (the logits' input) is held as it reads it, gathered where it gathers it, for
  the products of backward: autograd saves operands, not what they were gathered from.
- Gradients are cast to the dtype that sums them as soon as they are there, not at the end of the program.
- Outputs that do not enter the loss (logits) are not kept: torchtitan deletes them before backward.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

from autopar.ir.graph import Graph, Node, Ref, map_refs
from autopar.ir.work import VIEWS, flops_of
from autopar.propose.strategies import operand_types
from cost_models.steps import MATRIX_KINDS

POLICIES = ("none", "fused", "full", "op", "core")
AGAIN = "_again"
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)(?:\.|$)")
CORE = re.compile(r"(?:^|\.)core(?:\.|$)")
SHARE = "autopar.share"


def layer_of(node: Node) -> int | None:
    """The number of the layer that an operator (or parameter) belongs to."""
    found = LAYER.search(node.target if node.op == "parameter" else node.module)
    return None if found is None else int(found[1])


def storage_of(ref: Ref, graph: Graph) -> Ref:
    """What a value is behind views and shared reads."""
    while (node := graph.by_name[ref.name]).op in VIEWS or node.op == SHARE:
        ref = node.operands[0]
    return ref


def checkpointed(
    graph: Graph, policy: str, *, keep_sums: bool = False, hold_saved: bool = False, whole: bool = False
) -> Graph:
    """The graph of the step with that policy; see the module."""
    if policy not in POLICIES:
        raise ValueError(f"no checkpointing policy {policy!r}; known: {', '.join(POLICIES)}")
    return _Rewriting(graph, policy, keep_sums, hold_saved, whole).graph()


def kept_by_policy(graph: Graph, policy: str, keep_sums: bool = False) -> frozenset[str]:
    """Names of the forward operators inside layers whose results the policy keeps for backward."""
    if policy == "none":
        return frozenset(node.name for node in graph.nodes if node.phase == "forward")
    if policy == "full":
        return frozenset()
    if policy == "core":
        return _outside_cores(graph)
    kept: set[str] = set()
    products: dict[int, list[str]] = defaultdict(list)
    for node in graph.nodes:
        layer = layer_of(node)
        if node.phase != "forward" or layer is None or node.is_source:
            continue
        match flops_of(node, operand_types(node, graph.by_name))[1]:
            case "attention":
                kept.add(node.name)
            case kind if kind in MATRIX_KINDS:
                products[layer].append(node.name)
                if len(products[layer]) % 2 or policy == "fused":
                    kept.add(node.name)
            case _:
                if keep_sums and node.op == "aten.add.Tensor" and {r.name for r in node.operands} & {*products[layer]}:
                    kept.add(node.name)
    return frozenset(kept)


def _outside_cores(graph: Graph) -> frozenset[str]:
    kept: set[str] = set()
    last: dict[int | None, str] = {}
    for node in graph.nodes:
        if node.phase == "forward":
            kept.add(node.name)
            if CORE.search(node.module):
                kept.remove(node.name)
                if not node.is_source and flops_of(node, operand_types(node, graph.by_name))[1] in MATRIX_KINDS:
                    last[layer_of(node)] = node.name
    return frozenset(kept | {*last.values()})


class _Rewriting:
    def __init__(self, graph: Graph, policy: str, keep_sums: bool, hold_saved: bool, whole: bool) -> None:
        self.before, self.node_of, self.hold_saved, self.whole = graph, graph.by_name, hold_saved, whole
        self.kept = kept_by_policy(graph, policy, keep_sums)
        self.checkpoints = policy != "none"
        self.weights = self._weights()
        self.borders = self._borders()
        self.products = {
            node.name for node in graph.nodes
            if not node.is_source and flops_of(node, operand_types(node, self.node_of))[1] in MATRIX_KINDS
        }  # fmt: skip
        self.operands = {
            ref.name for node in graph.nodes
            if node.name in self.products and node.phase == "forward" and layer_of(node) is None
            for ref in node.operands if ref.name not in self.weights
        }  # fmt: skip
        self.forward = [node for node in graph.nodes if node.phase == "forward"]
        self.again = self._needed_again()  # layer -> names of the nodes that run a second time
        self.share_of = {
            self.node_of[name].operands[0].name: name
            for names in self.again.values() for name in names if self.node_of[name].op == SHARE
        }  # fmt: skip
        self.made: list[Node] = []
        self.names: set[str] = set()

    def _weights(self) -> dict[str, int | None]:
        """What is made of one parameter alone, such as its cast -> the parameter's layer."""
        found: dict[str, int | None] = {}
        for node in self.before.nodes:
            made_of = [self.node_of[ref.name] for ref in node.operands]
            if len(made_of) == 1 and (made_of[0].op == "parameter" or made_of[0].name in found):
                found[node.name] = found.get(made_of[0].name, layer_of(made_of[0]))
        return found

    def _borders(self) -> set[str]:
        """Names of forward operators inside a layer that another layer, or none, reads: above all a layer's result."""
        found: set[str] = set()
        for node in reversed(self.before.nodes):
            if node.phase == "forward":
                # A view of a border is no other value than what it looks at.
                outside = node.name in found and node.op in VIEWS
                layer = layer_of(node)
                found |= {ref.name for ref in node.operands if outside or layer_of(self.node_of[ref.name]) != layer}
        return found

    def _needed_again(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = defaultdict(set)
        if not self.checkpoints:
            return found
        todo = [ref.name for node in self.before.nodes if node.phase == "backward" for ref in node.operands]
        while todo:
            node = self.node_of[todo.pop()]
            layer = layer_of(node)
            if not self._is_forgotten(node) or layer is None or node.name in found[layer]:
                continue
            found[layer].add(node.name)
            todo += [ref.name for ref in node.operands if layer_of(self.node_of[ref.name]) == layer]
        for node in self.before.nodes if self.whole else ():
            layer = layer_of(node)
            is_border_view = node.name in self.borders and node.op in VIEWS
            if node.phase != "forward" or node.is_source or node.name in self.weights or is_border_view:
                continue
            if layer is not None:
                found[layer].add(node.name)
        return found

    def _is_forgotten(self, node: Node) -> bool:
        inside = node.phase == "forward" and not node.is_source and layer_of(node) is not None
        return inside and not {node.name} & (self.kept | self.weights.keys() | self.borders)

    # --- the new program -----------------------------------------------------------------------------------------

    def graph(self) -> Graph:
        inner = [node for node in self.before.nodes if not node.is_source and node.name not in self.weights]
        for node in self.before.nodes:
            if node.is_source:
                self._add(node)
        for node in self.before.nodes:
            if node.name in self.weights:
                self._add(node)
        for node in inner:
            if node.phase == "forward":
                self._shares_of(node, "")
                self._add(self._renamed(node, is_first=True))
        casts = self._casts_of_gradients()
        remade: set[int] = set()
        has_cast = False
        for node in inner:
            if node.phase == "forward" or node.name in casts.values():
                continue
            if not has_cast and layer_of(node) is not None:
                has_cast = True
                self._cast_again(inner)
            self._remake(node, remade)
            self._shares_of(node, AGAIN)
            self._add(self._renamed(node))
            if node.name in casts:
                self._add(self.node_of[casts[node.name]])
        results = tuple(r for r in self.before.results if r.kind != "output" or self._is_loss(r.ref))
        return Graph(tuple(self.made), results)

    def _add(self, node: Node) -> None:
        if node.name not in self.names:
            self.names.add(node.name)
            self.made.append(node)

    def _casts_of_gradients(self) -> dict[str, str]:
        """Node -> the node that only casts it for the sum, where it is a gradient."""
        ends = {r.ref.name for r in self.before.results if r.kind == "gradient" and r.ref is not None}
        nodes = (node for node in self.before.nodes if node.name in ends and len(node.operands) == 1)
        return {node.operands[0].name: node.name for node in nodes if "to_" in node.op}

    def _is_loss(self, ref: Ref | None) -> bool:
        return ref is None or self.before.type_of(ref).shape == ()

    def _remake(self, reader: Node, remade: set[int]) -> None:
        """In front of the first backward operator that reads something of a layer which must run again: that layer."""
        for ref in reader.operands:
            node = self.node_of[ref.name]
            layer = layer_of(node)
            if layer is None or layer in remade or node.name not in self.again[layer] - self.borders:
                continue
            remade.add(layer)
            if self.hold_saved:
                self._hold(layer)
            for old in self.forward:
                if old.name in self.again[layer]:
                    self._shares_of(old, AGAIN)
                    self._add(replace(self._renamed(old), name=old.name + AGAIN, phase="backward"))

    def _hold(self, layer: int) -> None:
        for node in self.forward:
            if node.name in self.kept and layer_of(node) == layer:
                name = f"{node.name}_held"
                self._add(replace(node, name=name, op=SHARE, args=(Ref(node.name),), kwargs=(),
                                  outputs=node.outputs[:1], phase="backward"))  # fmt: skip

    def _shares_of(self, reader: Node, suffix: str) -> None:
        """What the reader needs that is made of a parameter alone, as a value that its readers share; and the operands
        of products outside the layers."""
        for ref in reader.operands:
            if reader.name in self.products and ref.name in self.operands:
                end = self.node_of[ref.name]
                self._add(replace(end, name=_shared(end, "_saved"), op=SHARE, args=(ref,), kwargs=()))
            if ref.name in self.weights and (suffix or self.weights[ref.name] is None):
                end = self.node_of[ref.name]
                own = "" if self.weights[ref.name] is None else suffix
                self._add(replace(end, name=_shared(end, own), op=SHARE, args=(Ref(end.name + own),), kwargs=(),
                                  phase="backward" if own else "forward"))  # fmt: skip

    def _cast_again(self, inner: list[Node]) -> None:
        """Backward's own casts of the layers' parameters, of the last layer first."""
        read = {ref.name for node in inner if node.phase == "backward" for ref in node.operands}
        read |= {ref.name for names in self.again.values() for name in names for ref in self.node_of[name].operands}
        names = [name for name, layer in self.weights.items() if layer is not None and name in read]
        for name in sorted(names, key=lambda name: -(self.weights[name] or 0)):
            node = self.node_of[name]
            if any(ref.name in self.weights for ref in node.operands):
                raise ValueError(f"%{name} is made of a parameter in several steps, which is not provided for")
            self._add(replace(node, name=name + AGAIN, phase="backward"))

    def _renamed(self, node: Node, is_first: bool = False) -> Node:
        """An operator with the values that it reads now. `is_first`: in the forward pass."""

        def now(ref: Ref) -> Ref:
            read = self.node_of[ref.name]
            layer = layer_of(read)
            if node.name in self.products and ref.name in self.operands:
                return Ref(_shared(read, "_saved"), ref.index)
            if ref.name in self.weights:
                if self.weights[ref.name] is None:
                    return Ref(_shared(read, ""), ref.index)
                return ref if is_first else Ref(_shared(read, AGAIN), ref.index)
            if not is_first and layer is not None and ref.name in self.again[layer] - self.borders:
                # What runs again is shared by its readers there and by backward's: it is gathered once for all.
                shared = self.share_of.get(ref.name) if node.op == SHARE and node.phase == "backward" else None
                return Ref((shared or ref.name) + AGAIN, ref.index)
            return ref

        kwargs = tuple((key, map_refs(arg, now)) for key, arg in node.kwargs)
        return replace(node, args=map_refs(node.args, now), kwargs=kwargs)


def _shared(node: Node, suffix: str) -> str:
    return f"{node.name}{suffix}_shared"
