"""What one layer, the embedding and the head of a planned model take and hold: stages are made of these.

The plan has three layers, of which the middle one counts. Its operators are priced one behind the other, collectives of
tensor parallel among them, as the published programs wait for each where it stands. Of backward, what a lower layer
waits for is I, the rest W; what runs again counts to I.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.ir.graph import Node, Ref
from autopar.ir.layout import local_type
from autopar.ir.work import VIEWS
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.simulate.timeline import events_of
from benchmarks.replay.recompute import AGAIN, SHARE, layer_of, storage_of
from benchmarks.replay.repeat import MIDDLE
from cost_models.simulator import COMPUTE

LAYER, FRONT, HEAD = "layer", "front", "head"
PARTS = (LAYER, FRONT, HEAD)


@dataclass
class Part:
    """Seconds and bytes of one rank for one micro-batch. `saved`: what forward leaves to backward; `pending`: what W
    reads of activations and their gradients; `again`: what is made again and held in backward. `numel`: parameters.
    """

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    saved: int = 0
    pending: int = 0
    again: int = 0
    numel: int = 0


def part_of(node: Node) -> str | None:
    """None: of a layer that does not count."""
    layer = layer_of(node)
    if layer is not None:
        return LAYER if layer == MIDDLE else None
    where = node.target if node.op == "parameter" else node.module
    return FRONT if where.startswith(("embed", "drop", "model.embed")) else HEAD


def parts_of(plan: Plan, pricer: Pricer, pieces: int = 1) -> dict[str, Part]:
    """Of a plan of three layers. Collectives run beside the products that they feed, but for one of so many pieces."""
    found = {name: Part() for name in PARTS}
    node_of, first = plan.graph.by_name, _needed_below(plan)
    for event in events_of(plan, pricer):
        name = str(dict(event.about).get("node", ""))
        if not event.seconds or not name or event.phase not in ("forward", "backward"):
            continue
        node = node_of[name]
        part = part_of(node)
        if part is not None:
            one = found[part]
            spent = event.seconds / (1 if event.stream == COMPUTE else pieces)
            if node.phase == "forward" and event.phase == "forward":
                one.forward += spent
            elif name in first or name.endswith(AGAIN):
                one.inputs += spent
            else:
                one.weights += spent
    _bytes(plan, found, first)
    return found


def _bytes(plan: Plan, found: dict[str, Part], first: frozenset[str]) -> None:
    nodes, node_of = plan.graph.nodes, plan.graph.by_name
    backward = [node for node in nodes if node.phase == "backward" and node.op not in VIEWS and node.op != SHARE]
    own = [node for node in backward if not node.name.endswith(AGAIN)]
    late = [node for node in own if node.name not in first and part_of(node) == LAYER]
    within = {node.name for node in late}
    for ref in _storages(plan, backward):
        node = node_of[ref.name]
        if node.phase == "forward" and not node.is_source and (part := part_of(node)) is not None:
            found[part].saved += _local(plan, ref)
    for ref in _storages(plan, own):
        if ref.name.endswith(AGAIN) and (part := part_of(node_of[ref.name])) is not None:
            found[part].again += _local(plan, ref)
    found[LAYER].pending = sum(
        _local(plan, ref) for ref in _storages(plan, late)
        if ref.name not in within and not node_of[ref.name].is_source
    )  # fmt: skip
    for node in nodes:
        if node.op == "parameter" and (part := part_of(node)) is not None:
            (type,) = node.outputs
            assert type is not None
            found[part].numel += local_type(type, plan.choices[node.name].gives[0], plan.mesh).numel


def _storages(plan: Plan, readers: Iterable[Node]) -> dict[Ref, None]:
    """What these operators read, through views, each once."""
    found: dict[Ref, None] = {}
    for reader in readers:
        for ref in reader.operands:
            found[storage_of(ref, plan.graph)] = None
    return found


def _local(plan: Plan, ref: Ref) -> int:
    layout = plan.choices[ref.name].gives[ref.index]
    return local_type(plan.graph.type_of(ref), layout, plan.mesh).nbytes


def _needed_below(plan: Plan) -> frozenset[str]:
    """Backward operators whose results a lower layer's backward, or the embedding's, needs."""
    readers: dict[str, list[Node]] = defaultdict(list)
    for node in plan.graph.nodes:
        for ref in node.operands:
            readers[ref.name].append(node)
    found: set[str] = set()
    for node in reversed(plan.graph.nodes):
        if node.phase != "backward":
            continue
        rank = _height(node)
        if any(other.name in found or _height(other) < rank for other in readers[node.name]):
            found.add(node.name)
    return frozenset(found)


def _height(node: Node) -> int:
    layer = layer_of(node)
    if layer is not None:
        return layer
    return -1 if part_of(node) == FRONT else 10**6
