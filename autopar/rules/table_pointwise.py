"""Rules of operators that work element by element, with broadcasting, and of those that make tensors from nothing."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Node
from autopar.rules.spelling import LETTERS, Table, Types, Writer, arg, foreign, linear, operands, shape_of, spell


def aligned(node: Node, types: Types, alternatives: Sequence[str]) -> str:
    """Trailing dims aligned, as torch broadcasts. Linear alternatives that name a number and no tensor drop out."""
    full = shape_of(node)
    rank = len(full)

    def words(shape: tuple[int, ...], place: str) -> str:
        if 0 in shape and 0 not in full:  # an unused buffer (log_sigmoid on CUDA)
            return foreign(shape, place)
        return spell(shape, LETTERS[rank - len(shape) : rank])

    left = ", ".join(words(type.shape, f"x{place}_") for place, type in enumerate(types))
    right = ", ".join("-" if out is None else words(out.shape, f"y{place}_") for place, out in enumerate(node.outputs))
    fit = [one for one in alternatives if max(map(int, one)) < len(types)]
    return f"{left} -> {right}{linear(*fit)}"


def pointwise(*alternatives: str) -> Writer:
    return lambda node, types: aligned(node, types, alternatives)


def zero_value(node: Node, types: Types) -> str:
    """masked_fill: linear only where the number that is filled in is zero."""
    return aligned(node, types, ["0"] if node.args[2] == 0 else [])


def division(node: Node, types: Types) -> str:
    """Rounding is not linear."""
    return aligned(node, types, [] if arg(node, 2, "rounding_mode") else ["0"])


def to_copy(node: Node, types: Types) -> str:
    """A partial sum may be widened before it is added up; narrowed or cut to whole numbers it may not."""
    target = node.outputs[0]
    assert target is not None
    return aligned(node, types, ["0"] if target.dtype in WIDER.get(types[0].dtype, ()) else [])


WIDER = {
    "float16": ("float16", "float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float32": ("float32", "float64", "complex64", "complex128"),
    "float64": ("float64", "complex128"),
    "complex64": ("complex64", "complex128", "float32", "float64"),  # the real part of a sum is that of its terms
    "complex128": ("complex128", "float64"),
    "int32": ("int32", "int64", "float64"),
    "int64": ("int64", "float64"),
}


def made(node: Node, types: Types) -> str:
    """Same values everywhere: any dim may be split. Operands give no more than their dtype."""
    left = ", ".join(foreign(type.shape, f"x{place}_") for place, type in enumerate(types))
    return f"{left} -> {spell(shape_of(node))}"


def counted(node: Node, types: Types) -> str:
    return f"{operands(node, {})} -> {spell(shape_of(node), body={0: 'counting'})}"


UNARY = """
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu cos cosh deg2rad digamma elu erf erfc
    erfinv exp exp2 expm1 floor frac gelu hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf
    isposinf leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num reciprocal
    relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink hardshrink sqrt
    square tan tanh threshold trunc clamp clamp_min clamp_max log_sigmoid_forward special_ndtri special_log_ndtr
"""
UNARY_SCALAR = "eq ne lt le gt ge pow fmod remainder bitwise_and bitwise_or bitwise_xor rsub add sub"
BINARY = """
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and.default logical_or.default
    logical_xor.default bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor
    bitwise_right_shift.Tensor minimum.default maximum.default fmin.default fmax.default pow.Tensor_Tensor
    pow.Tensor_Scalar pow.Scalar fmod.Tensor remainder.Tensor floor_divide.default atan2.default hypot.default
    clamp.Tensor clamp_min.Tensor clamp_max.Tensor logaddexp.default logaddexp2.default xlogy.Tensor
    nextafter.default copysign.Tensor heaviside.default isclose.default where.ScalarSelf where.ScalarOther
    where.Scalar special_xlog1py.default gcd.default round.decimals _prelu_kernel.default
