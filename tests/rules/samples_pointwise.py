"""Samples of pointwise operators and of factories: operator -> list of (args, kwargs)."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.table_pointwise import BINARY, GRADIENT, UNARY, UNARY_SCALAR

Sample = tuple[tuple[Any, ...], dict[str, Any]]
Samples = dict[str, list[Sample]]

F64, F32, BF16, I64, I32, BOOL = torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool
C128, C64 = torch.complex128, torch.complex64


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=F64)


def c(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=C128)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.4


def s(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


def _unary(name: str) -> list[Sample]:
    extra: dict[str, tuple[Any, ...]] = {
        "threshold": (0.3, 7.0),
        "clamp": (-0.5, 0.5),
        "clamp_min": (0.1,),
        "clamp_max": (0.1,),
    }
    if name == "bitwise_not":
        return [s(ints(50, 6, 12))]
    return [s(f(6, 12, 1), *extra.get(name, ()))]


def _binary(name: str) -> list[Sample]:
    if name.startswith(("bitwise", "gcd")):
        return [s(ints(9, 6, 1, 12), ints(9, 18, 12))]
    if name == "pow.Tensor_Scalar":
        return [s(f(6, 12), 3)]
    if name == "pow.Scalar":
        return [s(2.5, f(6, 12))]
    if name == "round.decimals":
        return [(s(f(6, 12))[0], {"decimals": 2})]
    if name == "where.ScalarSelf":
        return [s(flags(6, 12), 2.0, f(6, 12))]
    if name == "where.ScalarOther":
        return [s(flags(6, 12), f(6, 12), 2.0)]
    if name == "where.Scalar":
        return [s(flags(6, 12), 1.0, 2.0)]
    if name.startswith("clamp."):
        return [s(f(6, 12), f(6, 12), f(12))]
    if name.startswith("_prelu"):
        return [s(f(6, 12), f(1, 12))]
    return [s(f(6, 1, 12), f(18, 12)), s(f(6, 12), f())]


_AFTER_GRAD: dict[str, tuple[Any, ...]] = {
    "threshold": (0.3,), "hardtanh": (-1.0, 1.0), "leaky_relu": (0.2, False), "softplus": (1.0, 20.0),
    "softshrink": (0.5,), "hardshrink": (0.5,), "logit": (1e-3,),
}  # fmt: skip


def _gradient(name: str) -> list[Sample]:
    x, grad = f(6, 12), f(6, 12)
    if name == "elu":
        return [s(grad, 1.0, 1.5, 1.0, False, x)]
    if name == "log_sigmoid":
        return [s(grad, x, torch.ops.aten.log_sigmoid_forward(x)[1])]
    if name == "_prelu_kernel":
        return [s(grad, x, f(1, 12))]
    if name == "native_dropout":
        return [s(grad, flags(6, 12), 1.25)]
    return [s(grad, x, *_AFTER_GRAD.get(name, ()))]


def _scalar(name: str) -> list[Sample]:
    return [s(ints(50, 6, 12) if name.startswith("bitwise") else f(6, 12), 3)]


def samples() -> Samples:
    return {
        **{f"aten.{name}.default": _unary(name) for name in UNARY.split()},
        **{f"aten.{name}.Scalar": _scalar(name) for name in UNARY_SCALAR.split()},
        **{f"aten.{name}": _binary(name) for name in BINARY.split()},
        **{f"aten.{name}_backward.default": _gradient(name) for name in GRADIENT.split()},
        **{f"aten.{name}.default": [s(f(6, 12))] for name in ["neg", "clone", "alias", "detach", "lift_fresh_copy"]},
        "autopar.share": [s(f(6, 12))],
        "autopar.store": [s(f(6, 12)), s(f()), s(ints(9, 6, 1, 12))],
        "autopar.fetch": [s(f(6, 12)), s(f()), s(ints(9, 6, 1, 12))],
        "autopar.to_reduce_dtype": [s(f(6, 12).bfloat16(), dtype=F32)],
        "aten._to_copy.default": [
            s(f(6, 12), dtype=F32),
            s(f(6, 12).bfloat16(), dtype=F64),
            s(f(6, 12), dtype=I64),
            s(ints(9, 6, 12), dtype=F64),
            s(flags(6, 12), dtype=F64),
            s(f(6, 12), dtype=C128),
            s(c(6, 12).to(C64), dtype=C128),
        ],
        "aten.add.Tensor": [s(f(6, 1, 12), f(18, 12), alpha=2), s(f(6, 12), 3.0), s(f(6, 12), f())],
        "aten.sub.Tensor": [s(f(6, 12), f(12)), s(f(6, 12), 3.0)],
        "aten.rsub.Tensor": [s(f(6, 12), f(12))],
        "aten.mul.Tensor": [s(f(6, 12), f(6, 1)), s(f(6, 12), 3.0), s(ints(9, 6, 12), ints(9, 12))],
        "aten.mul.Scalar": [s(f(6, 12), 3.0)],
        "aten.div.Tensor": [s(f(6, 12), f(12)), s(f(6, 12), 3.0), s(ints(9, 6, 12), 4)],
        "aten.div.Scalar": [s(f(6, 12), 3.0)],
        "aten.div.Tensor_mode": [s(f(6, 12), f(12), rounding_mode="floor"), s(f(6, 12), f(12), rounding_mode=None)],
        "aten.div.Scalar_mode": [s(f(6, 12), 0.3, rounding_mode="trunc")],
        "aten.where.self": [s(flags(6, 1), f(6, 12), f(12)), s(flags(6, 12), f(6, 12), f())],
        "aten.masked_fill.Scalar": [s(f(6, 12), flags(12), 0.0), s(f(6, 12), flags(6, 12), -5.0)],
        "aten.masked_fill.Tensor": [s(f(6, 12), flags(12), f())],
        "aten.lerp.Scalar": [s(f(6, 12), f(12), 0.3)],
        "aten.lerp.Tensor": [s(f(6, 12), f(12), f(6, 1))],
        "aten.addcmul.default": [s(f(6, 12), f(6, 12), f(12), value=0.5)],
        "aten.addcdiv.default": [s(f(6, 12), f(6, 12), f(12), value=0.5)],
        "aten.copy.default": [s(f(6, 12), f(12)), s(f(6, 12), f(6, 12))],
        "aten.view_as_real.default": [s(c(6, 12)), s(c())],
        "aten.view_as_complex.default": [s(f(6, 12, 2)), s(f(2))],
        "aten.conj_physical.default": [s(c(6, 12))],
        "aten.complex.default": [s(f(6, 12), f(6, 12)), s(f(6, 1), f(12))],
        "aten.polar.default": [s(f(6, 12), f(6, 12)), s(f(12), f(6, 1))],
        "aten.fill.Scalar": [s(f(6, 12), 2.0)],
        "aten.fill.Tensor": [s(f(6, 12), f())],
        "aten.zeros_like.default": [s(f(6, 12))],
        "aten.ones_like.default": [s(f(6, 12))],
        "aten.full_like.default": [s(f(6, 12), 4.5)],
        "aten.empty_like.default": [s(f(6, 12))],
        "aten.full.default": [s([6, 12], 4.5, dtype=F64)],
        "aten.zeros.default": [s([6, 12], dtype=F64)],
        "aten.ones.default": [s([6, 12], dtype=F64), s([])],
        "aten.empty.memory_format": [s([6, 12], dtype=F64)],
        "aten.scalar_tensor.default": [s(4.5, dtype=F64)],
        "aten.new_zeros.default": [s(f(6, 12), [12, 6])],
        "aten.new_ones.default": [s(f(6, 12), [12, 6]), s(f(6), [])],
        "aten.new_full.default": [s(f(6, 12), [12, 6], 4.5)],
        "aten.new_empty.default": [s(f(6, 12), [12, 6])],
        "aten.arange.default": [s(12), s(12, dtype=F64)],
        "aten.arange.start": [s(3, 21), s(3, 21, dtype=I32)],
        "aten.arange.start_step": [s(5, 41, 3), s(0.5, 2.0, 0.125, dtype=F64), s(10, -2, -1)],
        "aten.native_dropout.default": [s(f(6, 12), 0.5, False), s(f(6, 12), 0.5, True)],
        **{f"aten.{name}.default": [s(f(6, 12))] for name in ("rand_like", "randn_like")},
        "aten.randint_like.default": [s(f(6, 12), 9)],
        "aten.rand.default": [s((6, 12), dtype=F64)],
        "aten.randn.default": [s((6, 12), dtype=F64)],
        "aten.randint.default": [s(9, (6, 12))],
        "aten.randint.low": [s(3, 9, (6, 12))],
        "aten.normal.float_float": [s(0.5, 2.0, (6, 12), dtype=F64)],
        "aten.bernoulli.default": [s(torch.rand(6, 12, dtype=F64))],
        "aten.poisson.default": [s(torch.rand(6, 12, dtype=F64))],
        **{f"aten.{name}": [s(f(6, 12), 0.5)] for name in ("bernoulli.p", "exponential.default", "geometric.default")},
        **{f"aten.{name}.default": [s(f(6, 12), 0.5, 2.0)] for name in ("normal_functional", "uniform", "cauchy")},
        "aten.log_normal.default": [s(f(6, 12), 0.5, 2.0)],
    }
