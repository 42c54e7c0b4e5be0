"""Conjugates and negatives as operators that compute.

torch marks a conjugated tensor with a bit, and leaves it to whoever reads its values to look. A collective, a view as
another dtype, or a rule that takes one spelling for one value does not look, so in a graph nothing is marked: what was
a view becomes `aten.conj_physical` or `aten.neg`. Those stand below views, so that a product sees through them to the
dims that its operands had.
"""

from __future__ import annotations

from autopar.ir.graph import Const, Node, Ref
from autopar.trace.builder import Builder

CONJ, NEG = "aten.conj_physical.default", "aten.neg.default"


def conjugate(b: Builder, node: Node) -> tuple[Ref, ...]:
    """Any of torch's conjugates; of a real tensor it is the tensor itself, of a number the number as a tensor, which it
    is in torch too.
    """
    out = node.outputs[0]
    assert out is not None
    if not node.operands:
        number, dtype, device = complex(node.args[0]).conjugate(), Const("dtype", out.dtype), Const("device", "cpu")
        return (b.call(node, "aten.scalar_tensor.default", (number,), out, dtype=dtype, device=device),)
    ref = node.operands[0]
    return (_below_views(b, node, CONJ, ref) if b.type(ref).dtype.startswith("complex") else ref,)


def negative(b: Builder, node: Node) -> tuple[Ref, ...]:
    """The view that torch marks as negative: the imaginary part of a conjugate."""
    return (_below_views(b, node, NEG, node.operands[0]),)


def _below_views(b: Builder, like: Node, op: str, ref: Ref) -> Ref:
    """`op`, which works element by element and undoes itself, in front of the views that `ref` is made by."""
    view = b.definition(ref)
    if view.op == op:
        return view.operands[0]
    if view.op not in ("aten.view.default", "aten.permute.default", "aten.expand.default"):
        return b.call(like, op, (ref,), b.type(ref))
    made = _below_views(b, like, op, view.operands[0])
    match view.op:
        case "aten.view.default":
            return b.view(like, made, b.type(ref).shape)
        case "aten.permute.default":
            return b.permute(like, made, view.args[1])
        case _:
            return b.call(like, view.op, (made, view.args[1]), b.type(ref))
