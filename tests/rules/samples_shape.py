"""Samples of operators that move elements."""

from __future__ import annotations

import torch

from tests.rules.samples_pointwise import Samples, c, f, ints, s

VIEWS = [
    s(f(6, 12, 24), [6, 12, 4, 6]),
    s(f(6, 12, 24), [72, 24]),
    s(f(72, 24), [6, 12, 24]),
    s(f(6, 1, 12), [6, 12]),
    s(f(6, 12), [1, 6, 1, 12]),
    s(f(12, 6), [6, 12]),
    s(f(6, 12), [24, 3]),
    s(f(12, 18), [18, 12]),
    s(f(12, 2, 9), [6, 36]),
    s(f(1, 1), []),
]


def _pad(name: str, dims: int, pad: list[int]) -> Samples:
    forward, backward = f"aten.{name}{dims}d.default", f"aten.{name}{dims}d_backward.default"
    x = f(6, 12, *[5, 7][:dims])
    grad = torch.randn_like(getattr(torch.ops.aten, f"{name}{dims}d")(x, pad))
    return {forward: [s(x, pad)], backward: [s(grad, x, pad)]}


def samples() -> Samples:
    return {
        **{f"aten.{name}.default": VIEWS for name in ["view", "_unsafe_view", "reshape", "_reshape_copy", "view_copy"]},
        "aten.unsqueeze.default": [s(f(6, 12), 1), s(f(6, 12), -1), s(f(), 0)],
        "aten.squeeze.default": [s(f(6, 1, 12)), s(f(2, 1, 3)), s(f(1))],
        "aten.squeeze.dim": [s(f(6, 1, 12), 1), s(f(2, 3), 0)],
        "aten.squeeze.dims": [s(f(6, 1, 12, 1), [1, 3]), s(f(2, 3, 1), [0, 2])],
        "aten.expand.default": [s(f(6, 1, 12), [6, 18, 12]), s(f(12), [6, 12]), s(f(), [6])],
        "aten.permute.default": [s(f(6, 12, 18), [2, 0, 1]), s(f(6, 12, 18), [0, -1, 1])],
        "aten.transpose.int": [s(f(6, 12, 18), 1, -1), s(f(6, 12, 18), -3, 1), s(f(6, 12), 0, 0)],
        "aten.t.default": [s(f(6, 12)), s(f(6))],
        "aten.slice.Tensor": [s(f(6, 12), 1, 3, 9), s(f(6, 12), 0, 0, 9223372036854775807), s(f(6, 12), 1, 0, 12, 2)],
        "aten.slice_backward.default": [s(f(6, 4), [6, 12], 1, 2, 6, 1), s(f(6, 12), [6, 12], 1, 0, 12, 1)],
        "aten.slice_scatter.default": [s(f(6, 12), f(6, 4), 1, 2, 6), s(f(6, 12), f(6, 12), 1, 0, 12)],
        "aten.constant_pad_nd.default": [
            s(f(6, 12), [1, 2]),
            s(f(6, 12), [1, -1, 0, 0], 3.0),
            s(f(6, 12, 18), [0, 0, 2, 0]),
        ],
        "aten.select.int": [s(f(6, 12, 18), 1, 5), s(f(6, 12), -1, 0), s(f(6), 0, 2)],
        "aten.select_backward.default": [s(f(6, 18), [6, 12, 18], 1, 5), s(f(), [6], 0, 2)],
        "aten.select_scatter.default": [s(f(6, 12, 18), f(6, 18), 1, 5)],
        "aten.unbind.int": [s(f(6, 3, 12), 1), s(f(2, 6))],
        "aten.stack.default": [s([f(6, 12), f(6, 12)], 1), s([f(6), f(6), f(6)], -1), s([f(6), f(6)])],
        "aten.split.Tensor": [s(f(6, 12), 5, 1), s(f(6, 12), 2)],
        "aten.split_with_sizes.default": [s(f(6, 12), [3, 9], 1), s(f(6, 12), [1, 5])],
        "aten.cat.default": [s([f(6, 12), f(6, 18)], 1), s([f(6, 12), f(1, 12)]), s([f(6, 12), f(0)], -1)],
        "aten.repeat.default": [s(f(6, 12), [1, 2]), s(f(12), [6, 1]), s(f(6, 1), [2, 6])],
        "aten.flip.default": [s(f(6, 12, 18), [1]), s(f(6, 12), [-1, 0])],
        "aten.roll.default": [s(f(6, 12), [3], [1]), s(f(6, 12), [3])],
        "aten.cumsum.default": [s(f(6, 12), -1), s(ints(9, 6, 12), 0)],
        "aten.tril.default": [s(f(6, 12, 12)), s(f(6, 12), 2)],
        "aten.triu.default": [s(f(6, 12, 12), 1)],
        **_pad("reflection_pad", 1, [2, 1]),
        **_pad("reflection_pad", 2, [2, 1, 0, 3]),
        **_pad("replication_pad", 1, [2, 1]),
        **_pad("replication_pad", 2, [2, 1, 0, 3]),
        "aten._fft_r2c.default": [
            s(f(6, 12), [1], 0, True),
            s(f(6, 12, 6), [0, 2], 1, True),
            s(f(6, 12), [0], 2, False),
        ],
        "aten._fft_c2r.default": [s(c(6, 7), [1], 2, 12), s(c(6, 12, 3), [0, 2], 1, 5), s(c(6, 1), [1], 0, 1)],
        "aten._fft_c2c.default": [s(c(6, 12), [1], 0, True), s(c(6, 12, 6), [0, 1], 2, False), s(c(6), [0], 1, True)],
        "aten.glu.default": [s(f(6, 12, 24), -1), s(f(12, 6), 0)],
        "aten.glu_backward.default": [s(f(6, 12), f(6, 24), 1)],
        "aten.diagonal.default": [s(f(6, 5, 12, 7), 1, 1, 3), s(f(5, 7, 6))],
        "aten.pixel_shuffle.default": [s(f(6, 24, 12, 18), 2)],
        "aten.pixel_unshuffle.default": [s(f(6, 12, 12, 24), 2), s(f(6, 18, 6), 3)],
        "aten.im2col.default": [
            s(f(6, 12, 7, 5), [3, 2], [1, 1], [1, 0], [2, 1]),
            s(f(6, 6, 6), [2, 2], [1, 1], [0, 0], [2, 2]),
        ],
        "aten.col2im.default": [
            s(f(6, 72, 12), [7, 4], [3, 2], [1, 1], [1, 0], [2, 1]),
            s(f(24, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2]),
        ],
        "aten.unfold.default": [s(f(6, 12, 18), 1, 4, 2), s(f(6, 12), -1, 12, 1), s(f(6, 12), 0, 2, 2)],
        "aten.unfold_backward.default": [
            s(f(6, 5, 18, 4), [6, 12, 18], 1, 4, 2),
            s(f(6, 1, 12), [6, 12], 1, 12, 1),
            s(f(3, 12, 2), [6, 12], 0, 2, 2),
        ],
        "aten.index.Tensor": [
            s(f(12, 18), [ints(12, 6)]),
            s(f(6, 12, 18), [None, ints(12, 6, 2)]),
            s(f(6, 12, 18), [ints(6, 6, 1), ints(12, 12)]),
            s(f(6, 12, 18), [ints(6, 6), None, ints(18, 6)]),
            s(f(6, 12), [None, ints(12)]),
            s(f(12, 1, 6), [ints(12, 6), ints(1, 1)]),
        ],
        "aten._unsafe_index.Tensor": [s(f(6, 12, 5, 7), [None, None, ints(5, 6, 1), ints(7, 12)])],
        "aten.index_put.default": [
            s(f(6, 12, 18), [None, ints(12, 4)], f(6, 4, 18), True),
            s(f(12, 18), [torch.randperm(12)[:4]], f(18)),
            s(f(6, 12, 18), [ints(6, 6), None, ints(18, 6)], f(6, 12), True),
        ],
        "aten._unsafe_index_put.default": [s(f(6, 12, 18), [None, ints(12, 4)], f(6, 4, 18), True)],
        "aten.gather.default": [
            s(f(6, 12), 1, ints(12, 6, 18)),
            s(f(6, 12), -1, ints(12, 3, 2)),
            s(f(6, 12, 1), 0, ints(6, 2, 12, 1)),
        ],
        "aten.scatter.src": [
            s(f(6, 12), 1, torch.rand(6, 12).argsort(1)[:, :4], f(6, 4)),
            s(f(6, 12), 0, ints(1, 1, 6), f(6, 12)),  # no place twice: which would win is not defined
        ],
        "aten.scatter.value": [s(f(6, 12), 1, ints(12, 6, 4), 0), s(f(6, 12), 1, ints(12, 6, 4), 2.0)],
        "aten.scatter_add.default": [s(f(6, 12), 1, ints(12, 6, 4), f(6, 4)), s(f(6, 12), 1, ints(12, 3, 4), f(3, 4))],
        "aten.index_select.default": [s(f(6, 12, 18), 1, ints(12, 24))],
        "aten.index_add.default": [s(f(6, 12, 18), 1, ints(12, 4), f(6, 4, 18), alpha=2)],
    }