"""
# The first operand is the gradient, and the result is linear in it.
GRADIENT = """
    gelu silu sigmoid tanh threshold hardtanh hardsigmoid hardswish leaky_relu elu softplus softshrink
    hardshrink mish log_sigmoid logit _prelu_kernel native_dropout
"""

# Random numbers, element by element: shaped like an operand, with the distribution that it says, from nothing.
DRAWN_LIKE = "rand_like randn_like randint_like"
DRAWN_FROM = """
    bernoulli.default bernoulli.p poisson.default normal_functional.default uniform.default exponential.default
    log_normal.default cauchy.default geometric.default
"""
DRAWN = "rand.default randn.default randint.default randint.low normal.float_float"

POINTWISE: Table = {
    **{f"aten.{name}.default": pointwise() for name in UNARY.split()},
    **{f"aten.{name}.Scalar": pointwise() for name in UNARY_SCALAR.split()},
    **{f"aten.{name}": pointwise() for name in BINARY.split()},
    **{f"aten.{name}_backward.default": pointwise("0") for name in GRADIENT.split()},
    "aten.neg.default": pointwise("0"),
    "aten.conj_physical.default": pointwise("0"),
    "aten.complex.default": pointwise("01"),
    "aten.polar.default": pointwise("0"),
    "aten.clone.default": pointwise("0"),
    "autopar.share": pointwise("0"),
    "autopar.to_reduce_dtype": pointwise("0"),
    "autopar.store": pointwise("0"),
    "autopar.fetch": pointwise("0"),
    "aten.alias.default": pointwise("0"),
    "aten.detach.default": pointwise("0"),
    "aten.lift_fresh_copy.default": pointwise("0"),
    "aten._to_copy.default": to_copy,
    "aten.add.Tensor": pointwise("01"),
    "aten.sub.Tensor": pointwise("01"),
    "aten.rsub.Tensor": pointwise("01"),
    "aten.mul.Tensor": pointwise("0", "1"),
    "aten.mul.Scalar": pointwise("0"),
    "aten.div.Tensor": pointwise("0"),
    "aten.div.Scalar": pointwise("0"),
    "aten.div.Tensor_mode": division,
    "aten.div.Scalar_mode": division,
    "aten.where.self": pointwise("12"),
    "aten.masked_fill.Scalar": zero_value,
    "aten.masked_fill.Tensor": pointwise("02"),
    "aten.lerp.Scalar": pointwise("01"),
    "aten.lerp.Tensor": pointwise("01"),
    "aten.addcmul.default": pointwise("01", "02"),
    "aten.addcdiv.default": pointwise("01"),
    "aten.copy.default": pointwise("1"),
    "aten.fill.Scalar": pointwise(),  # only shape and dtype of the operand count
    "aten.fill.Tensor": pointwise("1"),
    "aten.zeros_like.default": pointwise(),  # only shape and dtype of the operand count
    "aten.ones_like.default": pointwise(),  # only shape and dtype of the operand count
    "aten.empty_like.default": pointwise(),  # only shape and dtype of the operand count
    "aten.full_like.default": pointwise(),  # only shape and dtype of the operand count
    "aten.full.default": made,
    "aten.zeros.default": made,
    "aten.ones.default": made,
    "aten.empty.memory_format": made,
    "aten.scalar_tensor.default": made,
    "aten.new_zeros.default": made,
    "aten.new_ones.default": made,
    "aten.new_full.default": made,
    "aten.new_empty.default": made,
    "aten.arange.default": counted,
    "aten.arange.start": counted,
    "aten.arange.start_step": counted,
    # Each piece draws numbers of its own, from a seed of its own (`autopar.emit.seeded`).
    "aten.native_dropout.default": pointwise(),
    **{f"aten.{name}.default": pointwise() for name in DRAWN_LIKE.split()},
    **{f"aten.{name}": pointwise() for name in DRAWN_FROM.split()},
    **{f"aten.{name}": made for name in DRAWN.split()},
}
