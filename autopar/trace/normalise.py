"""One spelling per idea, so that a rule is one line: the passes between the traced graph and the graph that is planned.

Each rewrite is exact in value: sums and counts are taken over the whole tensor, so a mean over a split dim, a loss with
ignored labels or a statistic over the batch means the same on one rank and on many.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from autopar.ir.graph import Const, Graph, Node, Ref, TensorType, map_node, reading
from autopar.trace.builder import CONTIGUOUS, Builder
from autopar.trace.conjugate import conjugate, negative
from autopar.trace.einsum import matrix_product

Rewrite = Callable[[Builder, Node], "tuple[Ref | None, ...]"]

SAME_VALUE = (
    "aten.detach.default",
    "aten.alias.default",
    "aten.lift_fresh_copy.default",
    "aten.lift_fresh.default",
    "aten.contiguous.default",
    "aten.resolve_conj.default",  # in a graph nothing is marked as conjugate or negative
    "aten.resolve_neg.default",
)
NONE, MEAN, SUM = 0, 1, 2  # aten's codes of a loss reduction


def normalise(graph: Graph) -> Graph:
    """Rewrite, remove common subexpressions and dead nodes, then make shared values explicit."""
    b = Builder()
    ref_of: dict[Ref, Ref] = {}
    for node in graph.nodes:
        made = _rewrite(b, reading(node, ref_of))
        for index, ref in enumerate(made):
            if ref is not None:
                ref_of[Ref(node.name, index)] = ref
    results = [replace(r, ref=None if r.ref is None else ref_of.get(r.ref, r.ref)) for r in graph.results]
    return share(b.finish(results))


def _rewrite(b: Builder, node: Node) -> tuple[Ref | None, ...]:
    if node.op in SAME_VALUE and b.type(node.operands[0]).dtype == node.outputs[0].dtype:  # type: ignore[union-attr]
        return (node.operands[0],)
    if rewrite := REWRITES.get(node.op):
        return rewrite(b, node)
    name = b.keep(node)
    return tuple(Ref(name, index) for index in range(len(node.outputs)))


def _shape(node: Node) -> tuple[int, ...]:
    assert node.outputs[0] is not None
    return node.outputs[0].shape


def _keep(b: Builder, node: Node) -> tuple[Ref, ...]:
    name = b.keep(node)
    return tuple(Ref(name, index) for index in range(len(node.outputs)))


def _view(b: Builder, node: Node) -> tuple[Ref, ...]:
    return (b.view(node, node.operands[0], _shape(node)),)


def _only_piece(b: Builder, node: Node) -> tuple[Ref, ...]:
    """A list of one piece is the whole."""
    return _view(b, node) if len(node.outputs) == 1 else _keep(b, node)


def _permute(b: Builder, node: Node) -> tuple[Ref, ...]:
    ndim = len(_shape(node))
    if not ndim:  # a number has its dims 0 and -1, too
        return (node.operands[0],)
    match node.op:
        case "aten.permute.default":
            order = [dim % ndim for dim in node.args[1]]
        case "aten.t.default":
            order = list(reversed(range(ndim)))
        case _:
            one, other = node.args[1] % ndim, node.args[2] % ndim
            order = list(range(ndim))
            order[one], order[other] = other, one
    return (b.permute(node, node.operands[0], order),)


def _expand(b: Builder, node: Node) -> tuple[Ref, ...]:
    if b.type(node.operands[0]).shape == _shape(node):
        return (node.operands[0],)
    return _keep(b, replace(node, args=(node.args[0], _shape(node))))


def _clone(b: Builder, node: Node) -> tuple[Ref, ...]:
    """Only a clone that changes the memory order does anything in a functional graph."""
    source = b.definition(node.operands[0]).op
    if dict(node.kwargs).get("memory_format") != CONTIGUOUS or source == "autopar.einsum":
        return (node.operands[0],)
    return _keep(b, node)


def _to_copy(b: Builder, node: Node) -> tuple[Ref, ...]:
    out = node.outputs[0]
    assert out is not None
    if b.type(node.operands[0]).dtype == out.dtype:
        return (node.operands[0],)
    return _keep(b, replace(node, kwargs=(("dtype", Const("dtype", out.dtype)),)))


def _made_new(b: Builder, node: Node) -> tuple[Ref, ...]:
    """A tensor made like another takes no more of that than its dtype; whoever makes it need not have it."""
    out = node.outputs[0]
    assert out is not None
    op, more = NEW[node.op], node.args[2:] if node.op == "aten.new_full.default" else ()
    device, dtype = Const("device", "cpu"), Const("dtype", out.dtype)
    return (b.call(node, op, (out.shape, *more), out, device=device, dtype=dtype),)


def _copy(b: Builder, node: Node) -> tuple[Ref, ...]:
    """What is written over all of a tensor: in a functional graph the source, in shape and dtype of the target."""
    out = node.outputs[0]
    assert out is not None
    source = _cast(b, node, node.operands[1], out.dtype)
    if b.type(source).shape != out.shape:
        source = b.call(node, "aten.expand.default", (source, out.shape), out)
    return (source,)


def _mm(b: Builder, node: Node) -> tuple[Ref, ...]:
    return (matrix_product(b, node, node.args[0], node.args[1], batch=node.op == "aten.bmm.default"),)


def _addmm(b: Builder, node: Node) -> tuple[Ref, ...]:
    """The bias is added after the product, so that a partial product is summed before the bias joins it, once."""
    scales = dict(node.kwargs)
    if scales.get("alpha", 1) != 1 or scales.get("beta", 1) != 1:
        return _keep(b, node)
    bias, left, right = node.args
    product = matrix_product(b, node, left, right, batch=False)
    below = b.definition(product)
    if below.op == "aten.view.default" and len(b.type(bias).shape) == 1:
        wide = below.operands[0]
        if b.type(wide).shape[-1] == b.type(bias).shape[0]:
            return (b.view(node, b.pointwise(node, "aten.add.Tensor", wide, bias), _shape(node)),)
    return (b.pointwise(node, "aten.add.Tensor", product, bias),)


def _sum(b: Builder, node: Node) -> tuple[Ref, ...]:
    if node.kwargs or not node.args[1] or not b.type(node.operands[0]).shape:
        return _keep(b, node)
    return (b.sum_through_view(node, node.args[0], node.args[1], len(node.args) > 2 and node.args[2]),)


def _mean(b: Builder, node: Node) -> tuple[Ref, ...]:
    """The global count divides, whatever the split. Half precision sums in float32, as aten.mean does."""
    shape = b.type(node.operands[0]).shape
    out = node.outputs[0]
    assert out is not None
    dims = tuple(node.args[1]) if len(node.args) > 1 and node.args[1] and shape else tuple(range(len(shape)))
    count = math.prod(shape[dim] for dim in dims)
    value = node.operands[0]
    half = out.dtype in ("float16", "bfloat16")
    if b.type(value).dtype != out.dtype or half:
        value = _cast(b, node, value, "float32" if half else out.dtype)
    total = b.sum(node, value, dims, len(node.args) > 2 and bool(node.args[2])) if shape else value
    mean = b.pointwise(node, "aten.div.Tensor", total, float(count))
    return (_cast(b, node, mean, out.dtype),)


def _cast(b: Builder, node: Node, ref: Ref, dtype: str) -> Ref:
    type = b.type(ref)
    if type.dtype == dtype:
        return ref
    return b.call(node, "aten._to_copy.default", (ref,), TensorType(type.shape, dtype), dtype=Const("dtype", dtype))


def _convolution(b: Builder, node: Node) -> tuple[Ref, ...]:
    x, weight, bias, *rest = node.args
    if bias is None:
        return _keep(b, node)
    out = node.outputs[0]
    product = b.call(node, node.op, (x, weight, None, *rest), out, name=node.name)
    column = b.view(node, bias, (b.type(bias).shape[0], *(1 for _ in _shape(node)[2:])))
    return (b.pointwise(node, "aten.add.Tensor", product, column),)


def _convolution_backward(b: Builder, node: Node) -> tuple[Ref | None, ...]:
    """One node per gradient, so that each result's sums over split factors are its own."""
    grad, x, weight, _, *rest, mask = node.args
    made: list[Ref | None] = [None, None, None]
    for index in (0, 1):
        if mask[index]:
            alone = tuple(i == index for i in range(3))
            outputs = tuple(out if i == index else None for i, out in enumerate(node.outputs))
            name = b.call(node, node.op, (grad, x, weight, None, *rest, alone), *outputs, name=node.name).name
            made[index] = Ref(name, index)
    if mask[2]:
        ndim = len(b.type(grad).shape)
        made[2] = b.sum(node, grad, [dim for dim in range(ndim) if dim != 1])
    return tuple(made)


