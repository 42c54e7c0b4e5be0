"""Local bodies: what one rank runs in the place of an operator that cannot be split along a factor as it is.

A factor names its body in the rule (`v@masked_lookup`); all factors of one node that name a body name the same one.
`emit` is written against a `Builder`: tests give it a builder that computes at once, code generation one that writes fx
nodes. `shards`, `shard_index`, `all_reduce` and `factor_size` run over all mesh axes that split a factor naming the
body; axes that split other factors do not count. What `emit` returns is sharded or partial just as the rule says.

`comm` tells the collectives that `emit` performs and the bytes of the buffer one rank passes to each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from autopar.ir.graph import ITEMSIZE, Const, Node, TensorType
from autopar.ir.work import EXPERTS
from autopar.rules import bodies_norm as norm
from autopar.rules.builder import Body, Builder, Comm, Types, Value, Writer, silent, wide

# --- lookups: only one shard holds a row -----------------------------------------------------------------------------


def _from_here(b: Builder, ids: Value) -> tuple[Value, int]:
    """Ids counted from the start of this shard, and how many it has."""
    w, size = Writer(b), b.factor_size // b.shards
    return w.sub(ids, w.mul(b.shard_index(), size)), size


def _mine(b: Builder, ids: Value) -> tuple[Value, Value]:
    """Ids counted from the start of this shard, and whether they fall into it."""
    w, (local, size) = Writer(b), _from_here(b, ids)
    return local, w.bitwise_and(w.ge(local, 0), w.lt(local, size))


def masked_lookup(b: Builder, node: Node, args: tuple[Any, ...]) -> Value:
    w = Writer(b)
    local, mine = _mine(b, args[1])
    rows = b.call("aten.embedding.default", args[0], w.clamp(local, 0, b.factor_size // b.shards - 1))
    return w.masked_fill(rows, w.bitwise_not(w.unsqueeze(mine, -1)), 0)


def masked_lookup_backward(b: Builder, node: Node, args: tuple[Any, ...]) -> Value:
    w = Writer(b)
    grad, ids, rows, padding_idx, *_ = args
    local, mine = _mine(b, ids)
    if padding_idx is not None and padding_idx >= 0:
        mine = w.bitwise_and(mine, w.ne(ids, padding_idx))
    other = w.bitwise_not(mine)
    grad = w.masked_fill(grad, w.unsqueeze(other, -1), 0)
    return b.call("aten.embedding_dense_backward.default", grad, w.masked_fill(local, other, 0), rows, -1, False)


def masked_gather(b: Builder, node: Node, args: tuple[Any, ...]) -> Value:
    w = Writer(b)
    local, mine = _mine(b, args[2])
    picked = b.call("aten.gather.default", args[0], args[1], w.clamp(local, 0, b.factor_size // b.shards - 1))
    return w.masked_fill(picked, w.bitwise_not(mine), 0)


def my_experts(b: Builder, node: Node, args: tuple[Any, ...]) -> Value:
    """Rows of experts of other shards, whose numbers are none of this one's, are zeros and add nothing."""
    one, other, ids, last = args
    local, size = _from_here(b, ids)
    return b.call(node.op, one, other, local, last if node.op == EXPERTS[0] else size)


IGNORED = -100


def _my_targets(b: Builder, target: Value, ignore_index: int) -> Value:
    w = Writer(b)
    local, mine = _mine(b, target)
    return w.masked_fill(local, w.bitwise_not(w.bitwise_and(mine, w.ne(target, ignore_index))), IGNORED)


def nll_loss(b: Builder, node: Node, args: tuple[Any, ...]) -> tuple[Value, Value]:
    logp, target, weight, how, ignore_index = args
    both = b.call(node.op, logp, _my_targets(b, target, ignore_index), weight, how, IGNORED)
    return b.get(both, 0), b.get(both, 1)


def nll_loss_backward(b: Builder, node: Node, args: tuple[Any, ...]) -> Value:
    grad, logp, target, weight, how, ignore_index, total = args
    return b.call(node.op, grad, logp, _my_targets(b, target, ignore_index), weight, how, IGNORED, total)


# --- small ones -----------------------------------------------------------------------------------------------------


def share(b: Builder, node: Node, args: tuple[Any, ...]) -> Value:
    """A mean over equal shards is the sum of the shards' means over their number."""
    return b.call("aten.div.Tensor", b.call(node.op, *args, **dict(node.kwargs)), b.shards)


def reshape(b: Builder, node: Node, args: tuple[Any, ...]) -> Value:
    out = b.local_outputs[0]
    assert out is not None
    return b.call("aten.reshape.default", args[0], out.shape)


