"""Samples of products, convolutions, pools, embeddings and attention."""

from __future__ import annotations

from typing import Any

import torch
import transformers.integrations.moe

from autopar.emit import ops
from autopar.ir.attention import ATTENTION, ATTENTION_BACKWARD
from tests.rules.samples_pointwise import BF16, Sample, Samples, c, f, ints, s

aten = torch.ops.aten
assert transformers.integrations.moe  # imported for the operators that it registers


def _convolution(
    x: tuple[int, ...], weight: tuple[int, ...], transposed: bool = False, groups: int = 1, stride: int = 1
) -> Sample:
    dims = len(x) - 2
    return s(f(*x), f(*weight), None, [stride] * dims, [1] * dims, [1] * dims, transposed, [0] * dims, groups)


CONVOLUTIONS = [
    _convolution((6, 12, 5, 7), (18, 12, 3, 3)),
    _convolution((6, 12, 5), (18, 12, 3), stride=2),
    _convolution((6, 24, 5, 5), (36, 2, 3, 3), groups=12),
    _convolution((6, 12, 5, 5), (12, 1, 3, 3), groups=12),
    _convolution((6, 12, 5, 5), (12, 18, 3, 3), transposed=True, stride=2),
    _convolution((6, 24, 5, 5), (24, 3, 3, 3), transposed=True, groups=12),
]


def _convolution_backwards() -> list[Sample]:
    found: list[Sample] = []
    for (x, weight, _, *rest), _ in CONVOLUTIONS:
        y = aten.convolution(x, weight, None, *rest)
        for mask in ([True, False, False], [False, True, False], [False, False, True]):
            found.append(s(torch.randn_like(y), x, weight, [y.shape[1]], *rest, mask))
    return found


def _attention(
    q: int = 12, heads: int = 6, kv: int = 6, e: int = 8, mask: torch.Tensor | None = None, causal: bool = False
) -> Sample:
    """A mask has a gradient where the values have dims of their own, so that both kernels for CPUs are split."""
    keys = q if causal else 18
    inputs = f(6, heads, q, 8), f(6, kv, keys, 8), f(6, kv, keys, e)
    return s(*inputs, mask, causal, 0.3, 0.0, mask is not None and e != 8)


def _attention_backward(forward: Sample) -> Sample:
    (q, k, v, bias, causal, scale, dropout, bias_grad), _ = forward
    out, lse, _ = ops.attention(q, k, v, bias, causal, scale, dropout, bias_grad)
    return s(torch.randn_like(out), q, k, v, bias, out, lse, None, causal, scale, dropout, bias_grad)


ATTENTIONS = [
    _attention(),
    _attention(causal=True),
    _attention(mask=f(6, 6, 12, 18)),
    _attention(mask=f(6, 1, 12, 18)),
    _attention(mask=f(1, 1, 12, 18)),
    _attention(mask=f(1, 1, 1, 18)),
    _attention(heads=12),  # two query heads per key head
    _attention(heads=12, causal=True, e=10),
    _attention(e=10),
    _attention(e=10, mask=f(6, 6, 12, 18)),
    _attention(e=10, mask=f(1, 6, 12, 18)),
    _attention(e=10, mask=f(6, 1, 1, 18)),
    _attention(heads=12, e=10, mask=f(6, 12, 12, 1)),
]


def _pool(name: str, x: torch.Tensor, *args: Any) -> Samples:
    forward, backward = f"aten.{name}.default", f"aten.{name}_backward.default"
    results = getattr(aten, name)(x, *args)
    y, indices = results if isinstance(results, tuple) else (results, None)
    rest = args if indices is None else (*args, indices)
    rest = () if name.startswith("_adaptive") else rest
    return {forward: [s(x, *args)], backward: [s(torch.randn_like(y), x, *rest)]}


def _upsample(name: str, x: torch.Tensor, size: list[int], *args: Any) -> Samples:
    y = getattr(aten, name)(x, size, *args)
    backward = s(torch.randn_like(y), size, list(x.shape), *args)
    return {f"aten.{name}.default": [s(x, size, *args)], f"aten.{name}_backward.default": [backward]}


def _spoken() -> list[torch.Tensor]:
    """What `ctc` reads: log-probabilities, targets, lengths of both."""
    return [f(9, 12, 6).log_softmax(2), ints(5, 12, 4) + 1, ints(5, 12) + 5, ints(5, 12)]


def _ids_with(value: int, high: int, *shape: int) -> torch.Tensor:
    ids = ints(high, *shape)
    ids.flatten()[2] = value
    return ids


