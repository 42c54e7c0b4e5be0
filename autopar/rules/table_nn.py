"""Rules of products, convolutions, pools, embeddings and attention."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.attention import (
    ATTENTION,
    ATTENTION_BACKWARD,
    CAUSAL_AT,
    DROPOUT_AT,
    OPERANDS_OF_ATTENTION,
    operands_at,
)
from autopar.ir.graph import Node, Ref, TensorType
from autopar.rules.spelling import Table, Types, arg, operands, results, spell
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


def expert_mm(node: Node, types: Types) -> str:
    """(rows, weight, ids, turned): a token's row is one for all of its experts, or one for each."""
    weight = "o i" if node.args[3] else "i o"
    return f"{_expert_rows(types[0], types[2])} i, e@my_experts {weight}, t k -> t k o | 0 | 1"


def expert_mm_weight(node: Node, types: Types) -> str:
    """(left, right, ids, experts)."""
    left, right = (_expert_rows(one, types[2]) for one in types[:2])
    return f"{left} i, {right} o, t k -> e@my_experts i o | 0 | 1"


def _expert_rows(rows: TensorType, ids: TensorType) -> str:
    return "t k" if rows.shape[1] == ids.shape[1] else "t 1"


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


# Attention (`autopar.attention`). q is [b h s d], k [b h t d], v [b h t e]; with fewer key heads query heads are (h r).


def _attention_words(node: Node, types: Types) -> dict[str, str]:
    """Batch and heads split. Query positions, too, where nothing hangs on which they are: neither a causal mask, nor
    what is dropped.
    """
    q, k, _ = operands_at(node, types)
    heads = "h" if q.shape[1] == k.shape[1] else f"(h={k.shape[1]} r)"
    whole = node.args[CAUSAL_AT[node.op]] or node.args[DROPOUT_AT[node.op]]
    s = "s!" if whole else "s"
    bias = node.args[OPERANDS_OF_ATTENTION[node.op][2] + 1]
    masked = "-"
    if isinstance(bias, Ref):
        sizes = types[node.operands.index(bias)].shape
        masked = " ".join("1" if n == 1 else word for n, word in zip(sizes, ("b", heads, s, "t!"), strict=True))
    return {
        "q": f"b {heads} {s} d!", "k": "b h t! d!", "v": "b h t! e!", "bias": masked, "out": f"b {heads} {s} e!",
        "lse": f"b {heads} {s}", "state": f"b {heads} numbers!",
    }  # fmt: skip


def attention(node: Node, types: Types) -> str:
    words = _attention_words(node, types)
    left = operands(node, dict(enumerate(words[name] for name in ("q", "k", "v", "bias"))))
    return f"{left} -> {results(node, words['out'], words['lse'], words['state'])}"


def attention_backward(node: Node, types: Types) -> str:
    """dk, dv and the gradient of the bias are sums over what is split and they lack."""
    words = _attention_words(node, types)
    order = (words[name] for name in ("out", "q", "k", "v", "bias", "out", "lse", "state"))
    made = results(node, words["q"], words["k"], words["v"], words["bias"])
    return f"{operands(node, dict(enumerate(order)))} -> {made} | 0"


NN: Table = {
    "autopar.einsum": einsum,
    "aten.mm.default": "m k, k n -> m n | 0 | 1",
    "aten.bmm.default": "b m k, b k n -> b m n | 0 | 1",
    "aten.mv.default": "m k, k -> m | 0 | 1",
    "aten.dot.default": "k, k -> . | 0 | 1",
    "aten.vdot.default": "k, k -> . | 0 | 1",
    "aten.addmm.default": addmm,
    "aten.baddbmm.default": addmm,
    "autopar.expert_mm.default": expert_mm,
    "autopar.expert_mm_weight.default": expert_mm_weight,
    # Recurrent layers: t steps, gates g, states h. Rows of the batch never meet.
    "autopar.lstm.default": "t! b g!, b h!, b h!, g! h! -> t! b h!, b h!, t! b h!, t! b g!",
    "autopar.lstm_backward.default": (
        "t! b h!, b h!, b h!, b h!, g! h!, t! b h!, t! b h!, t! b g! -> t! b g!, b h!, b h!, g! h! | 01"
    ),
    "autopar.gru.default": "t! b g!, b h!, g! h!, g! -> t! b h!",
    "autopar.gru_backward.default": "t! b h!, t! b g!, b h!, g! h!, g!, t! b h! -> t! b g!, b h!, g! h!, g! | 0",
    "autopar.rnn.default": "t! b h!, b h!, g! h! -> t! b h!",
    "autopar.rnn_backward.default": "t! b h!, b h!, g! h!, t! b h! -> t! b h!, b h!, g! h! | 0",
    "autopar.ctc.default": "t! b c!, b s!, b, b -> b",
    "autopar.ctc_backward.default": "b, t! b c!, b s!, b, b -> t! b c! | 0",
    "aten._grouped_mm.default": grouped_mm,
    "transformers.grouped_mm_fallback.default": "m! k, e! k n, e! -> m! n | 0 | 1",
    "transformers.grouped_mm_fallback_backward.default": "m! k, e! k n, e!, m! n -> m! k, e! k n | 3",
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
    ATTENTION: attention,
    ATTENTION_BACKWARD: attention_backward,
}