def counting(b: Builder, node: Node, args: tuple[Any, ...]) -> Value:
    """arange: count the places first, in whole numbers, then turn them into values."""
    w, out, size = Writer(b), b.local_outputs[0], b.factor_size // b.shards
    assert out is not None
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    exact = "int64" if isinstance(start, int) and isinstance(step, int) else "float64"
    options = {name: value for name, value in node.kwargs if name == "device"}
    places = b.call("aten.arange.start_step", 0, size, 1, dtype=Const("dtype", "int64"), **options)
    places = w.cast(w.add(places, w.mul(b.shard_index(), size)), "int64", exact)
    return w.cast(w.add(w.mul(places, step), start), exact, out.dtype)


# --- softmax over a split dim ----------------------------------------------------------------------------------------


def _exponentials(b: Builder, args: tuple[Any, ...], safe: bool) -> tuple[Value, Value, Value]:
    """x - max, its exponential and the sum of those over all shards."""
    w, have = Writer(b), b.local_operands[0].dtype
    x, dim = w.cast(args[0], have, wide(have)), args[1]
    top = b.all_reduce(w.amax(x, (dim,), True), "max")
    if safe:  # a row of -inf only: anything finite will do
        top = w.masked_fill(top, w.eq(top, -math.inf), 0)
    shifted = w.sub(x, top)
    raised = w.exp(shifted)
    return shifted, raised, w.all_add_up(raised, (dim,))


def softmax(b: Builder, node: Node, args: tuple[Any, ...]) -> Value:
    w, safe = Writer(b), node.op == "aten._safe_softmax.default"
    _, raised, total = _exponentials(b, args, safe)
    if safe:  # rows of -inf only become zeros
        total = w.masked_fill(total, w.eq(total, 0), 1)
    return _cast_result(b, w.div(raised, total))


def log_softmax(b: Builder, node: Node, args: tuple[Any, ...]) -> Value:
    w = Writer(b)
    shifted, _, total = _exponentials(b, args, safe=False)
    return _cast_result(b, w.sub(shifted, w.log(total)))


def softmax_backward(b: Builder, node: Node, args: tuple[Any, ...]) -> Value:
    w = Writer(b)
    grad, out = (
        w.cast(value, type.dtype, wide(type.dtype)) for value, type in zip(args[:2], b.local_operands, strict=True)
    )
    product = w.mul(grad, out)
    return _cast_result(b, w.sub(product, w.mul(out, w.all_add_up(product, (args[2],)))))


def log_softmax_backward(b: Builder, node: Node, args: tuple[Any, ...]) -> Value:
    w = Writer(b)
    grad, out = (
        w.cast(value, type.dtype, wide(type.dtype)) for value, type in zip(args[:2], b.local_operands, strict=True)
    )
    return _cast_result(b, w.sub(grad, w.mul(w.exp(out), w.all_add_up(grad, (args[2],)))))


def _cast_result(b: Builder, value: Value) -> Value:
    out = b.local_outputs[0]
    assert out is not None
    return Writer(b).cast(value, wide(b.local_operands[0].dtype), out.dtype)


def _row_comm(times: int, dim_at: int) -> Callable[[Node, Types, Sequence[TensorType | None]], Comm]:
    def comm(node: Node, operands: Types, outputs: Sequence[TensorType | None]) -> Comm:
        shape, dim = operands[0].shape, int(node.args[dim_at])
        nbytes = operands[0].numel // shape[dim] * ITEMSIZE[wide(operands[0].dtype)]
        return (("all_reduce", nbytes),) * times

    return comm


BODIES: dict[str, Body] = {
    "masked_lookup": Body(masked_lookup, silent),
    "masked_lookup_backward": Body(masked_lookup_backward, silent),
    "my_experts": Body(my_experts, silent),
    "masked_gather": Body(masked_gather, silent),
    "nll_loss": Body(nll_loss, silent),
    "nll_loss_backward": Body(nll_loss_backward, silent),
    "share": Body(share, silent),
    "reshape": Body(reshape, silent),
    "counting": Body(counting, silent),
    "softmax": Body(softmax, _row_comm(2, 1)),
    "log_softmax": Body(log_softmax, _row_comm(2, 1)),
    "softmax_backward": Body(softmax_backward, _row_comm(1, 2)),
    "log_softmax_backward": Body(log_softmax_backward, _row_comm(1, 2)),
    "layer_norm": Body(norm.layer_norm, norm.layer_norm_comm),
    "layer_norm_backward": Body(norm.layer_norm_backward, norm.layer_norm_backward_comm),
    "rms_norm": Body(norm.rms_norm, norm.rms_norm_comm),
    "rms_norm_backward": Body(norm.rms_norm_backward, norm.rms_norm_backward_comm),
    "batch_norm": Body(norm.batch_norm, norm.batch_norm_comm),
    "batch_norm_backward": Body(norm.batch_norm_backward, norm.batch_norm_backward_comm),
}