def samples() -> Samples:
    x = f(6, 12, 8, 8)
    whole = [False, True]
    return {
        "autopar.einsum": [
            s("b s h, n h -> b s n", f(6, 12, 18), f(24, 18)),
            s("b s n, b s h -> n h", f(6, 12, 24), f(6, 12, 18)),
            s("b q h d, b k h d -> b h q k", f(2, 6, 3, 4), f(2, 12, 3, 4)),
        ],
        "aten.mm.default": [s(f(6, 12), f(12, 18))],
        "aten.bmm.default": [s(f(6, 12, 18), f(6, 18, 24))],
        "aten.mv.default": [s(f(6, 12), f(12))],
        "aten.dot.default": [s(f(12), f(12))],
        "aten.vdot.default": [s(f(12), f(12)), s(c(12), c(12))],
        "aten.addmm.default": [s(f(18), f(6, 12), f(12, 18)), s(f(6, 1), f(6, 12), f(12, 18), beta=2, alpha=3)],
        "aten.baddbmm.default": [s(f(6, 12, 24), f(6, 12, 18), f(6, 18, 24))],
        "autopar.expert_mm.default": [
            s(f(6, 1, 12), f(24, 12, 18), _ids_with(25, 24, 6, 12), False),
            s(f(6, 12, 12), f(24, 18, 12), ints(24, 6, 12), True),
            s(f(12, 1, 6), f(6, 6, 12), ints(6, 12, 1), False),
            s(f(24, 1, 48), f(6, 96, 48), _ids_with(-1, 6, 24, 2), True),  # strides that torch's kernel takes in halves
        ],
        "autopar.expert_mm_weight.default": [
            s(f(6, 1, 12), f(6, 12, 18), _ids_with(25, 24, 6, 12), 24),
            s(f(6, 12, 12), f(6, 1, 18), ints(6, 6, 12), 24),
            s(f(24, 2, 96), f(24, 1, 48), _ids_with(-1, 6, 24, 2), 6),
        ],
        "autopar.ctc.default": [s(*_spoken(), 0, zeroes) for zeroes in (False, True)],
        "autopar.ctc_backward.default": [s(f(12), *_spoken(), 0, zeroes) for zeroes in (False, True)],
        "autopar.lstm.default": [
            s(f(5, 12, 24), f(12, 6), f(12, 6), f(24, 6)),
            s(f(1, 6, 4), f(6, 1), f(6, 1), f(4, 1)),
        ],
        "autopar.lstm_backward.default": [
            s(f(5, 12, 6), *(f(12, 6) for _ in range(3)), f(24, 6), f(5, 12, 6), f(5, 12, 6), f(5, 12, 24)),
        ],
        "autopar.gru.default": [s(f(5, 12, 18), f(12, 6), f(18, 6), f(18)), s(f(1, 6, 3), f(6, 1), f(3, 1), f(3))],
        "autopar.gru_backward.default": [
            s(f(5, 12, 6), f(5, 12, 18), f(12, 6), f(18, 6), f(18), f(5, 12, 6)),
        ],
        "autopar.rnn.default": [s(f(5, 12, 6), f(12, 6), f(6, 6), relu) for relu in (False, True)],
        "autopar.rnn_backward.default": [
            s(f(5, 12, 6), f(12, 6), f(6, 6), f(5, 12, 6), relu) for relu in (False, True)
        ],
        "transformers.grouped_mm_fallback.default": [s(f(24, 6), f(4, 6, 12), torch.tensor([3, 9, 9, 24]))],
        "transformers.grouped_mm_fallback_backward.default": [
            s(f(24, 6), f(4, 6, 12), torch.tensor([3, 9, 9, 24]), f(24, 12))
        ],
        "aten._grouped_mm.default": [
            s(f(24, 48).to(BF16), f(3, 48, 96).to(BF16), torch.tensor([8, 16, 24], dtype=torch.int32)),
            s(f(24, 48).to(BF16), f(48, 96).to(BF16), torch.tensor([16, 32, 48], dtype=torch.int32)),
            s(f(3, 24, 48).to(BF16), f(3, 48, 96).to(BF16)),
        ],
        "aten.convolution.default": [
            *CONVOLUTIONS,
            s(f(6, 12, 5), f(18, 12, 3), f(18), [1], [1], [1], False, [0], 1),
            s(f(6, 12, 5), f(18, 2, 3), f(18), [1], [1], [1], False, [0], 6),
        ],
        "aten.convolution_backward.default": _convolution_backwards(),
        "aten.embedding.default": [s(f(24, 18), ints(24, 6, 12)), s(f(24, 18), ints(24, 6), 3), s(f(24, 18), ints(24))],
        "aten.embedding_dense_backward.default": [
            s(f(6, 12, 18), _ids_with(3, 24, 6, 12), 24, 3, False),
            s(f(6, 12, 18), ints(24, 6, 12), 24, -1, False),
            s(f(6, 18), ints(24, 6), 24, -1, True),
        ],
        **_pool("max_pool2d_with_indices", x, [2, 2], [2, 2], [0, 0], [1, 1], False),
        **_pool("max_pool3d_with_indices", f(6, 12, 4, 4, 4), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False),
        **_pool("avg_pool2d", x, [2, 2], [2, 2], [1, 1], *whole, None),
        **_pool("avg_pool3d", f(6, 12, 4, 4, 4), [2] * 3, [2] * 3, [0] * 3, *whole, None),
        **_pool("_adaptive_avg_pool2d", x, [3, 4]),
        **_pool("_adaptive_avg_pool3d", f(6, 12, 4, 4, 4), [2, 3, 4]),
        "aten.adaptive_max_pool2d.default": [s(x, [3, 4])],
        "aten.adaptive_max_pool2d_backward.default": [s(f(6, 12, 3, 4), x, aten.adaptive_max_pool2d(x, [3, 4])[1])],
        **_upsample("upsample_nearest1d", f(6, 12, 5), [8]),
        **_upsample("upsample_nearest2d", f(6, 12, 5, 4), [8, 7]),
        **_upsample("upsample_linear1d", f(6, 12, 5), [8], False),
        **_upsample("upsample_bilinear2d", f(6, 12, 5, 4), [8, 7], False),
        **_upsample("upsample_bicubic2d", f(6, 12, 5, 4), [8, 7], True),
        ATTENTION: ATTENTIONS,
        ATTENTION_BACKWARD: [_attention_backward(one) for one in ATTENTIONS],
    }
