"""Attention stays one operator from the model to the program: `autopar.attention`.

`torch.export` keeps `scaled_dot_product_attention` whole, and AOTAutograd would take it apart as suits the device that
it traces on: into a kernel that only CPUs have, or into a square of scores. In between it is replaced here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.errors import TraceError
from autopar.trace.lines import FLEX, line_of_node

_operators = torch.library.Library("autopar", "FRAGMENT")
_operators.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, bool causal, float scale, float dropout, bool bias_grad)"
    " -> (Tensor, Tensor, Tensor)"
)
_operators.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor lse, Tensor? state,"
    " bool causal, float scale, float dropout, bool bias_grad) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, dropout: float, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A result that is not there has no elements: an operator of torch cannot give None."""
    batch, heads, queries, _ = q.shape
    # As it lies behind torch's own kernels on a CPU: what follows may look at it through `view`.
    by_products = dropout or bias_grad or q.shape[-1] != v.shape[-1]
    sizes = (batch, heads, queries, v.shape[-1])
    out = q.new_empty(sizes) if by_products else q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    state = q.new_empty((batch, heads, 2) if dropout else (0,), dtype=torch.int64)
    return out, q.new_empty(batch, heads, queries, dtype=wide), state


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    state: Tensor | None, causal: bool, scale: float, dropout: float, bias_grad: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    made = [x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v)]
    return *made, torch.empty_like(bias) if bias is not None and bias_grad else q.new_empty(0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, bias, *ctx.asked = inputs
    out, lse, state = output
    ctx.has_bias, ctx.drops = bias is not None, bool(ctx.asked[2])
    ctx.mark_non_differentiable(lse, state)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(x for x in (q, k, v, bias, out, lse, state) if x is not None))


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 8
    q, k, v, *rest = ctx.saved_tensors
    bias = rest.pop(0) if ctx.has_bias else None
    out, lse, state = rest
    made = torch.ops.autopar.attention_backward(grad, q, k, v, bias, out, lse, state if ctx.drops else None, *ctx.asked)
    return *made[:3], made[3] if ctx.asked[3] else None, None, None, None, None


torch.library.register_fake("autopar::attention", _fake, lib=_operators)
torch.library.register_fake("autopar::attention_backward", _fake_backward, lib=_operators)
torch.library.register_autograd("autopar::attention", _backward, setup_context=_keep, lib=_operators)


def keep_attention(module: torch.fx.GraphModule) -> None:
    """Put our operator in the place of torch's, in an exported module and those inside of it.

    What torch's kernels give may lie as the queries do, and ours lies in one way. A copy that torch did not need before
    a view was not exported: behind attention each view may copy, and `as_strided` asks how its operand lies.
    """
    parts = [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    kept = [node for part in parts for node in _kept(part)]
    for node in kept:
        node.target = attention
    for part in parts if kept else ():
        _free_of_layout(part.graph)
        part.recompile()


def _kept(part: torch.fx.GraphModule) -> list[torch.fx.Node]:
    for node in part.graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention):
        raise TraceError(f"the model uses flex_attention{line_of_node(node)}. {FLEX}")
    found = part.graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default)
    return list(found)


def _free_of_layout(graph: torch.fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    for target in (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default):
        for node in graph.find_nodes(op="call_function", target=target):
            x = exported = node.args[0]
            while "val" not in exported.meta:  # a cast that was put in, which leaves strides as they are
                exported = exported.args[0]
            with graph.inserting_before(node):
                asked = graph.call_function(as_exported, (x, exported.meta["val"].stride(), line_of_node(node)))
            node.args = (asked, *node.args[1:])


def as_exported(x: Tensor, strides: tuple[int, ...], line: str) -> Tensor:
    """`x`, if it lies as it did in the export. Raises TraceError."""
    if any(a != b for size, a, b in zip(x.shape, x.stride(), strides, strict=True) if size > 1):
        raise TraceError(
            f"as_strided{line} counts places in memory: behind torch's own attention its operand has strides "
            f"{tuple(strides)}, in a program {x.stride()}; give it x.clone(memory_format=torch.contiguous_format), or "
            "write it with slices or indices"
        )
    return x


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What `torch.nn.functional.scaled_dot_product_attention` gives."""
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    if not _is_known(query, key, value, enable_gqa):
        with sdpa_kernel(SDPBackend.MATH):  # operators that all devices have
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    dims = query.dim()
    if dims < 4:  # what comes first is a batch
        query, key, value = (_with_heads(x) for x in (query, key, value))
        attn_mask = None if attn_mask is None else _with_heads(attn_mask) if attn_mask.dim() == 3 else attn_mask
    batch = max(x.shape[0] for x in (query, key, value))
    if not enable_gqa and not key.shape[1] == value.shape[1] == 1:  # one kv head serves all as it is
        heads = max(x.shape[1] for x in (query, key, value))
        query, key, value = (x.expand(-1, heads, -1, -1) for x in (query, key, value))
    query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
    bias = _bias(attn_mask, query.dtype)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    needs = bias is not None and bias.requires_grad
    out, _, _ = torch.ops.autopar.attention(query, key, value, bias, is_causal, scale, float(dropout_p), needs)
    return out if dims == 4 else out.squeeze(1) if dims == 3 else out[0, 0]


def _is_known(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether it is one operator here: something to compute, the same dims in all, at most four, and groups of heads
    that keys and values share.
    """
    shapes = query.shape, key.shape, value.shape
    if 0 in (*query.shape, *key.shape, *value.shape) or len({len(shape) for shape in shapes}) > 1 or query.dim() > 4:
        return False
    return not enable_gqa or (query.dim() == 4 and key.shape[1] == value.shape[1])


def _with_heads(x: Tensor) -> Tensor:
    return x.unsqueeze(1) if x.dim() == 3 else x[None, None]


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores, with four dims: minus infinity where a boolean mask is false. A mask of float32
    beside halves stays one, as a large number of it is infinite among them.
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask.logical_not(), -torch.inf)
    if mask.dtype != torch.float32:
        mask = mask.to(dtype)
    return mask[(None,) * (4 - mask.dim())]
