"""What the patterns of attention have in common: how roles lay its tensors out, and its kernel as a part of a body.

q, out, their gradients and lse are [batch, heads, s, ...], k, v and theirs [batch, kv heads, t, ...]: an axis splits
the same dim of all of them, or leaves keys and values whole; then dk and dv come out as partial sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.attention import (
    ATTENTION,
    CAUSAL_AT,
    DROPOUT_AT,
    OPERANDS_OF_ATTENTION,
    operands_at,
    priced_as,
    temporary_bytes,
    with_causal,
)
from autopar.ir.graph import Node, Ref, TensorType
from autopar.ir.layout import REPLICATE, Layout, Partial, Placement, Shard, local_shape, local_type
from autopar.ir.mesh import Mesh
from autopar.ir.strides import Placed, Strides
from autopar.ir.work import bytes_moved, flops_of
from autopar.rules.builder import Value
from autopar.rules.lie import lie
from autopar.rules.looped import Do
from cost_models.steps import Compute, over

BATCH, HEADS = "b", "h"  # what axes may do beside a pattern: factors of the rule of attention
GROUPED, GATHERED, RING, ZIGZAG = "h:grouped", "s:gathered", "s:ring", "s:zigzag"  # and what they do in one
DIM_OF = {BATCH: 0, HEADS: 1, GROUPED: 1, GATHERED: 2, RING: 2, ZIGZAG: 2}
WHOLE_KV = (GROUPED, GATHERED)

FORWARD = ("q", "k", "v", "bias"), ("out", "lse", "state")
BACKWARD = ("grad", "q", "k", "v", "bias", "out", "lse", "state"), ("dq", "dk", "dv", "dbias")
OF_KEYS = ("k", "v", "dk", "dv")


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention under such roles. `here`: what each of its tensors is called -> its local type; `place`: those that are
    operands -> their names in a body. `axis`, `ranks`: those that do `role`, which is the pattern's, several as one.
    """

    node: Node
    mesh: Mesh
    roles: tuple[str, ...]
    role: str
    takes: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    here: dict[str, TensorType]
    place: dict[str, str]

    def axis_that(self, role: str) -> str:
        """Does so; "" where none does."""
        return over([name for name, one in zip(self.mesh.names, self.roles, strict=True) if one == role])

    @property
    def axis(self) -> str:
        return self.axis_that(self.role)

    @property
    def ranks(self) -> int:
        return self.mesh.size(self.axis)

    @property
    def is_forward(self) -> bool:
        return self.node.op == ATTENTION

    @property
    def results(self) -> tuple[str, ...]:
        """Those that there are."""
        names = (FORWARD if self.is_forward else BACKWARD)[1]
        return tuple(name for name, type in zip(names, self.node.outputs, strict=True) if type is not None)


def attended(node: Node, types: Sequence[TensorType], mesh: Mesh, role: str) -> Iterator[Attended]:
    """Attention without dropout in which some axes do `role`, and the others split the batch, or the heads; an axis
    that can do neither does nothing. Beside a ring it may split the query heads beyond the kv heads.
    """
    if node.op not in OPERANDS_OF_ATTENTION or node.args[DROPOUT_AT[node.op]]:
        return
    q, k, v = operands_at(node, types)
    if min(*q.shape, *k.shape, *v.shape) == 0:
        return
    per_axis: list[tuple[str, ...]] = []
    for size in mesh.sizes:
        beside = [name for name, count in ((BATCH, q.shape[0]), (HEADS, k.shape[1])) if count % size == 0]
        if not beside:
            beside = [GROUPED, ""] if role in (RING, ZIGZAG) else [""]
        per_axis.append(("",) if size == 1 else (role, *beside))
    for roles in itertools.product(*per_axis):
        found = _laid(node, types, mesh, roles, role) if role in roles else None
        if found is not None and (GROUPED not in roles or _needs_copies(found, k.shape[1])):
            yield found


def _needs_copies(of: Attended, kv: int) -> bool:
    """Whether the axes beyond the kv heads have each as often. Those that split kv heads stand outside of those that
    split the query heads of each: so heads lie.
    """
    here, ranks = of.here["k"].shape[1], of.mesh.size(of.axis_that(GROUPED))
    if HEADS in of.roles[of.roles.index(GROUPED) :] or ranks % here or ranks == here > 1:
        return False  # where as many, they are split
    return kv > 1 or of.role != GROUPED  # by itself, the rule of attention splits the queries of one head


