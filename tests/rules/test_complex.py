"""The rules of operators that take complex numbers hold for them: split, and with partial sums, as for real ones.

Absolute values, angles and signs of a sum are not the sum of theirs; real and imaginary parts, conjugates and
transforms are, and a product is in either operand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.rules.notation import Rule
from tests.rules.harness import Call, check, make_call, ways
from tests.rules.samples_pointwise import c, f
from tests.rules.test_rules import SAMPLES

# Those of the table that torch has for complex numbers on a CPU, and that a trace of them can hold.
OPERATORS = """
    _fft_c2c.default _fft_c2r.default _reshape_copy.default _to_copy.default _unsafe_index.Tensor
    _unsafe_index_put.default _unsafe_view.default abs.default acos.default acosh.default add.Scalar add.Tensor
    addcdiv.default addcmul.default addmm.default alias.default angle.default asin.default asinh.default atan.default
    atanh.default baddbmm.default bmm.default cat.default clone.default conj_physical.default constant_pad_nd.default
    convolution_backward.default copy.default cos.default cosh.default cumprod.default
    cumsum.default detach.default diagonal.default div.Scalar div.Tensor div.Tensor_mode dot.default embedding.default
    eq.Scalar eq.Tensor exp.default exp2.default expand.default expm1.default fill.Scalar fill.Tensor flip.default
    full_like.default gather.default index.Tensor index_add.default index_put.default index_select.default
    isclose.default isfinite.default isinf.default isnan.default lerp.Scalar lerp.Tensor linalg_vector_norm.default
    log.default log10.default log1p.default log2.default logaddexp.default logcumsumexp.default logical_and.default
    logical_not.default logical_or.default logical_xor.default logsumexp.default masked_fill.Scalar masked_fill.Tensor
    mean.default mean.dim mm.default mul.Scalar mul.Tensor mv.default nan_to_num.default ne.Scalar ne.Tensor
    neg.default new_full.default new_ones.default new_zeros.default norm.ScalarOpt_dim ones_like.default
    permute.default pixel_shuffle.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prod.default prod.dim_int
    reciprocal.default reflection_pad1d.default reflection_pad1d_backward.default reflection_pad2d.default
    reflection_pad2d_backward.default repeat.default replication_pad1d.default replication_pad1d_backward.default
    replication_pad2d.default replication_pad2d_backward.default reshape.default roll.default rsqrt.default
    rsub.Scalar rsub.Tensor scatter.src scatter.value scatter_add.default select.int select_backward.default
    select_scatter.default sgn.default sigmoid.default sigmoid_backward.default silu.default silu_backward.default
    sin.default sinc.default sinh.default slice.Tensor slice_backward.default slice_scatter.default split.Tensor
    split_with_sizes.default sqrt.default square.default squeeze.default squeeze.dim squeeze.dims stack.default
    std.correction sub.Scalar sub.Tensor sum.default sum.dim_IntList t.default tan.default tanh.default
    tanh_backward.default transpose.int tril.default triu.default unbind.int unsqueeze.default var.correction
    var_mean.correction vdot.default view.default view_as_real.default view_copy.default where.ScalarOther
    where.ScalarSelf where.self zeros_like.default
"""
OURS = ("autopar.einsum", "autopar.fetch", "autopar.share", "autopar.store")


def as_complex(arg: Any) -> Any:
    """The argument with complex numbers in the place of real ones in double precision."""
    if isinstance(arg, torch.Tensor):
        return c(*arg.shape) if arg.dtype == torch.float64 else arg
    return type(arg)(map(as_complex, arg)) if isinstance(arg, list | tuple) else arg


def calls(op: str) -> list[Call]:
    """The samples of the operator, in complex numbers. Some have options that complex numbers do not."""
    made: list[Call] = []
    for args, kwargs in SAMPLES[op]:
        try:
            call = make_call(op, as_complex(args), kwargs)
        except RuntimeError:
            continue
        if any(value.is_complex() for value in call.operands):
            made.append(call)
    assert made, f"torch does not run {op} on complex numbers"
    return made


def rule_of(call: Call) -> Rule:
    assert call.rule is not None
    return call.rule


@pytest.mark.parametrize("op", [*(f"aten.{name}" for name in OPERATORS.split()), *OURS])
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_split_and_joined_equals_whole_for_complex_numbers(op: str) -> None:
    torch.manual_seed(0)
    for call in calls(op):
        for size in (2, 3):
            for way in ways(call, rule_of(call), size):
                check(call, (way,))


@pytest.mark.parametrize(
    ("op", "alternatives"),
    [("abs", set()), ("angle", set()), ("sgn", set()), ("conj_physical", {(0,)}), ("neg", {(0,)})],
)
def test_which_parts_of_a_sum_are_sums_of_parts(op: str, alternatives: set[tuple[int, ...]]) -> None:
    rule = rule_of(make_call(f"aten.{op}.default", (c(6, 12),)))
    assert {tuple(sorted(positions)) for positions in rule.linear} == alternatives


def test_a_transform_splits_only_what_it_does_not_transform() -> None:
    for op, args in (
        ("_fft_r2c", (f(4, 6, 8, 10), [2, 3], 0, True)),
        ("_fft_c2r", (c(4, 6, 8, 6), [2, 3], 2, 10)),
        ("_fft_c2c", (c(4, 6, 8, 10), [2, 3], 0, False)),
    ):
        rule = rule_of(make_call(f"aten.{op}.default", args))
        assert rule.splittable == ("a", "b") and rule.linear == (frozenset({0}),)


def test_real_and_imaginary_part_stay_together() -> None:
    rule = rule_of(make_call("aten.view_as_real.default", (c(6, 12),)))
    assert rule.splittable == ("a", "b") and rule.sizes["c"] == 2