def _nll_loss(b: Builder, node: Node) -> tuple[Ref, ...]:
    """A mean over the labels that count is sum / count, each of which may be partial; never a mean of means.

    The count is shared by forward and backward, so that it is summed over the ranks once.
    """
    log_p, target, weight, reduction, ignore = node.args
    if reduction != MEAN:
        return _keep(b, node)
    name = b.call(node, node.op, (log_p, target, weight, SUM, ignore), *node.outputs, name=node.name).name
    count = b.call(node, "autopar.share", (Ref(name, 1),), node.outputs[1], name="count")
    return (b.pointwise(node, "aten.div.Tensor", Ref(name, 0), count, name="mean_loss"), count)


def _nll_loss_backward(b: Builder, node: Node) -> tuple[Ref, ...]:
    grad, log_p, target, weight, reduction, ignore, count = node.args
    if reduction != MEAN:
        return _keep(b, node)
    each = b.pointwise(node, "aten.div.Tensor", grad, count)
    return (b.call(node, node.op, (each, log_p, target, weight, SUM, ignore, count), *node.outputs, name=node.name),)


def _group_norm(b: Builder, node: Node) -> tuple[Ref, ...]:
    """Layer norm over the channels of each group, then the affine part per channel, in the dtype of that: CPU kernels
    take half precision beside parameters in float32.
    """
    x, weight, bias, n, c, hw, groups, eps = node.args
    narrow, x = b.type(x), _as(b, node, x, weight)
    type = b.type(x)
    inner = (n, groups, c // groups * hw)
    grouped = b.view(node, x, inner)
    told = node.outputs[1] if type == narrow else None
    stat = TensorType((n, groups, 1), told.dtype if told else type.dtype)
    norm = b.call(
        node,
        "aten.native_layer_norm.default",
        (grouped, (inner[2],), None, None, eps),
        TensorType(inner, type.dtype),
        stat,
        stat,
    ).name
    out = b.view(node, Ref(norm, 0), type.shape)
    column = (c, *(1 for _ in type.shape[2:]))
    if weight is not None:
        out = b.pointwise(node, "aten.mul.Tensor", out, b.view(node, weight, column))
    if bias is not None:
        out = b.pointwise(node, "aten.add.Tensor", out, b.view(node, bias, column))
    flat, out = (n, groups), _cast(b, node, out, narrow.dtype)
    return out, b.view(node, Ref(norm, 1), flat), b.view(node, Ref(norm, 2), flat)


def _as(b: Builder, node: Node, ref: Ref, like: Ref | None) -> Ref:
    return ref if like is None else _cast(b, node, ref, b.type(like).dtype)


def _group_norm_backward(b: Builder, node: Node) -> tuple[Ref | None, ...]:
    grad, x, mean, rstd, weight, n, c, hw, groups, mask = node.args
    narrow, grad, x = b.type(x), _as(b, node, grad, weight), _as(b, node, x, weight)
    type = b.type(x)
    inner, stat = (n, groups, c // groups * hw), (n, groups, 1)
    column = (c, *(1 for _ in type.shape[2:]))
    mean, rstd, grouped = b.view(node, mean, stat), b.view(node, rstd, stat), b.view(node, x, inner)
    made: list[Ref | None] = [None, None, None]
    others = [dim for dim in range(len(type.shape)) if dim != 1]
    if mask[0]:
        scaled = grad if weight is None else b.pointwise(node, "aten.mul.Tensor", grad, b.view(node, weight, column))
        args = (b.view(node, scaled, inner), grouped, (inner[2],), mean, rstd, None, None, (True, False, False))
        norm = b.call(node, "aten.native_layer_norm_backward.default", args, TensorType(inner, type.dtype), None, None)
        made[0] = _cast(b, node, b.view(node, norm, type.shape), narrow.dtype)
    if mask[1]:
        centred = b.pointwise(node, "aten.sub.Tensor", grouped, mean)
        unit = b.view(node, b.pointwise(node, "aten.mul.Tensor", centred, rstd), type.shape)
        made[1] = b.sum(node, b.pointwise(node, "aten.mul.Tensor", grad, unit), others)
    if mask[2]:
        made[2] = b.sum(node, grad, others)
    return tuple(made)


NEW = {
    "aten.new_zeros.default": "aten.zeros.default",
    "aten.new_ones.default": "aten.ones.default",
    "aten.new_full.default": "aten.full.default",
    "aten.new_empty.default": "aten.empty.memory_format",
    "aten.new_empty_strided.default": "aten.empty.memory_format",
}
REWRITES: dict[str, Rewrite] = {
    **dict.fromkeys(NEW, _made_new),
    "aten.view.default": _view,
    "aten._unsafe_view.default": _view,
    "aten.reshape.default": _view,
    "aten.unsqueeze.default": _view,
    "aten.squeeze.dim": _view,
    "aten.squeeze.dims": _view,
    "aten.squeeze.default": _view,
    "aten.unbind.int": _only_piece,
    "aten.split.Tensor": _only_piece,
    "aten.split_with_sizes.default": _only_piece,
    "aten.t.default": _permute,
    "aten.transpose.int": _permute,
    "aten.permute.default": _permute,
    "aten.expand.default": _expand,
    "aten.clone.default": _clone,
    "aten._to_copy.default": _to_copy,
    "aten.copy.default": _copy,
    "aten._conj.default": conjugate,
    "aten._conj_copy.default": conjugate,
    "aten._conj_physical.default": conjugate,
    "aten.conj_physical.default": conjugate,
    "aten._neg_view.default": negative,
    "aten._neg_view_copy.default": negative,
    "aten.mm.default": _mm,
    "aten.bmm.default": _mm,
    "aten.addmm.default": _addmm,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.dim": _mean,
    "aten.mean.default": _mean,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.nll_loss_forward.default": _nll_loss,
    "aten.nll_loss_backward.default": _nll_loss_backward,
    "aten.nll_loss2d_forward.default": _nll_loss,
    "aten.nll_loss2d_backward.default": _nll_loss_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
}


def share(graph: Graph) -> Graph:
    """Put an `autopar.share` node after each value that several nodes of one phase read.

    It is the identity; a layout change in front of it is paid once and serves them all. Weights, which are gathered
    around each use, and single numbers get none.
    """
    users: dict[tuple[Ref, str], list[str]] = defaultdict(list)
    node_of = graph.by_name
    for node in graph.nodes:
        for ref in dict.fromkeys(node.operands):
            users[ref, node.phase].append(node.name)
    shared: dict[tuple[Ref, str], Ref] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        for ref in dict.fromkeys(node.operands):
            source = node_of[ref.name]
            type = source.outputs[ref.index]
            key = (ref, node.phase)
            if key in shared or len(users[key]) < 2 or type is None or type.numel <= 1:
                continue
            if source.op in ("parameter", "buffer", "constant"):
                continue
            name = f"{ref.name}_shared" if ref.index == 0 else f"{ref.name}_r{ref.index}_shared"
            name = name if node.phase == source.phase else f"{name}_bw"
            nodes.append(
                replace(
                    source,
                    name=name,
                    op="autopar.share",
                    args=(ref,),
                    kwargs=(),
                    outputs=(type,),
                    phase=node.phase,
                    target="",
                )
            )
            shared[key] = Ref(name)
        nodes.append(_with_shared(node, shared))
    return Graph(tuple(nodes), graph.results)


def _with_shared(node: Node, shared: dict[tuple[Ref, str], Ref]) -> Node:
    def change(ref: Ref) -> Ref:
        return shared.get((ref, node.phase), ref)

    return map_node(node, change)
