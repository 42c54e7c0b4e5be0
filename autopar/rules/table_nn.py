"""Rules of products, convolutions, pools, embeddings and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.graph import Node, Ref
from autopar.rules.spelling import Table, Types, Writer, all_locked, arg, foreign, operands, results, spell
from autopar.rules.table_shape import leading


def einsum(node: Node, types: Types) -> str:
    """The equation is the rule."""
    return node.args[0] + "".join(f" | {place}" for place in range(len(types)))


def addmm(node: Node, types: Types) -> str:
    """The bias would be added once per shard of k, so k is locked (trace writes a product and an addition instead)."""
    bias = spell(types[0].shape, ["b", "m", "n"][3 - len(types[0].shape) :])
    batch = "b " if len(types[1].shape) == 3 else ""
    return f"{bias}, {batch}m k!, {batch}k! n -> {batch}m n | 01 | 02"


def grouped_mm(node: Node, types: Types) -> str | None:
    """Rows (or columns) belong to experts by offsets; only what is not grouped may be split."""
    match len(types[0].shape), len(types[1].shape):
        case 2, 3:
            return "m! k, e! k n, e! -> m! n | 0 | 1"
        case 2, 2:
            return "m k!, k! n, e! -> e! m n | 0 | 1"
        case _:
            return None


def _filters(transposed: bool, groups: int, spatial: Sequence[int]) -> tuple[str, str, str]:
    """Words of input, weight and result. Channels are (group, channel); with one group they are plain factors."""
    i, o = ("i", "o") if groups == 1 else (f"(g={groups} i)", f"(g={groups} o)")
    weight = f"{i} o" if transposed else f"{o} i"
    return tuple(
        f"{lead} {' '.join(f'{name}{d}!' for d in range(len(spatial)))}"
        for lead, name in ((f"n {i}", "x"), (weight, "k"), (f"n {o}", "y"))
    )  # type: ignore[return-value]


def convolution(node: Node, types: Types) -> str:
    """(x, weight, bias?, stride, padding, dilation, transposed, output_padding, groups). A bias locks channels of x."""
    x, weight, y = _filters(node.args[6], node.args[8], types[0].shape[2:])
    if node.args[2] is None:
        return f"{x}, {weight} -> {y} | 0 | 1"
    if node.args[8] == 1:
        return f"{x.replace(' i ', ' i! ')}, {weight}, o -> {y} | 02 | 12"
    return f"{x}, {weight}, (g o) -> {y} | 02 | 12"


def convolution_backward(node: Node, types: Types) -> str | None:
    """(grad, x, weight, bias_sizes, stride, .., transposed 7, output_padding, groups 9, mask): one result only."""
    x, weight, y = _filters(node.args[7], node.args[9], types[1].shape[2:])
    match tuple(node.args[10]):
        case (True, False, False):
            return f"{y}, {x}, {weight} -> {results(node, x)} | 0 | 2"
        case (False, True, False):
            return f"{y}, {x}, {weight} -> {results(node, '-', weight)} | 0 | 1"
        case (False, False, True):  # the channels of x are not summed over, so they are locked
            x, weight = (words.replace(" i", " i!") if node.args[9] == 1 else words for words in (x, weight))
            return f"{y}, {x}, {weight} -> {results(node, '-', '-', y.split('y')[0].removeprefix('n '))} | 0"
        case _:
            return None


def embedding(node: Node, types: Types) -> str:
    ids = spell(types[1].shape)
    return f"v@masked_lookup w, {ids} -> {'' if ids == '.' else ids} w | 0"


def embedding_dense_backward(node: Node, types: Types) -> str:
    """(grad, ids, num_weights, padding_idx, scale_grad_by_freq); frequencies are counted over all ids."""
    counts = arg(node, 4, "scale_grad_by_freq", False)
    ids = spell(types[1].shape, lock=range(len(types[1].shape)) if counts else ())
    grad = f"{'' if ids == '.' else ids} w"
    return f"{grad}, {ids} -> {'v!' if counts else 'v@masked_lookup_backward'} w | 0"


# Attention. q is [b h s d], k and v are [b h t d]; with fewer key heads the query heads are (h r).


def _heads(q: Sequence[int], k: Sequence[int]) -> str:
    return "h" if q[1] == k[1] else f"(h={k[1]} r)"


def _mask(shape: Sequence[int], heads: str, sequence: str) -> str:
    words = ["b", heads, sequence, "t!"][4 - len(shape) :]
    return " ".join("1" if size == 1 else word for size, word in zip(shape, words, strict=True)) or "."


def _lse(shape: Sequence[int], q: Sequence[int], heads: str, sequence: str) -> str:
    """Row sums: [b h s], with padded rows or a last dim of one in some kernels."""
    words = [sequence if shape[2] == q[2] else "rows!", "l!"]
    return " ".join([f"b {heads}", *("1" if size == 1 else word for size, word in zip(shape[2:], words, strict=False))])


def attention(split_queries: bool, dropout: int, causal: int, mask: int | str | None) -> Writer:
    """Batch and heads split; query positions too, where the kernel knows no order among them. `mask`: where one stands.

    With dropout every shard would draw the same mask: everything is locked.
    """

    def write(node: Node, types: Types) -> str:
        q, k = types[0].shape, types[1].shape
        if arg(node, dropout, "dropout_p", 0.0):
            return all_locked(node, types)
        heads, kv = _heads(q, k), "h"
        s = "s" if split_queries and not arg(node, causal, "is_causal", False) else "s!"
        words: dict[int | str, str] = {0: f"b {heads} {s} d!", 1: f"b {kv} t! d!", 2: f"b {kv} t! e!"}
        if mask is not None and isinstance(arg(node, mask if isinstance(mask, int) else 99, "attn_mask"), Ref):
            shape = types[3].shape
            words[mask] = _mask(shape, heads, s)
        lse = node.outputs[1]
        rest = "-" if lse is None else _lse(lse.shape, q, heads, s)
        return f"{operands(node, words)} -> {results(node, f'b {heads} {s} e!', rest)}"

    return write


def attention_backward(split_queries: bool, mask: int | str | None, places: dict[str, int]) -> Writer:
    """grad, q, k, v, out, logsumexp at `places`; dk and dv are sums over split query positions."""

    def write(node: Node, types: Types) -> str:
        arguments: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs]
        type_at = dict(zip([key for key, value in arguments if isinstance(value, Ref)], types, strict=True))
        if arg(node, places["dropout"], "dropout_p", 0.0):
            return all_locked(node, types)
        q, k = type_at[places["q"]].shape, type_at[places["k"]].shape
        heads = _heads(q, k)
        s = "s" if split_queries and not arg(node, places["causal"], "is_causal", False) else "s!"
        words: dict[int | str, str] = {key: foreign(type.shape, f"u{key}_") for key, type in type_at.items()}
        query, key, value, out = f"b {heads} {s} d!", "b h t! d!", "b h t! e!", f"b {heads} {s} e!"
        words |= {places["grad"]: out, places["q"]: query, places["k"]: key, places["v"]: value, places["out"]: out}
        words[places["lse"]] = _lse(type_at[places["lse"]].shape, q, heads, s)
        bias = "-"
        if mask is not None and mask in type_at:
            words[mask] = _mask(type_at[mask].shape, heads, s)
            bias = words[mask]
        return f"{operands(node, words)} -> {results(node, query, key, value, bias)} | 0"

    return write


def dense_attention(node: Node, types: Types) -> str:
    """The unfused form: it returns the weights [b h s t] as its second result."""
    if arg(node, 4, "dropout_p", 0.0) or len(types[0].shape) != 4 or arg(node, 5, "is_causal", False):
        return all_locked(node, types)
    q, k = types[0].shape, types[1].shape
    heads = _heads(q, k)
    words: dict[int | str, str] = {0: f"b {heads} s d!", 1: "b h t! d!", 2: "b h t! e!"}
    if len(types) > 3:
        words[3] = _mask(types[3].shape, heads, "s")
    return f"{operands(node, words)} -> {results(node, f'b {heads} s e!', f'b {heads} s t!')}"


# places: grad q k v out lse dropout causal
def _places(*numbers: int) -> dict[str, int]:
    return dict(zip(["grad", "q", "k", "v", "out", "lse", "dropout", "causal"], numbers, strict=True))


CPU_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"

NN: Table = {
    "autopar.einsum": einsum,
    "aten.mm.default": "m k, k n -> m n | 0 | 1",
    "aten.bmm.default": "b m k, b k n -> b m n | 0 | 1",
    "aten.mv.default": "m k, k -> m | 0 | 1",
    "aten.dot.default": "k, k -> . | 0 | 1",
    "aten.vdot.default": "k, k -> . | 0 | 1",
    "aten.addmm.default": addmm,
    "aten.baddbmm.default": addmm,
    "aten._grouped_mm.default": grouped_mm,
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_dense_backward,
    "aten.max_pool2d_with_indices.default": leading(2),
    "aten.max_pool2d_with_indices_backward.default": leading(2, "0"),
    "aten.max_pool3d_with_indices.default": leading(3),
    "aten.max_pool3d_with_indices_backward.default": leading(3, "0"),
    "aten.avg_pool2d.default": leading(2, "0"),
    "aten.avg_pool2d_backward.default": leading(2, "0"),
    "aten.avg_pool3d.default": leading(3, "0"),
    "aten.avg_pool3d_backward.default": leading(3, "0"),
    "aten._adaptive_avg_pool2d.default": leading(2, "0"),
    "aten._adaptive_avg_pool2d_backward.default": leading(2, "0"),
    "aten._adaptive_avg_pool3d.default": leading(3, "0"),
    "aten._adaptive_avg_pool3d_backward.default": leading(3, "0"),
    "aten.adaptive_max_pool2d.default": leading(2),
    "aten.adaptive_max_pool2d_backward.default": leading(2, "0"),
    "aten.upsample_nearest1d.default": leading(1, "0"),
    "aten.upsample_nearest2d.default": leading(2, "0"),
    "aten.upsample_linear1d.default": leading(1, "0"),
    "aten.upsample_bilinear2d.default": leading(2, "0"),
    "aten.upsample_bicubic2d.default": leading(2, "0"),
    "aten.upsample_nearest1d_backward.default": leading(1, "0"),
    "aten.upsample_nearest2d_backward.default": leading(2, "0"),
    "aten.upsample_linear1d_backward.default": leading(1, "0"),
    "aten.upsample_bilinear2d_backward.default": leading(2, "0"),
    "aten.upsample_bicubic2d_backward.default": leading(2, "0"),
    f"{CPU_FLASH}.default": attention(True, dropout=3, causal=4, mask="attn_mask"),
    f"{CPU_FLASH}_backward.default": attention_backward(True, "attn_mask", _places(0, 1, 2, 3, 4, 5, 6, 7)),
    "aten._scaled_dot_product_flash_attention.default": attention(False, dropout=3, causal=4, mask=None),
    "aten._scaled_dot_product_flash_attention_backward.default": attention_backward(
        False, None, _places(0, 1, 2, 3, 4, 5, 10, 11)
    ),
    "aten._scaled_dot_product_efficient_attention.default": attention(False, dropout=5, causal=6, mask=3),
    "aten._scaled_dot_product_efficient_attention_backward.default": attention_backward(
        False, 4, _places(0, 1, 2, 3, 5, 6, 9, 11)
    ),
    "aten._scaled_dot_product_cudnn_attention.default": attention(False, dropout=5, causal=6, mask=3),
    "aten._scaled_dot_product_cudnn_attention_backward.default": attention_backward(
        False, 8, _places(0, 1, 2, 3, 4, 5, 13, 14)
    ),
    "aten._scaled_dot_product_attention_math.default": dense_attention,
}
