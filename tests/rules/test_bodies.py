"""Beyond what `test_rules.py` runs: low precision, two axes on one factor, and rules that would be wrong."""

from __future__ import annotations

import pytest
import torch

from autopar.rules.table import RULES
from tests.rules.harness import Axis, check, make_call


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


LOW_PRECISION = [
    ("aten._softmax.default", (half(6, 12), -1, False), "b"),
    ("aten._log_softmax.default", (half(6, 12), -1, False), "b"),
    ("aten._softmax_backward_data.default", (half(6, 12), half(6, 12).softmax(-1), -1, torch.bfloat16), "b"),
    ("aten.native_layer_norm.default", (half(6, 12), [12], half(12), half(12), 1e-5), "b"),
    ("aten.embedding.default", (half(12, 6), torch.randint(12, (6,))), "v"),
    ("aten.mean.dim", (half(6, 12), [1]), "b"),
]


@pytest.mark.parametrize("op, args, factor", LOW_PRECISION, ids=[op for op, _, _ in LOW_PRECISION])
def test_low_precision_keeps_its_dtypes_and_sums_in_single_precision(op, args, factor):
    check(make_call(op, args), [Axis(2, factor)], tolerance=2**-6)


@pytest.mark.parametrize("op", ["aten.native_layer_norm_backward.default", "aten.native_batch_norm_backward.default"])
def test_low_precision_backward(op):
    if "layer" in op:
        x = half(6, 12)
        _, mean, rstd = torch.ops.aten.native_layer_norm(x, [12], half(12), half(12), 1e-5)
        call, axis = make_call(op, (half(6, 12), x, [12], mean, rstd, half(12), half(12), [True] * 3)), Axis(2, "b")
    else:
        x, weight, stats = half(6, 4, 6), torch.rand(4).bfloat16(), torch.zeros(4).bfloat16()
        out = torch.ops.aten._native_batch_norm_legit_functional(x, weight, weight, stats, stats + 1, True, 0.1, 1e-5)
        call = make_call(op, (half(6, 4, 6), x, weight, stats, stats + 1, out[1], out[2], True, 1e-5, [True] * 3))
        axis = Axis(2, "n")
    check(call, [axis], tolerance=2**-4)


def double(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


TWICE = [
    ("aten._log_softmax.default", (double(6, 12), -1, False), ("b", "b")),
    ("aten.embedding.default", (double(12, 6), torch.randint(12, (6,))), ("v", "v")),
    ("aten.arange.start_step", (3, 39, 3), ("a", "a")),
    ("aten.native_layer_norm.default", (double(6, 12), [12], double(12), None, 1e-5), ("b", "b")),
]


@pytest.mark.parametrize("op, args, factors", TWICE, ids=[op for op, _, _ in TWICE])
def test_two_axes_may_split_one_factor(op, args, factors):
    check(make_call(op, args), [Axis(size, factor) for size, factor in zip((2, 3), factors, strict=True)])


WRONG = [
    ("aten._softmax.default", (double(6, 12), -1, False), "a b -> a b", "b"),  # the dim of a softmax without a body
    ("aten.relu.default", (double(6, 12),), "a b -> a b | 0", None),  # not linear
    ("aten.sum.dim_IntList", (double(6, 12), [1]), "a b -> a ^max", "b"),
    ("aten.cumsum.default", (double(6, 12), 0), "a b -> a b", "a"),
    ("aten.mm.default", (double(6, 6), double(6, 6)), "m k, n k -> m n", "k"),
    ("aten.var.correction", (double(6, 12), [1]), "a b -> a", "b"),
]


@pytest.mark.parametrize("op, args, text, factor", WRONG, ids=[op for op, *_ in WRONG])
def test_the_harness_sees_a_wrong_rule(op, args, text, factor, monkeypatch):
    monkeypatch.setitem(RULES, op, text)
    axis = Axis(2, factor) if factor else Axis(2, terms=frozenset({0}))
    with pytest.raises((AssertionError, RuntimeError)):
        check(make_call(op, args), [axis])


@pytest.mark.parametrize("op", ["aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default"])
def test_softmax_of_large_numbers_stays_finite(op):
    """The largest of all shards is taken off, and not more: else all exponentials vanish, or one overflows."""
    x = 300 + 400 * torch.rand(6, 12, dtype=torch.float64) * torch.tensor([1.0, -1.0]).repeat(6)
    assert x.amax() > 600 and x.amin() < 0
    check(make_call(op, (x, -1) if "safe" in op else (x, -1, False)), [Axis(3, "b")])
