"""propose: every way to run a node on the mesh, from its factor rule. One `Strategy` carries its whole body.

Per mesh axis a node splits one factor, or nothing, or takes some operands as partial sums (where it is linear in them).
The strategies of a node are the product over the axes, less those that do not divide evenly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from autopar.ir.attention import OPERANDS_OF_ATTENTION, priced_as
from autopar.ir.graph import Arg, Graph, Node, Ref, TensorType, map_refs
from autopar.ir.layout import REPLICATE, Layout, Partial, Placement, Shard, local_shape, local_type
from autopar.ir.mesh import Mesh
from autopar.ir.work import FETCH, STORE, VIEWS, bytes_moved, flops_of, kernels_of
from autopar.propose.stored import layouts_stored
from autopar.rules.bodies import BODIES
from autopar.rules.looped import Offer
from autopar.rules.notation import Rule
from autopar.rules.patterns import is_pattern, offered, offers
from autopar.rules.table import rule_of
from cost_models.steps import Comm, Compute, Move, Step, over

NOTHING = ""  # the role of an axis that splits nothing


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run one node.

    `roles`: per axis the factor it splits, "" for nothing, or "+0" where operand 0 is a partial sum. `takes` and
    `gives`: the layouts of operands and results. `body`: the local body that stands in for the operator, if its
    arithmetic changes when split, the axes that split the factors it is for, and the product of those factors' global
    sizes; or the pattern whose loop does, the axis along which it sends, and 1. `steps`: what one rank performs.
    `workspace`: bytes that a pattern holds beside operands and results; `workspace_alone`: where no send runs beside
    work. `stored`: of a parameter that a step stores otherwise than its micro-batches read it, the layout (see
    `autopar.propose.stored`).
    """

    roles: tuple[str, ...]
    takes: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    body: str
    body_axes: tuple[str, ...]
    body_size: int
    steps: tuple[Step, ...]
    workspace: int = 0
    workspace_alone: int = 0
    stored: Layout = ()

    @property
    def lies(self) -> Layout:
        """Of a parameter, the layout in which it is stored."""
        return self.stored or self.gives[0]


Signature = tuple[object, ...]


def signature_of(node: Node, operands: Sequence[TensorType]) -> Signature:
    """Nodes of equal signature have the same strategies: operator, arguments, types, and which operands are one value,
    as that is read once. A source counts by type and kind.
    """
    number_of: dict[Ref, Ref] = {}

    def numbered(ref: Ref) -> Ref:
        return number_of.setdefault(ref, Ref(str(len(number_of))))

    def blank(arg: Arg) -> object:
        return map_refs(arg, numbered)

    args = blank(node.args), tuple((key, blank(arg)) for key, arg in node.kwargs)
    return node.op, repr(args), tuple(operands), node.outputs


def operand_types(node: Node, node_of: Mapping[str, Node]) -> tuple[TensorType, ...]:
    types: list[TensorType] = []
    for ref in node.operands:
        type = node_of[ref.name].outputs[ref.index]
        assert type is not None, (node.name, ref)
        types.append(type)
    return tuple(types)


def propose(
    graph: Graph, mesh: Mesh, known: Mapping[str, tuple[Strategy, ...]] = MappingProxyType({})
) -> tuple[dict[str, tuple[Strategy, ...]], tuple[str, ...]]:
    """(strategies of every node, names of the nodes without a rule). Nodes of one signature share one tuple. `known`:
    strategies of nodes, as they are; only the others are looked at.
    """
    of_signature: dict[Signature, tuple[Strategy, ...]] = {}
    without: list[str] = []
    unruled: set[Signature] = set()
    found = dict(known)
    node_of = graph.by_name
    for node in graph.nodes:
        if node.name in known:
            continue
        types = operand_types(node, node_of)
        key = signature_of(node, types)
        if key not in of_signature:
            rule = None if node.is_source else rule_of(node, types)
            if rule is None and not node.is_source:
                unruled.add(key)
            if node.is_source:
                of_signature[key] = source_strategies(node, mesh, stored_apart=graph.rounds.reduces_once)
            else:
                of_signature[key] = node_strategies(node, types, rule, mesh)
        if key in unruled:
            without.append(node.name)
        found[node.name] = of_signature[key]
    return found, tuple(without)


