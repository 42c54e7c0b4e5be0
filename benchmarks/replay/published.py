"""The plan that was published, not our optimum: every parameter where its authors put it, layouts around it by policy.

torchtitan: one axis is FSDP. A second one is tensor parallel with sequence parallel (`apply_tp`): q, k, v, gate, up and
the logits by columns, o and down by rows, the embedding by its vocabulary; between them activations are split along the
sequence, and the loss is taken of split logits. What that leaves open is decided by price: where a value that several
operators read is gathered. Or the second one is context parallel: the sequence is split everywhere, keys and values go
round in attention, and parameters are in pieces over both axes.

Megatron (2020): one axis of tensor parallel, activations whole between the products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Node, TensorType
from autopar.ir.layout import Layout, Partial, Placement, Replicate, Shard
from autopar.ir.mesh import Mesh
from autopar.ir.work import VIEWS, flops_of
from autopar.plan import Plan
from autopar.propose.strategies import Strategy, operand_types
from autopar.search.policies import restrict
from autopar.search.request import Request
from autopar.search.search import Question, answer, ask
from cost_models.hardware import Hardware
from cost_models.steps import MATRIX_KINDS

BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")  # [out, in]: the outputs are split
BY_ROWS = ("o_proj", "down_proj")
CONTEXT = "context"  # the axis of context parallel
SEQUENCE = 1  # the dim of an activation [batch, sequence, width] that sequence parallel splits


def plan_as_published(graph: Graph, mesh: Mesh, hardware: Hardware, optimizer: str = "adamw") -> Plan:
    """torchtitan's: FSDP on the first axis; on a second one tensor parallel with sequence parallel, or context parallel
    ("context").
    """
    policy = "fsdp" if len(mesh.sizes) == 1 else "ring" if CONTEXT in mesh.names else "fsdp+tensor-parallel"
    question = ask(graph, mesh, hardware, optimizer=optimizer)
    fixed = {node.target: stored(node.target, mesh) for node in graph.nodes if node.op == "parameter"}
    if policy == "fsdp+tensor-parallel":
        question = replace(question, strategies=_narrowed(question, policy, fixed, SEQUENCE))
    return answer(question, Request(policy=policy, fixed=fixed, tied=True))


def plan_of_megatron(graph: Graph, mesh: Mesh, hardware: Hardware, split: int | None = None) -> Plan:
    """Tensor parallel on the only axis, without an optimizer: what the Optimus paper compares with. Between products
    activations are whole, or split along the dim `split` (sequence parallel).
    """
    question = ask(graph, mesh, hardware, optimizer="none")
    if mesh.ranks == 1:
        return answer(question, Request(tied=True))
    fixed: dict[str, Layout] = {}
    for node in graph.nodes:
        if node.op == "parameter":
            owner, leaf = f".{node.target}".rsplit(".", 2)[-2:]
            by_columns = owner in BY_COLUMNS or owner == "embed_tokens"
            by_rows = owner in BY_ROWS and leaf == "weight"
            fixed[node.target] = (Shard(0) if by_columns else Shard(1) if by_rows else Replicate(),)
    question = replace(question, strategies=_narrowed(question, "tensor-parallel", fixed, split))
    return answer(question, Request(policy="tensor-parallel", fixed=fixed, tied=True))


def stored(parameter: str, mesh: Mesh) -> Layout:
    """How torchtitan stores a parameter; FSDP splits a dim that tensor parallel leaves whole.

    FSDP2 splits dim 0 always, even where tensor parallel has split it: the same bytes in another order, which our
    layouts cannot name.
    """
    owner = parameter.rsplit(".", 2)[-2]
    if len(mesh.sizes) == 1 or CONTEXT in mesh.names:
        return tuple(Shard(0) if size > 1 else Replicate() for size in mesh.sizes)
    if owner in BY_COLUMNS or owner == "embed_tokens":
        return Shard(1), Shard(0)
    if owner in BY_ROWS:
        return Shard(0), Shard(1)
    return Shard(0), Replicate()


@dataclass(frozen=True)
class _Wish:
    """What a strategy must do on the tensor axis: take weights as they lie, give gradients as the weights lie, and
    split values of the shape `stream` along the dim `split`, or with None not at all."""

    axis: int
    lies: tuple[Placement | None, ...]
    target: Placement | None
    stream: tuple[int, ...]
    split: int | None

    def fits(self, option: Strategy, types: tuple[TensorType | None, ...]) -> bool:
        takes, gives = ([layout[self.axis] for layout in side] for side in (option.takes, option.gives))
        if any(lie is not None and take != lie for lie, take in zip(self.lies, takes, strict=True)):
            return False
        if self.target is not None and gives[0] != self.target:
            return False
        wanted = Replicate() if self.split is None else Shard(self.split)
        return all(
            type is None or type.shape != self.stream or isinstance(place, Partial) or place == wanted
            for type, place in zip(types, [*takes, *gives], strict=True)
        )


def _narrowed(
    question: Question, policy: str, fixed: Mapping[str, Layout], split: int | None
) -> dict[str, tuple[Strategy, ...]]:
    """The policy's strategies that use each weight as it lies; between products activations are split along `split` on
    the last axis, or whole."""
    graph, mesh = question.graph, question.pricer.mesh
    kept = restrict(policy, graph, question.strategies, mesh)
    axis, node_of = len(mesh.sizes) - 1, graph.by_name
    lies_at, target_at = _weights(graph, fixed, axis), _gradients(graph, fixed, axis)
    stream = _stream(graph)
    made: dict[object, tuple[Strategy, ...]] = {}
    for node in graph.nodes:
        if node.is_source:
            continue
        types = operand_types(node, node_of)
        free = node.op in VIEWS or flops_of(node, types)[1] in MATRIX_KINDS or "embedding" in node.op
        lies = tuple(lies_at.get(ref.name) for ref in node.operands)
        wish = _Wish(axis, lies, target_at.get(node.name, lies_at.get(node.name)), () if free else stream, split)
        key = (id(kept[node.name]), types, wish)
        if key not in made:
            ends = (*types, *node.outputs)
            made[key] = tuple(option for option in kept[node.name] if wish.fits(option, ends)) or kept[node.name]
        kept[node.name] = made[key]
    return kept


def _stream(graph: Graph) -> tuple[int, ...]:
    """The shape of what flows from layer to layer: the embedding's result, or a model's only floating input."""
    for node in graph.nodes:
        (type, *_) = node.outputs
        if type is not None and (node.op == "aten.embedding.default" or (node.op == "input" and len(type.shape) == 3)):
            return type.shape
    raise ValueError("the model has no embedding, and no input [batch, sequence, width]")


def _weights(graph: Graph, fixed: Mapping[str, Layout], axis: int) -> dict[str, Placement]:
    """Matrices, and what only casts or shares them: where the axis splits them."""
    found: dict[str, Placement] = {}
    for node in graph.nodes:
        shape = node.outputs[0].shape if node.outputs[0] is not None else ()
        if node.op == "parameter" and len(shape) > 1:
            found[node.name] = fixed[node.target][axis]
        elif len(node.operands) == 1 and node.operands[0].name in found and _only_passes(node):
            found[node.name] = found[node.operands[0].name]
    return found


def _gradients(graph: Graph, fixed: Mapping[str, Layout], axis: int) -> dict[str, Placement]:
    """Gradients of matrices, and what they are cast or viewed from, back to the product."""
    found: dict[str, Placement] = {}
    node_of = graph.by_name
    for result in graph.results:
        if result.kind != "gradient" or result.ref is None or len(graph.type_of(result.ref).shape) < 2:
            continue
        node: Node | None = node_of[result.ref.name]
        while node is not None:
            found[node.name] = fixed[result.target][axis]
            node = node_of[node.operands[0].name] if len(node.operands) == 1 else None
    return found


def _only_passes(node: Node) -> bool:
    return node.op == "aten._to_copy.default" or node.op in VIEWS
