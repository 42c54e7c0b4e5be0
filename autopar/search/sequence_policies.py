"""Policies of long sequences, each on one axis: Megatron's sequence parallelism, Ulysses, a ring of keys and values.

Ulysses and the ring split the sequence as data parallelism splits the batch: what holds it is split there wherever
that is possible, and attention does what gives the policy its name. Where an operator has made one dim of batch and
sequence, as losses do, the batch is split from there on; with one sample a rank there is no such difference. Megatron
is a tensor axis whose attention splits heads and whose norms split the sequence; what lies between follows, as it is
cheaper so.
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from autopar.ir.attention import ATTENTION, OPERANDS_OF_ATTENTION
from autopar.ir.graph import Graph, Node, TensorType, batch_size
from autopar.ir.layout import Shard
from autopar.ir.mesh import Mesh
from autopar.propose.strategies import Strategy
from autopar.rules.attended import GROUPED, HEADS, RING
from autopar.search.policy_axis import Kind, PolicyAxis, Strategies, prefer

MEGATRON = "megatron-sp"
ROLES = {MEGATRON: (HEADS, GROUPED), "ulysses": (HEADS, GROUPED), "ring": (RING,)}  # of attention, the best first
NORMS = (
    "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default",
    "aten._fused_rms_norm.default", "aten._fused_rms_norm_backward.default",
)  # fmt: skip
SUM, SHARE = "aten.sum.dim_IntList", "autopar.share"


class DoesNotApply(ValueError):
    """A policy has nothing that it could do with a model on a mesh; the sentence says why."""


def with_attention(graph: Graph, plain: Strategies, strategies: Strategies) -> dict[str, tuple[Strategy, ...]]:
    """`plain`, with all that attention can do: its patterns are what these policies are about."""
    return {**plain, **{node.name: strategies[node.name] for node in graph.nodes if node.op in OPERANDS_OF_ATTENTION}}


def along_the_sequence(
    policy: str, axis: int, mesh: Mesh, graph: Graph, strategies: Strategies
) -> dict[str, tuple[Strategy, ...]]:
    """The strategies that the policy would use on that axis. Raises DoesNotApply: to a model
    without attention, or without a sequence, or with heads or a sequence that the axis does not divide.
    """
    where, size = f"policy {policy} on axis {mesh.names[axis]}={mesh.sizes[axis]}", mesh.sizes[axis]
    if size == 1:
        raise DoesNotApply(f"{where}: one rank splits nothing; the policy works on the last axis of the mesh")
    attention = [node for node in graph.nodes if node.op in OPERANDS_OF_ATTENTION]
    if not attention:
        raise DoesNotApply(f"{where}: the model has no attention that is known as one, which is what the policy splits")
    for node in attention:
        if not any(option.roles[axis] in ROLES[policy] for option in strategies[node.name]):
            _refuse_attention(policy, where, size, node, graph)
    length = _sequence(graph)
    if length == 0 or length % size:
        told = f"a sequence of {length}, which {size} ranks do not divide" if length else "no input with a sequence"
        raise DoesNotApply(f"{where}: the model has {told}")
    made = _Megatron if policy == MEGATRON else _Sequence
    walk = made(policy, axis, graph, strategies, length)
    kept = walk.run()
    if policy == MEGATRON and not walk.norms:
        raise DoesNotApply(f"{where}: no layer norm or RMS norm of this model can be split along the sequence")
    return kept


def _refuse_attention(policy: str, where: str, size: int, node: Node, graph: Graph) -> NoReturn:
    forward = node.op == ATTENTION
    q = graph.type_of(node.operands[0 if forward else 1])
    called = node.module or f"%{node.name}"
    if policy == "ring":
        raise DoesNotApply(
            f"{where}: the attention of {called}, a sequence of {q.shape[2]}, cannot go round {size} ranks; it takes "
            "no mask but the causal one, no dropout, queries and keys of equal length, and a length that divides"
        )
    raise DoesNotApply(f"{where}: the {q.shape[1]} heads of {called} do not divide over {size} ranks")


def _sequence(graph: Graph) -> int:
    """The length that most inputs have behind the batch; 0 where none has."""
    batch = batch_size(graph)
    types = [node.outputs[0] for node in graph.nodes if node.op == "input"]
    lengths = Counter(t.shape[1] for t in types if t is not None and len(t.shape) > 1 and t.shape[0] == batch)
    return max(lengths, key=lambda length: lengths[length], default=0)


def _sequence_of(result: TensorType | None) -> Kind:
    """Where a result of attention, [batch, heads, sequence, ...], has the sequence; states of draws have none."""
    return 2 if result is not None and len(result.shape) > 2 else "summed"


class _Sequence(PolicyAxis):
    """An axis that splits the sequence. A number among kinds is the dim that holds it, or, behind what has made one dim
    of batch and sequence, that dim.
    """

    def __init__(self, policy: str, axis: int, graph: Graph, strategies: Strategies, length: int) -> None:
        super().__init__("fsdp", axis, graph, strategies)
        self.roles, self.length = ROLES[policy], length
        self.norms = 0

    def kind_of_source(self, node: Node) -> Kind:
        type = node.outputs[0]
        if node.op != "input":
            return super().kind_of_source(node)
        assert type is not None
        return 1 if len(type.shape) > 1 and type.shape[:2] == (self.batch, self.length) else "summed"

    def source(self, node: Node, options: tuple[Strategy, ...]) -> tuple[tuple[Strategy, ...], tuple[Kind, ...]]:
        if node.op == "input" and self.kind_of_source(node) == 1:
            return prefer(options, lambda option: option.gives[0][self.axis] == Shard(1)), (1,)
        return super().source(node, options)

    def operator(self, node: Node, options: tuple[Strategy, ...]) -> tuple[tuple[Strategy, ...], tuple[Kind, ...]]:
        if node.op in OPERANDS_OF_ATTENTION:
            kept = prefer(options, *(self.does(role) for role in self.roles))
            results: list[Kind] = [_sequence_of(result) for result in node.outputs]
            return kept, tuple(results)
        if node.op == SHARE:  # of what attention saves, in the layout that its backward reads
            (ref,) = node.operands
            return options, (self.kinds[ref.name][ref.index],)
        return super().operator(node, options)

    def along_the_batch(self, options: tuple[Strategy, ...], kinds: tuple[Kind, ...]) -> tuple[Strategy, ...]:
        rows: tuple[Kind, ...] = tuple(0 if isinstance(kind, int) else kind for kind in kinds)
        return super().along_the_batch(options, kinds) or super().along_the_batch(options, rows)


class _Megatron(PolicyAxis):
    """A tensor axis with norms along the sequence. `norms`: how many are."""

    def __init__(self, policy: str, axis: int, graph: Graph, strategies: Strategies, length: int) -> None:
        super().__init__("tensor-parallel", axis, graph, strategies)
        self.roles, self.length, self.norms = ROLES[policy], length, 0

    def operator(self, node: Node, options: tuple[Strategy, ...]) -> tuple[tuple[Strategy, ...], tuple[Kind, ...]]:
        kept, results = super().operator(node, options)
        if node.op in OPERANDS_OF_ATTENTION:
            return prefer(options, *(self.does(role) for role in self.roles)), results
        if self._is_of_a_norm(node):
            along = tuple(option for option in options if self.takes(option)[0] == Shard(1))
            self.norms += bool(along)
            return along or kept, results
        return kept, results

    def _is_of_a_norm(self, node: Node) -> bool:
        """Whether it is a norm of tokens, or its sum over the features of each, where it is written out."""
        if node.op not in (*NORMS, SUM):
            return False
        of, made = self.graph.type_of(node.operands[0]), node.outputs[0]
        summed = (*of.shape[:-1], 1)
        return of.shape[1:2] == (self.length,) and (node.op != SUM or (made is not None and made.shape == summed))