def source_strategies(node: Node, mesh: Mesh, *, stored_apart: bool = False) -> tuple[Strategy, ...]:
    """Layouts in which a value may enter the program: parameters, inputs and tangents split anywhere, the rest
    whole. `stored_apart`: parameters may be stored in more pieces than they are read in; those come last.
    """
    (type,) = node.outputs
    assert type is not None
    if node.op in ("buffer", "constant"):
        layouts: list[Layout] = [(REPLICATE,) * len(mesh.sizes)]
    else:
        layouts = even_layouts(type, mesh)
    nothing = (NOTHING,) * len(mesh.sizes)
    told = [Strategy(nothing, (), (layout,), "", (), 1, ()) for layout in layouts]
    if stored_apart and node.op == "parameter":
        told += [replace(one, stored=apart) for one in told for apart in layouts_stored(type, one.gives[0], mesh)]
    return tuple(told)


def even_layouts(type: TensorType, mesh: Mesh) -> list[Layout]:
    """All layouts of whole and evenly split axes; axes of size 1 split nothing."""
    shards: list[Placement] = [Shard(dim) for dim in range(len(type.shape))]
    per_axis = [[REPLICATE, *shards] if size > 1 else [REPLICATE] for size in mesh.sizes]
    return [layout for layout in itertools.product(*per_axis) if local_shape(type.shape, layout, mesh) is not None]


def node_strategies(node: Node, types: tuple[TensorType, ...], rule: Rule | None, mesh: Mesh) -> tuple[Strategy, ...]:
    """All strategies of an operator, those of patterns last; without a rule, the one that replicates it."""
    whole = (NOTHING,) * len(mesh.sizes)
    flops, kind = flops_of(node, types)
    if rule is None:
        return (make_strategy(node, types, None, whole, mesh, flops, kind),)
    behind = rule.behind
    splittable = (*rule.splittable, *behind)
    linear = [_linear_role(positions) for positions in rule.linear]
    per_axis = [
        [NOTHING, *(f for f in splittable if rule.sizes[f] % size == 0), *linear] if size > 1 else [NOTHING]
        for size in mesh.sizes
    ]
    found: list[Strategy] = []
    for roles in itertools.product(*per_axis):
        if _is_possible(rule, behind, roles, mesh):
            found.append(make_strategy(node, types, rule, roles, mesh, flops, kind))
    found += [_of_pattern(name, offer, mesh) for name, offer in offers(node, types, mesh)]
    return _undominated(found)


def _of_pattern(name: str, offer: Offer, mesh: Mesh) -> Strategy:
    steps, holds = offer.loop.steps(offer.axis, mesh.size(offer.axis)), offer.loop.workspace
    return Strategy(offer.roles, offer.takes, offer.gives, name, (offer.axis,), 1, steps, holds(True), holds(False))


def strategy_of(
    node: Node, types: tuple[TensorType, ...], roles: tuple[str, ...], mesh: Mesh, body: str = ""
) -> Strategy | None:
    """The strategy of an operator that splits as `roles` say; None where its rule, or the pattern, has no such one.
    `body`: as in `Strategy`.
    """
    if is_pattern(body):
        offer = offered(node, types, mesh, body, roles)
        return None if offer is None else _of_pattern(body, offer, mesh)
    rule = rule_of(node, types)
    behind: Mapping[str, frozenset[str]] = {} if rule is None else rule.behind
    known = set[str]() if rule is None else {*rule.splittable, *behind, *map(_linear_role, rule.linear)}
    for role, size in zip(roles, mesh.sizes, strict=True):
        if role and (size == 1 or role not in known):
            return None
    if rule is not None and not _is_possible(rule, behind, roles, mesh):
        return None
    return make_strategy(node, types, rule, roles, mesh, *flops_of(node, types))


def _linear_role(positions: frozenset[int]) -> str:
    return "+" + ",".join(map(str, sorted(positions)))


def _linear_positions(role: str) -> set[int]:
    return {int(position) for position in role[1:].split(",")}


def _is_possible(rule: Rule, behind: Mapping[str, frozenset[str]], roles: tuple[str, ...], mesh: Mesh) -> bool:
    """Whether sizes divide, what stands behind other factors is split where those are in pieces of one, and one local
    body at most stands in for the operator. `behind`: `rule.behind`.
    """
    if len({rule.bodies[role] for role in roles if role in rule.bodies}) > 1:
        return False
    parts: dict[str, int] = {}
    for role, size in zip(roles, mesh.sizes, strict=True):
        if any(parts.get(other, 1) < rule.sizes[other] for other in behind.get(role, ())):
            return False
        parts[role] = parts.get(role, 1) * size
    return all(rule.sizes[role] % count == 0 for role, count in parts.items() if role in rule.sizes)


