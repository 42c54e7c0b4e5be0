"""Bodies of norms whose normalised dims are split: the shards sum their statistics, the variance in a second pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from autopar.ir.graph import ITEMSIZE, Node, TensorType
from autopar.rules.builder import Builder, Comm, Types, Value, Writer, wide


def _split(rank: int, normalized: Sequence[int]) -> tuple[list[int], list[int]]:
    """Dims before the normalised ones, and these."""
    return list(range(rank - len(normalized))), list(range(rank - len(normalized), rank))


def _to_outputs(b: Builder, dtype: str, *values: Value | None) -> tuple[Value | None, ...]:
    w = Writer(b)
    return tuple(
        None if out is None else w.cast(value, dtype, out.dtype)
        for value, out in zip(values, b.local_outputs, strict=True)
    )


def layer_norm(b: Builder, node: Node, args: tuple[Any, ...]) -> tuple[Value | None, ...]:
    w, have = Writer(b), b.local_operands[0].dtype
    x, normalized, weight, bias, eps = args
    _, dims = _split(len(b.local_operands[0].shape), normalized)
    x = w.cast(x, have, wide(have))
    mean = w.div(w.all_add_up(x, dims), b.factor_size)
    centred = w.sub(x, mean)
    rstd = w.rsqrt(w.add(w.div(w.all_add_up(w.mul(centred, centred), dims), b.factor_size), eps))
    y = w.mul(centred, rstd)
    y = y if weight is None else w.mul(y, weight)
    y = y if bias is None else w.add(y, bias)
    return _to_outputs(b, wide(have), y, mean, rstd)


def rms_norm(b: Builder, node: Node, args: tuple[Any, ...]) -> tuple[Value | None, ...]:
    w, have = Writer(b), b.local_operands[0].dtype
    x, normalized, weight, eps = args
    _, dims = _split(len(b.local_operands[0].shape), normalized)
    x = w.cast(x, have, wide(have))
    rstd = w.rsqrt(w.add(w.div(w.all_add_up(w.mul(x, x), dims), b.factor_size), eps))
    y = w.mul(x, rstd)
    return _to_outputs(b, wide(have), y if weight is None else w.mul(y, weight), rstd)


def layer_norm_backward(b: Builder, node: Node, args: tuple[Any, ...]) -> tuple[Value | None, ...]:
    """dx = rstd (g - mean g - xhat mean(g xhat)) with g = grad weight; both means travel in one all-reduce."""
    w, (g_type, x_type) = Writer(b), b.local_operands[:2]
    grad, x, normalized, mean, rstd, weight, _, mask = args
    outer, dims = _split(len(x_type.shape), normalized)
    dtype = wide(x_type.dtype)
    grad, x = w.cast(grad, g_type.dtype, dtype), w.cast(x, x_type.dtype, dtype)
    xhat = w.mul(w.sub(x, mean), rstd)
    dx = None
    if mask[0]:
        g = grad if weight is None else w.mul(grad, weight)
        both = b.all_reduce(w.cat((w.add_up(g, dims), w.add_up(w.mul(g, xhat), dims)), -1), "sum")
        both = w.div(both, b.factor_size)
        dx = w.sub(w.sub(g, w.slice(both, -1, 0, 1)), w.mul(xhat, w.slice(both, -1, 1, 2)))
        dx = w.mul(dx, rstd)
    dweight = w.add_up(w.mul(grad, xhat), outer, keep=False) if mask[1] else None
    dbias = w.add_up(grad, outer, keep=False) if mask[2] else None
    return _to_outputs(b, dtype, dx, dweight, dbias)


def rms_norm_backward(b: Builder, node: Node, args: tuple[Any, ...]) -> tuple[Value | None, ...]:
    w, (g_type, x_type) = Writer(b), b.local_operands[:2]
    grad, x, normalized, rstd, weight, mask = args
    outer, dims = _split(len(x_type.shape), normalized)
    dtype = wide(x_type.dtype)
    grad, x = w.cast(grad, g_type.dtype, dtype), w.cast(x, x_type.dtype, dtype)
    xhat = w.mul(x, rstd)
    dx = None
    if mask[0]:
        g = grad if weight is None else w.mul(grad, weight)
        mean = w.div(w.all_add_up(w.mul(g, xhat), dims), b.factor_size)
        dx = w.mul(w.sub(g, w.mul(xhat, mean)), rstd)
    dweight = w.add_up(w.mul(grad, xhat), outer, keep=False) if mask[1] else None
    return _to_outputs(b, dtype, dx, dweight)


def _row_comm(x_at: int, normalized_at: int, mask_at: int | None, sizes: tuple[int, ...]) -> Callable[..., Comm]:
    """One all-reduce per entry of `sizes`, that many numbers per normalised row."""

    def comm(node: Node, operands: Types, outputs: Sequence[TensorType | None]) -> Comm:
        if mask_at is not None and not node.args[mask_at][0]:
            return ()
        x = operands[x_at]
        outer, _ = _split(len(x.shape), node.args[normalized_at])
        rows = math.prod(x.shape[dim] for dim in outer)
        return tuple(("all_reduce", size * rows * ITEMSIZE[wide(x.dtype)]) for size in sizes)

    return comm


layer_norm_comm = _row_comm(0, 1, None, (1, 1))
rms_norm_comm = _row_comm(0, 1, None, (1,))
layer_norm_backward_comm = _row_comm(1, 2, 7, (2,))
rms_norm_backward_comm = _row_comm(1, 2, 5, (1,))


def _but_channels(rank: int) -> list[int]:
    return [dim for dim in range(rank) if dim != 1]


def batch_norm(b: Builder, node: Node, args: tuple[Any, ...]) -> tuple[Value | None, ...]:
    """Statistics of the global batch. They update the running ones, the variance with the global count less one."""
    w, type = Writer(b), b.local_operands[0]
    x, weight, bias, *running, _, momentum, eps = args
    dims, count, dtype = _but_channels(len(type.shape)), b.factor_size, wide(type.dtype)
    wide_shape, flat = [1, type.shape[1], *[1] * (len(type.shape) - 2)], (type.shape[1],)
    x = w.cast(x, type.dtype, dtype)
    mean = w.div(w.all_add_up(x, dims), count)
    centred = w.sub(x, mean)
    var = w.div(w.all_add_up(w.mul(centred, centred), dims), count)
    rstd = w.rsqrt(w.add(var, eps))
    y = w.mul(centred, rstd)
    y = y if weight is None else w.mul(y, w.view(weight, tuple(wide_shape)))
    y = y if bias is None else w.add(y, w.view(bias, tuple(wide_shape)))
    mean, var = w.view(mean, flat), w.view(var, flat)
    shares = momentum, momentum * count / (count - 1)
    new = [
        w.add(w.mul(old, 1 - momentum), w.mul(now, share))
        for old, now, share in zip(running, (mean, var), shares, strict=False)
    ]
    return _to_outputs(b, dtype, y, mean, w.view(rstd, flat), *new)


def batch_norm_backward(b: Builder, node: Node, args: tuple[Any, ...]) -> tuple[Value | None, ...]:
    """The sums of grad and of grad xhat over the global batch are dbias and dweight, and both enter dx."""
    w, (g_type, x_type) = Writer(b), b.local_operands[:2]
    grad, x, weight, _, _, mean, rstd, _, _, mask = args
    dims, count, dtype = _but_channels(len(x_type.shape)), b.factor_size, wide(x_type.dtype)
    wide_shape, flat = (1, x_type.shape[1], *[1] * (len(x_type.shape) - 2)), (x_type.shape[1],)
    grad, x = w.cast(grad, g_type.dtype, dtype), w.cast(x, x_type.dtype, dtype)
    rstd = w.view(rstd, wide_shape)
    xhat = w.mul(w.sub(x, w.view(mean, wide_shape)), rstd)
    both = b.all_reduce(w.cat((w.add_up(grad, dims), w.add_up(w.mul(grad, xhat), dims)), 0), "sum")
    sum_g, sum_gx = w.slice(both, 0, 0, 1), w.slice(both, 0, 1, 2)
    dx = None
    if mask[0]:
        inner = w.sub(w.sub(grad, w.div(sum_g, count)), w.mul(xhat, w.div(sum_gx, count)))
        dx = w.mul(inner, rstd if weight is None else w.mul(rstd, w.view(weight, wide_shape)))
    return _to_outputs(
        b, dtype, dx, w.view(sum_gx, flat) if mask[1] else None, w.view(sum_g, flat) if mask[2] else None
    )


def _channel_comm(x_at: int, sizes: tuple[int, ...]) -> Callable[..., Comm]:
    def comm(node: Node, operands: Types, outputs: Sequence[TensorType | None]) -> Comm:
        x = operands[x_at]
        return tuple(("all_reduce", size * x.shape[1] * ITEMSIZE[wide(x.dtype)]) for size in sizes)

    return comm


batch_norm_comm = _channel_comm(0, (1, 1))
batch_norm_backward_comm = _channel_comm(1, (2,))
