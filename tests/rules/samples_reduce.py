"""Samples of reductions, softmax, norms and losses."""

from __future__ import annotations

from typing import Any

import torch

from autopar.emit import ops
from autopar.ir.batch_norm import IN_PARTS, IN_PARTS_BACKWARD
from tests.rules.samples_pointwise import F64, Samples, f, flags, ints, s

aten = torch.ops.aten
REDUCTIONS = ["any", "all"]


def _layer_norm_backward(shape: tuple[int, ...], normalized: list[int], mask: list[bool], affine: bool = True) -> Any:
    x, w, b = f(*shape), f(*normalized) if affine else None, f(*normalized) if affine else None
    _, mean, rstd = aten.native_layer_norm(x, normalized, w, b, 1e-5)
    return s(f(*shape), x, normalized, mean, rstd, w, b, mask)


def _rms_norm_backward(shape: tuple[int, ...], normalized: list[int], mask: list[bool]) -> Any:
    x, w = f(*shape), f(*normalized)
    return s(f(*shape), x, normalized, aten._fused_rms_norm(x, normalized, w, 1e-5)[1], w, mask)


def _batch_norm(*shape: int) -> tuple[Any, ...]:
    c = shape[1]
    return f(*shape), f(c), f(c), f(c), f(c).abs() + 0.5


def _batch_norm_backward(train: bool, *shape: int) -> Any:
    x, w, b, mean, var = _batch_norm(*shape)
    _, save_mean, save_rstd, _, _ = aten._native_batch_norm_legit_functional(x, w, b, mean, var, train, 0.1, 1e-5)
    return s(f(*shape), x, w, mean, var, save_mean, save_rstd, train, 1e-5, [True, True, True])


def _batch_norm_in_parts_backward(parts: int, mask: list[bool], *shape: int) -> Any:
    x, w, b, _, _ = _batch_norm(*shape)
    _, mean, rstd, _, _ = ops.batch_norm_in_parts(x, w, b, None, None, 0.1, 1e-5, parts)
    return s(f(*shape), x, w, mean, rstd, 1e-5, parts, mask)


def _group_norm_backward() -> Any:
    x, w = f(6, 24, 4, 3), f(24)
    _, mean, rstd = aten.native_group_norm(x, w, w, 6, 24, 12, 12, 1e-5)
    return s(f(6, 24, 4, 3), x, mean, rstd, w, 6, 24, 12, 12, [True, True, True])


def _weight_norm_backward(shape: tuple[int, ...], dim: int) -> Any:
    v, g = f(*shape), f(*(size if d == dim else 1 for d, size in enumerate(shape)))
    _, norms = aten._weight_norm_interface(v, g, dim)
    return s(f(*shape), v, g, norms, dim)


def _nll(how: int, weighted: bool, *spatial: int) -> Any:
    target = ints(12, 6, *spatial)
    target.flatten()[1] = 3  # the ignored label
    return s(f(6, 12, *spatial), target, f(12).abs() if weighted else None, how, 3)


def _nll_backward(how: int, weighted: bool, *spatial: int) -> Any:
    (logp, target, weight, _, ignored), _ = _nll(how, weighted, *spatial)
    op = aten.nll_loss2d_forward if spatial else aten.nll_loss_forward
    loss, total = op(logp, target, weight, how, ignored)
    return s(torch.randn_like(loss), logp, target, weight, how, ignored, total)


def _softmax_rows() -> torch.Tensor:
    x = f(6, 12, 18)
    x[0, 3] = -torch.inf
    x[1, :, :9] = -torch.inf
    return x


def _losses() -> Samples:
    def unit() -> torch.Tensor:
        return torch.rand(6, 12, dtype=F64) * 0.8 + 0.1

    found: Samples = {
        "aten.binary_cross_entropy.default": [s(unit(), unit(), w, how) for how in (0, 1, 2) for w in (None, f(12))],
        "aten.binary_cross_entropy_backward.default": [
            s(f(6, 12) if how == 0 else f(), unit(), unit(), w, how) for how in (0, 1, 2) for w in (None, f(12))
        ],
        "aten.binary_cross_entropy_with_logits.default": [
            s(f(6, 12), unit(), w, p, how)
            for how in (0, 1, 2)
            for w, p in ((None, None), (None, f(12)), (f(6, 12), f(12)))
        ],
    }
    for name, extra in (("mse_loss", ()), ("smooth_l1_loss", (0.7,)), ("huber_loss", (0.7,)), ("soft_margin_loss", ())):
        found[f"aten.{name}.default"] = [s(f(6, 12), f(6, 12), how, *extra) for how in (0, 1, 2)]
        found[f"aten.{name}_backward.default"] = [
            s(f(6, 12) if how == 0 else f(), f(6, 12), f(6, 12), how, *extra) for how in (0, 1, 2)
        ]
    return found


