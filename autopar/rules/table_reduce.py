"""Rules of reductions, of what normalises over dims (softmax, norms), and of losses."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.batch_norm import IN_PARTS, IN_PARTS_BACKWARD
from autopar.ir.graph import Node, Ref
from autopar.rules.spelling import (
    LETTERS,
    Table,
    Types,
    Writer,
    all_locked,
    arg,
    as_dims,
    foreign,
    linear,
    operands,
    results,
    shape_of,
    spell,
)


def reduction(
    op: str = "", position: int = 1, body: str = "", alternative: str = "", default: int | None = None
) -> Writer:
    """Dims given by an argument go away or become 1; without one `default` does, or all of them (None). They are locked
    unless `op` or a body joins them.
    """

    def write(node: Node, types: Types) -> str:
        shape, rank = types[0].shape, len(types[0].shape)
        dims = as_dims(arg(node, position, "dim", default), rank)
        left = spell(shape, lock=() if op or body else dims, body={d: body for d in dims} if body else None)
        kept = len(shape_of(node)) == rank
        words = ["1" if d in dims or size == 1 else LETTERS[d] for d, size in enumerate(shape) if kept or d not in dims]
        right = (" ".join(words) or ".") + (f" ^{op}" if op else "")
        return f"{left} -> {', '.join([right] * len(node.outputs))}" + (f" | {alternative}" if alternative else "")

    return write


def softmax(body: str, position: int, *alternatives: str) -> Writer:
    """All operands and the result have one shape; the dim that is normalised over splits with a body."""

    def write(node: Node, types: Types) -> str:
        dims = as_dims(node.args[position], len(types[0].shape))
        one = spell(types[0].shape, body=dict.fromkeys(dims, body))
        return f"{', '.join([one] * len(types))} -> {one}{linear(*alternatives)}"

    return write


def at_dim_locked(position: int) -> Writer:
    """sort, topk, cummax: the dim is locked; results may have another size there."""

    def write(node: Node, types: Types) -> str:
        shape = types[0].shape
        dims = as_dims(arg(node, position, "dim", -1), len(shape))
        right = [
            spell(out.shape, [n + ("_out" if d in dims else "") for d, n in enumerate(LETTERS)], dims)
            for out in node.outputs
            if out
        ]
        return f"{spell(shape, lock=dims)} -> {', '.join(right)}"

    return write


def bucketize(node: Node, types: Types) -> str:
    return f"{spell(types[0].shape)}, {foreign(types[1].shape, 'y')} -> {spell(types[0].shape)}"


def layer_norm(body: str) -> Writer:
    """(x, normalized_shape, weight?, bias?, eps) -> y, mean, rstd. The RMS norm has neither bias nor mean."""

    def write(node: Node, types: Types) -> str:
        shape, free = types[0].shape, len(types[0].shape) - len(node.args[1])
        inside = range(free, len(shape))
        known = body != "rms_norm" or arg(node, 3, "eps") is not None  # torch's own choice differs between kernels
        x = spell(shape, lock=() if known else inside, body={d: body for d in inside})
        affine = spell(shape[free:], LETTERS[free:])
        stat = spell([*shape[:free], *[1] * (len(shape) - free)]) + " ^same"
        return f"{operands(node, {0: x, 2: affine, 3: affine})} -> {results(node, x, stat, stat)}"

    return write


def layer_norm_backward(body: str, statistics: int) -> Writer:
    """(grad, x, normalized_shape, mean and rstd, weight?, bias?, mask) -> dx, dweight, dbias."""

    def write(node: Node, types: Types) -> str:
        shape, free = types[1].shape, len(types[1].shape) - len(node.args[2])
        x = spell(shape, body={d: body for d in range(free, len(shape))})
        affine = spell(shape[free:], LETTERS[free:])
        stat = spell([*shape[:free], *[1] * (len(shape) - free)])
        after = {3 + place: stat if place < statistics else affine for place in range(statistics + 2)}
        return f"{operands(node, {0: x, 1: x, **after})} -> {results(node, x, affine, affine)} | 0"

    return write


def _channels(shape: Sequence[int], body: str = "") -> str:
    names = ["n", "c", *(f"s{d}" for d in range(len(shape) - 2))]
    return spell(shape, names, body={d: body for d in range(len(shape)) if d != 1} if body else None)


def batch_norm(training: int | None) -> Writer:
    """(x, weight?, bias?, running_mean?, running_var?, training, momentum, eps) -> y, mean, rstd and both running.

    Without running statistics neither those arguments are there nor those results. `training`: the place of that.
    """

    def write(node: Node, types: Types) -> str:
        trains = training is not None and node.args[training]
        x = _channels(types[0].shape, "batch_norm" if trains else "")
        c = spell(types[0].shape[1:2], ["c"])
        stats = [c + " ^same" if out and out.shape == types[0].shape[1:2] else "z! ^same" for out in node.outputs[1:]]
        return f"{operands(node, {0: x, 1: c, 2: c, 3: c, 4: c})} -> {results(node, x, *stats)}"

    return write


def batch_norm_backward(node: Node, types: Types) -> str:
    """(grad, x, weight?, running mean?, running var?, mean?, rstd?, train, eps, mask) -> dx, dweight, dbias."""
    trains = node.args[7]
    x = _channels(types[1].shape, "batch_norm_backward" if trains else "")
    c = spell(types[1].shape[1:2], ["c"])
    words: dict[int | str, str] = {0: x, 1: x}
    refs = [place for place, value in enumerate(node.args) if isinstance(value, Ref)]
    for place, type in zip(refs[2:], types[2:], strict=True):
        words[place] = c if type.shape == types[1].shape[1:2] else foreign(type.shape, f"z{place}_")
    grad = c + (" ^same" if trains else "")
    return f"{operands(node, words)} -> {results(node, x, grad, grad)} | 0"


def _in_parts(shape: Sequence[int], parts: int) -> str:
    return f"(g={parts} n) " + " ".join(["c", *(f"s{d}!" for d in range(len(shape) - 2))])


def batch_norm_in_parts(node: Node, types: Types) -> str:
    """(x, weight?, bias?, running_mean?, running_var?, momentum, eps, parts) -> y, and [parts, channels] of mean, rstd
    and both running. Parts split, what is inside one does not. Running ones may come in parts already.
    """
    x = _in_parts(types[0].shape, node.args[7])
    places = [place for place, value in enumerate(node.args) if isinstance(value, Ref)]
    given = dict(zip(places, types, strict=True))
    words: dict[int | str, str] = {place: "g c" if len(type.shape) == 2 else "c" for place, type in given.items()}
    return f"{operands(node, words | {0: x})} -> {results(node, x, *['g c'] * 4)}"


def batch_norm_in_parts_backward(node: Node, types: Types) -> str:
    """(grad, x, weight?, mean, rstd, eps, parts, mask) -> dx, dweight, dbias."""
    x = _in_parts(types[1].shape, node.args[6])
    return f"{operands(node, {0: x, 1: x, 2: 'c', 3: 'g c', 4: 'g c'})} -> {results(node, x, 'c', 'c')} | 0"


def group_norm(node: Node, types: Types) -> str:
    """(x, weight?, bias?, N, C, HxW, groups, eps) -> y, mean, rstd. Groups split, what is inside one does not."""
    groups = node.args[6]
    spatial = " ".join(f"s{d}!" for d in range(len(types[0].shape) - 2))
    x = f"n (g={groups} k) {spatial}"
    return f"{operands(node, {0: x, 1: f'(g={groups} k)', 2: f'(g={groups} k)'})} -> {x}, n g, n g"


def group_norm_backward(node: Node, types: Types) -> str:
    """(grad, x, mean, rstd, weight?, N, C, HxW, groups, mask) -> dx, dweight, dbias."""
    groups = node.args[8]
    x = f"n (g={groups} k) " + " ".join(f"s{d}!" for d in range(len(types[1].shape) - 2))
    c = f"(g={groups} k)"
    return f"{operands(node, {0: x, 1: x, 2: 'n g', 3: 'n g', 4: c})} -> {results(node, x, c, c)} | 0"


def weight_norm(node: Node, types: Types) -> str:
    """(v, g, dim) -> v with the norms g, and its own norms; for each index of `dim` by itself, over all others."""
    v, g = _directions(types[0].shape, arg(node, 2, "dim", 0))
    return f"{v}, {g} -> {v}, {g}"


def weight_norm_backward(node: Node, types: Types) -> str:
    """(grad, v, g, norms, dim) -> dv, dg."""
    v, g = _directions(types[1].shape, node.args[4])
    return f"{v}, {v}, {g}, {g} -> {v}, {g} | 0"


def _directions(shape: Sequence[int], dim: int) -> tuple[str, str]:
    others = [d for d in range(len(shape)) if d != dim]
    return spell(shape, lock=others), spell([size if d == dim else 1 for d, size in enumerate(shape)])


def elementwise_loss(position: int, backward: bool = False) -> Writer:
    """Loss of two tensors of one shape; `position` of reduction (0 none, 1 mean, 2 sum). A mean splits with a body."""

    def write(node: Node, types: Types) -> str:
        how = arg(node, position, "reduction", 1)
        full = types[1 if backward else 0].shape
        x = spell(full, body={d: "share" for d in range(len(full))} if how == 1 else None)
        rank = len(full)
        words = [spell(type.shape, LETTERS[rank - len(type.shape) :]) if type.shape != full else x for type in types]
        return f"{', '.join(words)} -> {x if backward or how == 0 else '.'}" + (" | 0" if backward else "")

    return write


def nll_loss(node: Node, types: Types) -> str:
    """(logp, target, weight?, reduction, ignore_index) -> loss, total_weight. Means over unequal counts are locked."""
    mean = node.args[3] == 1
    shape = types[0].shape
    names = ["n", "c", *(f"s{d}" for d in range(len(shape) - 2))] if len(shape) > 1 else ["c"]
    lock = range(len(shape)) if mean else ()
    x = spell(shape, names, lock, {names.index("c"): "nll_loss"})
    rest = spell(types[1].shape, [n for n in names if n != "c"], range(len(types[1].shape)) if mean else ())
    per = rest if node.args[3] == 0 else "."
    return f"{operands(node, {0: x, 1: rest, 2: 'c'})} -> {per}, ." + (" ^same" if node.args[3] == 0 else "")


def nll_loss_backward(node: Node, types: Types) -> str:
    """(grad, logp, target, weight?, reduction, ignore_index, total_weight) -> dlogp."""
    mean = node.args[4] == 1
    shape = types[1].shape
    names = ["n", "c", *(f"s{d}" for d in range(len(shape) - 2))] if len(shape) > 1 else ["c"]
    x = spell(shape, names, range(len(shape)) if mean else (), {names.index("c"): "nll_loss_backward"})
    rest = spell(types[2].shape, [n for n in names if n != "c"], range(len(types[2].shape)) if mean else ())
    per = rest if types[0].shape else "."
    return f"{operands(node, {0: per, 1: x, 2: rest, 3: 'c', 6: '.'})} -> {x} | 0"


def histc(node: Node, types: Types) -> str:
    """(x, bins, min, max): counts of pieces add up, where each piece has the same bins."""
    low, high = arg(node, 2, "min", 0), arg(node, 3, "max", 0)
    return f"{spell(types[0].shape)} -> bins!" if low != high else all_locked(node, types)


REDUCE: Table = {
    "aten.sum.default": reduction("sum", 99, alternative="0"),
    "aten.sum.dim_IntList": reduction("sum", alternative="0"),
    "aten.mean.default": reduction("", 99, body="share", alternative="0"),
    "aten.mean.dim": reduction("", body="share", alternative="0"),
    "aten.amax.default": reduction("max"),
    "aten.amin.default": reduction("min"),
    "aten.max.default": reduction("max", 99),
    "aten.min.default": reduction("min", 99),
    "aten.max.dim": reduction(),
    "aten.min.dim": reduction(),
    "aten.argmax.default": reduction(),
    "aten.argmin.default": reduction(),
    "aten.prod.default": reduction("", 99),
    "aten.prod.dim_int": reduction(),
    "aten.any.default": reduction("", 99),  # bool has no all-reduce on gloo: locked
    "aten.any.dim": reduction(),
    "aten.any.dims": reduction(),
    "aten.all.default": reduction("", 99),
    "aten.all.dim": reduction(),
    "aten.all.dims": reduction(),
    "aten.var.correction": reduction(),
    "aten.var_mean.correction": reduction(),
    "aten.std.correction": reduction(),
    "aten.logsumexp.default": reduction(),
    "aten.linalg_vector_norm.default": reduction("", 2),
    "aten.norm.ScalarOpt_dim": reduction("", 2),
    "aten.histc.default": histc,
    "aten.median.dim": reduction(),
    "aten.kthvalue.default": reduction("", 2, default=-1),
    "aten.topk.default": at_dim_locked(2),
    "aten.sort.default": at_dim_locked(1),
    "aten.sort.stable": at_dim_locked(2),
    "aten.cummax.default": at_dim_locked(1),
    "aten.cummin.default": at_dim_locked(1),
    "aten.cumprod.default": at_dim_locked(1),
    "aten.logcumsumexp.default": at_dim_locked(1),
    "aten.bucketize.Tensor": bucketize,
    "aten._softmax.default": softmax("softmax", 1),
    "aten._safe_softmax.default": softmax("softmax", 1),
    "aten._log_softmax.default": softmax("log_softmax", 1),
    "aten._softmax_backward_data.default": softmax("softmax_backward", 2, "0"),
    "aten._log_softmax_backward_data.default": softmax("log_softmax_backward", 2, "0"),
    "aten.native_layer_norm.default": layer_norm("layer_norm"),
    "aten.native_layer_norm_backward.default": layer_norm_backward("layer_norm_backward", 2),
    "aten._fused_rms_norm.default": layer_norm("rms_norm"),
    "aten._fused_rms_norm_backward.default": layer_norm_backward("rms_norm_backward", 1),
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
    "aten._native_batch_norm_legit_functional.default": batch_norm(5),
    "aten._native_batch_norm_legit.no_stats": batch_norm(3),
    "aten._native_batch_norm_legit_no_training.default": batch_norm(None),
    "aten.native_batch_norm_backward.default": batch_norm_backward,
    IN_PARTS: batch_norm_in_parts,
    IN_PARTS_BACKWARD: batch_norm_in_parts_backward,
    "aten._weight_norm_interface.default": weight_norm,
    "aten._weight_norm_interface_backward.default": weight_norm_backward,
    "aten.nll_loss_forward.default": nll_loss,
    "aten.nll_loss2d_forward.default": nll_loss,
    "aten.nll_loss_backward.default": nll_loss_backward,
    "aten.nll_loss2d_backward.default": nll_loss_backward,
    "aten.mse_loss.default": elementwise_loss(2),
    "aten.smooth_l1_loss.default": elementwise_loss(2),
    "aten.huber_loss.default": elementwise_loss(2),
    "aten.soft_margin_loss.default": elementwise_loss(2),
    "aten.binary_cross_entropy.default": elementwise_loss(3),
    "aten.binary_cross_entropy_with_logits.default": elementwise_loss(4),
    "aten.mse_loss_backward.default": elementwise_loss(3, backward=True),
    "aten.smooth_l1_loss_backward.default": elementwise_loss(3, backward=True),
    "aten.huber_loss_backward.default": elementwise_loss(3, backward=True),
    "aten.soft_margin_loss_backward.default": elementwise_loss(3, backward=True),
    "aten.binary_cross_entropy_backward.default": elementwise_loss(4, backward=True),
}