def _laid(node: Node, types: Sequence[TensorType], mesh: Mesh, roles: tuple[str, ...], role: str) -> Attended | None:
    """None where a size does not divide."""
    operands, results = FORWARD if node.op == ATTENTION else BACKWARD
    given = [name for name, arg in zip(operands, node.args, strict=False) if isinstance(arg, Ref)]
    takes = tuple(_layout(name, type, roles) for name, type in zip(given, types, strict=True))
    gives = tuple(_layout(name, type, roles) for name, type in zip(results, node.outputs, strict=True))
    here: dict[str, TensorType] = {}
    for name, type, layout in (*zip(given, types, takes, strict=True), *zip(results, node.outputs, gives, strict=True)):
        if type is not None:
            if local_shape(type.shape, layout, mesh) is None:
                return None
            here[name] = local_type(type, layout, mesh)
    place = {name: str(number) for number, name in enumerate(given)}
    return Attended(node, mesh, roles, role, takes, gives, here, place)


def _layout(name: str, type: TensorType | None, roles: Sequence[str]) -> Layout:
    return tuple(REPLICATE if type is None or not role else _placed(name, type, role) for role in roles)


def _placed(name: str, type: TensorType, role: str) -> Placement:
    dim = DIM_OF[role]
    lacks = role in WHOLE_KV if name in OF_KEYS else name.endswith("bias") and type.shape[dim] == 1
    if not lacks:
        return Shard(dim)
    return Partial("sum") if name in BACKWARD[1] else REPLICATE


def cut(type: TensorType, dim: int, parts: int) -> TensorType:
    return replace(type, shape=(*type.shape[:dim], type.shape[dim] // parts, *type.shape[dim + 1 :]))


def copied(times: int, type: TensorType, kernels: int = 1) -> Compute:
    """Work that is bound by the bytes it reads and writes: so many times those of such a tensor."""
    return Compute("reorder", 0.0, 1.0 * times * type.nbytes, type.dtype, kernels, "elementwise")


def kernel(
    of: Attended, causal: bool, given: dict[str, str], makes: dict[str, str], piece: dict[str, TensorType]
) -> Do:
    """The kernel on some of the keys and values. `given`: operand -> what is read in its place; `makes`: result -> what
    it is called; `piece`: types that are not those of `of`, of operands and results.

    In backward of a part of the keys (`of.role` splits the sequence) probabilities come from the lse of all of them.
    """
    node, here = with_causal(of.node, causal), {**of.here, **piece}
    operands = [here[name] for name in of.place]
    results = [None if type is None else here.get(name) for name, type in zip(_names(of), node.outputs, strict=True)]
    flops, kind = flops_of(node, operands)
    step = Compute(priced_as(node), flops, 1.0 * bytes_moved(node, operands, results), operands[0].dtype, 1, kind)
    op = node.op.removesuffix(".default")
    if not of.is_forward and of.role != GROUPED:
        op = "autopar.attention_part_backward"
    (first, *others) = ((makes.get(name, name), here[name]) for name in of.results)
    return Do(
        "attend", _calling(node, op, len(of.results)), tuple(given.get(name, at) for name, at in of.place.items()),
        first[0], first[1], step, tuple(others), temporary_bytes(node, operands), _lying(node, results),
    )  # fmt: skip


def _lying(node: Node, results: Sequence[TensorType | None]) -> Any:
    def lies(operands: Sequence[Placed]) -> tuple[Strides, ...]:
        found = lie(node, operands, [None if type is None else type.shape for type in results])
        return tuple(strides for strides, type in zip(found, results, strict=True) if type is not None)

    return lies


def _names(of: Attended) -> tuple[str, ...]:
    return (FORWARD if of.is_forward else BACKWARD)[1]


def _calling(node: Node, op: str, results: int) -> Any:
    def write(b: Any, turn: int, *values: Value) -> tuple[Value, ...]:
        given = iter(values)
        made = b.call(op, *(next(given) if isinstance(arg, Ref) else arg for arg in node.args))
        return tuple(b.get(made, place) for place in range(results))

    return write


def is_causal(node: Node) -> bool:
    return bool(node.args[CAUSAL_AT[node.op]])