def samples() -> Samples:
    everything = [True, True, True]
    found: Samples = {
        "aten.sum.default": [s(f(6, 12)), s(ints(9, 6, 12))],
        "aten.sum.dim_IntList": [
            s(f(6, 12, 18), [0, -1]),
            s(f(6, 12, 18), [1], True),
            s(f(6, 12), None),
            s(f(6, 12), []),
        ],
        "aten.mean.default": [s(f(6, 12))],
        "aten.mean.dim": [s(f(6, 12, 18), [0, -1]), s(f(6, 12, 18), [1], True), s(f(6, 12), [-1], dtype=F64)],
        "aten.amax.default": [s(f(6, 12, 18), [1]), s(f(6, 12), [-1], True), s(f(6, 12))],
        "aten.amin.default": [s(f(6, 12, 18), [1]), s(f(6, 12))],
        "aten.max.default": [s(f(6, 12))],
        "aten.min.default": [s(f(6, 12))],
        "aten.prod.default": [s(f(6, 12))],
        "aten.prod.dim_int": [s(f(6, 12), 1)],
        "aten.var.correction": [s(f(6, 12), [1], correction=1), s(f(6, 12), None, correction=0)],
        "aten.var_mean.correction": [s(f(6, 12), [1], correction=1, keepdim=True)],
        "aten.std.correction": [s(f(6, 12), [0], correction=1)],
        "aten.logsumexp.default": [s(f(6, 12), [1])],
        "aten.linalg_vector_norm.default": [s(f(6, 12)), s(f(6, 12), 2, [1])],
        "aten.norm.ScalarOpt_dim": [s(f(6, 12), 2, [1])],
        "aten.histc.default": [s(f(6, 12), 24, -2, 2), s(f(6, 12), 24), s(ints(24, 12).double(), 24, 0, 23)],
        "aten.median.dim": [s(f(6, 12), 1)],
        "aten.kthvalue.default": [s(f(6, 12), 3, 1)],
        "aten.topk.default": [s(f(6, 12), 4), s(f(6, 12), 4, 0)],
        "aten.sort.default": [s(f(6, 12)), s(f(6, 12), 0, True)],
        "aten.sort.stable": [s(f(6, 12), stable=True, dim=0)],
        "aten.cummax.default": [s(f(6, 12), 1)],
        "aten.cummin.default": [s(f(6, 12), 1)],
        "aten.cumprod.default": [s(f(6, 12), 1)],
        "aten.logcumsumexp.default": [s(f(6, 12), 1)],
        "aten.bucketize.Tensor": [s(f(6, 12), f(18).sort().values)],
        "aten._softmax.default": [s(f(6, 12, 18), -1, False), s(f(6, 12, 18), 1, False)],
        "aten._safe_softmax.default": [s(_softmax_rows(), -1), s(_softmax_rows(), 1)],
        "aten._log_softmax.default": [s(f(6, 12, 18), 1, False), s(f(6, 12), -1, False)],
        "aten._softmax_backward_data.default": [s(f(6, 12), f(6, 12).softmax(-1), -1, F64)],
        "aten._log_softmax_backward_data.default": [s(f(6, 12), f(6, 12).log_softmax(1), 1, F64)],
        "aten.native_layer_norm.default": [
            s(f(6, 12, 18), [18], f(18), f(18), 1e-5),
            s(f(6, 12, 18), [12, 18], f(12, 18), None, 1e-5),
            s(f(6, 12), [12], None, None, 1e-5),
        ],
        "aten.native_layer_norm_backward.default": [
            _layer_norm_backward((6, 12, 18), [18], everything),
            _layer_norm_backward((6, 12, 18), [12, 18], everything),
            _layer_norm_backward((6, 12), [12], [True, False, False], affine=False),
            _layer_norm_backward((6, 12), [12], [False, True, True]),
        ],
        "aten._fused_rms_norm.default": [
            s(f(6, 12, 18), [18], f(18), 1e-5),
            s(f(6, 12), [12], None, 1e-5),
            s(f(6, 12), [12], f(12), None),
        ],
        "aten._fused_rms_norm_backward.default": [
            _rms_norm_backward((6, 12, 18), [18], [True, True]),
            _rms_norm_backward((6, 12), [12], [True, False]),
        ],
        "aten.native_group_norm.default": [
            s(f(6, 24, 4, 3), f(24), f(24), 6, 24, 12, 12, 1e-5),
            s(f(6, 12, 4), None, None, 6, 12, 4, 6, 1e-5),
        ],
        "aten.native_group_norm_backward.default": [_group_norm_backward()],
        "aten._native_batch_norm_legit_functional.default": [
            s(*_batch_norm(6, 12, 6, 18), True, 0.1, 1e-5),
            s(*_batch_norm(6, 12), True, 0.1, 1e-5),
            s(*_batch_norm(6, 12, 6), False, 0.1, 1e-5),
        ],
        "aten._native_batch_norm_legit.no_stats": [
            s(*_batch_norm(6, 12, 6, 18)[:3], True, 0.1, 1e-5),
            s(f(1, 12, 6), None, None, True, 0.1, 1e-5),
        ],
        IN_PARTS: [
            s(*_batch_norm(12, 12, 6, 2), 0.1, 1e-5, 6),
            s(*_batch_norm(12, 6)[:3], *[f(6, 6).abs() + 0.5] * 2, 0.1, 1e-5, 6),
            s(*_batch_norm(12, 6, 4)[:3], None, None, 0.1, 1e-5, 12),
            s(f(12, 6, 4), None, None, None, None, 0.1, 1e-5, 3),
        ],
        IN_PARTS_BACKWARD: [
            _batch_norm_in_parts_backward(6, [True, True, True], 12, 12, 6, 2),
            _batch_norm_in_parts_backward(6, [False, True, True], 12, 12),
            _batch_norm_in_parts_backward(3, [True, False, False], 6, 12, 4),
        ],
        "aten._native_batch_norm_legit_no_training.default": [s(*_batch_norm(6, 12, 6), 0.1, 1e-5)],
        "aten.native_batch_norm_backward.default": [
            _batch_norm_backward(True, 6, 12, 6, 18),
            _batch_norm_backward(True, 6, 12),
            _batch_norm_backward(False, 6, 12, 6),
        ],
        "aten._weight_norm_interface.default": [s(f(12, 6, 5), f(12, 1, 1), 0), s(f(6, 5, 12), f(1, 1, 12), 2)],
        "aten._weight_norm_interface_backward.default": [
            _weight_norm_backward((12, 6, 5), 0),
            _weight_norm_backward((6, 5, 12), 2),
        ],
        "aten.nll_loss_forward.default": [_nll(2, False), _nll(2, True), _nll(0, True), _nll(1, False)],
        "aten.nll_loss2d_forward.default": [_nll(2, True, 12, 18), _nll(0, False, 12, 18)],
        "aten.nll_loss_backward.default": [
            _nll_backward(2, False),
            _nll_backward(2, True),
            _nll_backward(0, True),
            _nll_backward(1, True),
        ],
        "aten.nll_loss2d_backward.default": [_nll_backward(2, True, 12, 18), _nll_backward(0, False, 12, 18)],
        **_losses(),
    }
    for name in ("max.dim", "min.dim", "argmax.default", "argmin.default"):
        found[f"aten.{name}"] = [s(f(6, 12, 18), 1), s(f(6, 12), -1, True)]
    for name in ("any", "all"):
        found[f"aten.{name}.default"] = [s(flags(6, 12))]
        found[f"aten.{name}.dim"] = [s(flags(6, 12), 1), s(flags(6, 12), 0, True)]
        found[f"aten.{name}.dims"] = [s(flags(6, 12, 18), [1, 2])]
    return found
