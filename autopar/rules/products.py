"""What the patterns of matrix products have in common: factors of their dims, and parts of their bodies as code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from autopar.ir.graph import Node, Ref, TensorType
from autopar.ir.layout import REPLICATE, Layout, Placement, Shard, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.strides import Placed, Strides
from autopar.ir.work import bytes_moved, flops_of
from autopar.rules.attended import copied
from autopar.rules.builder import Value
from autopar.rules.lie import product
from autopar.rules.looped import Do
from autopar.rules.notation import Dim, Rule
from autopar.rules.table import rule_of
from cost_models.steps import Compute

PRODUCTS = ("autopar.einsum", "aten.mm.default")


def rule_of_product(node: Node, types: tuple[TensorType, ...]) -> Rule | None:
    """The rule of a product of two values; None of all else, of many small products, as of attention, and of complex
    numbers, which gloo does not send.
    """
    if node.op not in PRODUCTS or len(set(node.operands)) != 2:
        return None
    if any(type.dtype.startswith("complex") for type in types):
        return None
    rule = rule_of(node, types)
    assert rule is not None
    first, second = (factors(dims) for dims in rule.inputs)
    return None if {*first} & {*second} & {*factors(rule.outputs[0])} else rule


def axes_of_rings(
    node: Node, types: tuple[TensorType, ...], mesh: Mesh
) -> Iterator[tuple[Rule, int, int, tuple[str, ...]]]:
    """(rule, axis, operand, roles of the axes) of each way to go round: along each axis, with each operand as the one
    that counts, while all other axes split the batch. The role of the axis itself is "", as is that of one rank alone.
    """
    if mesh.ranks == 1 or (rule := rule_of_product(node, types)) is None:
        return
    batch = first_of_longest(rule)
    for axis, operand in ((axis, operand) for axis, size in enumerate(mesh.sizes) if size > 1 for operand in (0, 1)):
        yield rule, axis, operand, tuple(batch if size > 1 and at != axis else "" for at, size in enumerate(mesh.sizes))


def first_of_longest(rule: Rule) -> str:
    """The first factor of the operand with the most dims: of activations, the batch. "" where there is none."""
    return next(iter(factors(max(rule.inputs, key=len)[:1])), "")


def factors(dims: Sequence[Dim]) -> list[str]:
    return [factor for dim in dims for factor in dim]


def dim_of(dims: Sequence[Dim], factor: str) -> int | None:
    return next((dim for dim, those in enumerate(dims) if factor in those), None)


def shard_of(dims: Sequence[Dim], factor: str) -> Shard | None:
    """The dim of that factor, split; None where there is none."""
    dim = dim_of(dims, factor)
    return None if dim is None else Shard(dim)


def laid_out(dims: Sequence[Dim], roles: Sequence[str], missing: Placement) -> Layout:
    """Each axis splits the dim of the factor that is its role; `missing`: where there is no such dim."""
    return tuple((shard_of(dims, role) or missing) if role else REPLICATE for role in roles)


def divide(types: Sequence[TensorType], layouts: Sequence[Layout], mesh: Mesh) -> bool:
    """Whether all of these sizes do."""
    laid = zip(types, layouts, strict=True)
    return all(local_shape(type.shape, layout, mesh) is not None for type, layout in laid)


def turns_among(axis: int, roles: Sequence[str], mesh: Mesh) -> int:
    """Into how many equal products a ring along the axis cuts the whole one: its own, and those of the other axes."""
    beside = math.prod(size for role, size in zip(roles, mesh.sizes, strict=True) if role)
    return mesh.sizes[axis] ** 2 * beside


# --- parts of bodies -------------------------------------------------------------------------------------------------


def multiplying(node: Node, swapped: bool = False) -> Any:
    """The product of two values. `swapped`: the second operand is read first."""

    def write(b: Any, turn: int, one: Value, other: Value) -> Value:
        pair = iter((other, one) if swapped else (one, other))
        return b.call(node.op, *(next(pair) if isinstance(arg, Ref) else arg for arg in node.args))

    return write


def lying(node: Node, made: TensorType) -> Any:
    """How the product of `multiplying` lies."""

    def lies(operands: Sequence[Placed]) -> tuple[Strides, ...]:
        return (product(node, made.shape),)

    return lies


def step_of(
    node: Node, types: tuple[TensorType, ...], read: tuple[TensorType, ...], made: TensorType, parts: int
) -> Compute:
    """One of so many equal products that make up the whole one. `read`, `made`: of its operands and its result."""
    flops, kind = flops_of(node, types)
    return Compute(node.op, flops / parts, 1.0 * bytes_moved(node, read, (made,)), made.dtype, 1, kind)


def taking(dim: int, parts: int, reads: str, makes: str, piece: TensorType, ahead: int = 0) -> Do:
    """The piece that came from the rank `turn + ahead` places before this one on the ring."""

    def write(b: Any, turn: int, whole: Value) -> Value:
        return b.call("autopar.cut_at", whole, dim, parts, b.shard_index(), turn + ahead)

    return Do("cut", write, (reads,), makes, piece, copied(2, piece))


def placing(dim: int, parts: int, result: str, made: str, piece: TensorType) -> Do:
    def write(b: Any, turn: int, result: Value, made: Value) -> Value:
        return b.call("autopar.place_at", result, made, dim, parts, b.shard_index(), turn)

    return Do("place", write, (result, made), result, None, copied(2, piece))


def room(like: str, makes: str, type: TensorType) -> Do:
    """Memory that others write to. `like`: a value of that dtype, on that device."""

    def write(b: Any, turn: int, like: Value) -> Value:
        return b.call("aten.new_empty.default", like, type.shape)

    return Do("room", write, (like,), makes, type, copied(0, type, 0))


def adding(total: str, term: str, type: TensorType) -> Do:
    def write(b: Any, turn: int, total: Value, term: Value) -> Value:
        return b.call("aten.add_.Tensor", total, term)

    return Do("add", write, (total, term), total, None, copied(3, type))