def make_strategy(
    node: Node,
    types: tuple[TensorType, ...],
    rule: Rule | None,
    roles: tuple[str, ...],
    mesh: Mesh,
    flops: float,
    kind: str,
) -> Strategy:
    """The strategy of these roles; `flops` and `kind` are those of the whole operator."""
    if rule is None:
        takes: tuple[Layout, ...] = tuple((REPLICATE,) * len(roles) for _ in types)
        gives: tuple[Layout, ...] = tuple((REPLICATE,) * len(roles) for _ in node.outputs)
        body = ""
    else:
        takes = tuple(tuple(_taken(rule, i, role) for role in roles) for i in range(len(types)))
        gives = tuple(tuple(_given(rule, i, role) for role in roles) for i in range(len(node.outputs)))
        body = next((rule.bodies[role] for role in roles if role in rule.bodies), "")
    body_axes = tuple(mesh.names[i] for i, role in enumerate(roles) if rule is not None and role in rule.bodies)
    steps = steps_of(node, types, roles, takes, gives, body, body_axes, mesh, flops, kind)
    body_size = (
        math.prod(rule.sizes[factor] for factor, named in rule.bodies.items() if named == body)
        if rule is not None
        else 1
    )
    return Strategy(roles, takes, gives, body, body_axes, body_size, steps)


def steps_of(
    node: Node,
    types: Sequence[TensorType],
    roles: tuple[str, ...],
    takes: Sequence[Layout],
    gives: Sequence[Layout],
    body: str,
    body_axes: Sequence[str],
    mesh: Mesh,
    flops: float,
    kind: str,
) -> tuple[Step, ...]:
    """What one rank performs, where the whole operator does `flops`.

    Arithmetic only: with sizes that are `cost_models.formulas.Form` the steps are the closed forms of these numbers.
    """
    locals_in = tuple(local_type(type, layout, mesh) for type, layout in zip(types, takes, strict=True))
    locals_out = tuple(
        None if type is None else local_type(type, layout, mesh)
        for type, layout in zip(node.outputs, gives, strict=True)
    )
    split = 1
    for role, size in zip(roles, mesh.sizes, strict=True):
        if role and not role.startswith("+"):
            split *= size
    if node.op in (STORE, FETCH):
        src, dst = ("hbm", "host") if node.op == STORE else ("host", "hbm")
        return (Move(src, dst, locals_in[0].nbytes),)
    steps: list[Step] = []
    if node.op not in VIEWS:
        dtype = next((type.dtype for type in locals_out if type is not None), "float32")
        op = priced_as(node) if node.op in OPERANDS_OF_ATTENTION else node.op
        moved, kernels = 1.0 * bytes_moved(node, locals_in, locals_out), kernels_of(node, locals_in)
        steps.append(Compute(op, flops / split, moved, dtype, kernels, kind))
    if body:
        for collective, nbytes in BODIES[body].comm(node, locals_in, locals_out):
            steps.append(Comm(collective, over(body_axes), mesh.size(over(body_axes)), nbytes))
    return tuple(steps)


def _place(dims: Sequence[tuple[str, ...]], factor: str) -> Shard | None:
    return next((Shard(dim) for dim, factors in enumerate(dims) if factor in factors), None)


def _taken(rule: Rule, operand: int, role: str) -> Placement:
    if role.startswith("+"):
        return Partial("sum") if operand in _linear_positions(role) else REPLICATE
    return (_place(rule.inputs[operand], role) if role else None) or REPLICATE


def _given(rule: Rule, result: int, role: str) -> Placement:
    if role.startswith("+"):
        return Partial("sum")
    if not role:
        return REPLICATE
    if (shard := _place(rule.outputs[result], role)) is not None:
        return shard
    return REPLICATE if rule.reduce[result] == "same" else Partial(rule.reduce[result])


def _undominated(strategies: list[Strategy]) -> tuple[Strategy, ...]:
    """Of strategies with the same layouts in and out, the first: it differs in nothing that counts. Two patterns do, as
    one sends more than the other and computes less, and so does one that takes less room.
    """
    kept: dict[object, list[Strategy]] = {}
    for strategy in strategies:
        same = kept.setdefault((strategy.takes, strategy.gives), [])
        made = strategy.body, strategy.workspace
        if all(is_pattern(one.body) and (one.body, one.workspace) != made for one in same):
            same.append(strategy)
    return tuple(itertools.chain(*kept.values()))


def moved(node: Node, layout: Layout, mesh: Mesh) -> Strategy:
    """Of a store or a fetch: to the host or from it, in any layout."""
    (type,) = node.outputs
    assert type is not None
    roles = (NOTHING,) * len(mesh.sizes)
    steps = steps_of(node, (type,), roles, (layout,), (layout,), "", (), mesh, 0.0, "elementwise")
    return Strategy(roles, (layout,), (layout,), "", (), 1, steps)
