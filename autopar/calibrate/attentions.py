"""Attention by the kernels that are emitted for this device: causal and full, without and with dropout."""

from __future__ import annotations

import itertools

import torch

from autopar.calibrate.bench import Made, work
from autopar.emit import ops
from autopar.emit.attention import Asked, cudnn_first, kernel_for
from autopar.ir.attention import DROPPED

# (batch, heads, sequence, head size, held out of the fit); a GPU gets larger ones
SHAPES = ((1, 4, 64, 64, 0), (2, 4, 128, 64, 0), (1, 8, 192, 64, 1), (1, 4, 512, 64, 0), (1, 2, 256, 32, 0))
MORE_ON_CUDA = ((4, 6, 128, 64, 0), (2, 4, 256, 128, 0), (1, 4, 1024, 128, 0))
DROPOUT = 0.1


def attentions(device: torch.device, dtype: torch.dtype) -> Made:
    """Forward and backward. On a CPU causal ones alone: there is one kernel, which plain products stand in for where
    values are dropped.
    """
    ways, shapes = [(True, 0.0)], SHAPES
    if device.type == "cuda":
        ways = [*itertools.product((True, False), (0.0, DROPOUT))]
        shapes = tuple((2 * b, 2 * h, 8 * s, d, held) for b, h, s, d, held in (*SHAPES, *MORE_ON_CUDA))
    for causal, dropout in ways:
        for b, h, s, d, held in shapes:
            q, k, v, g = (torch.randn(b, h, s, d, device=device).to(dtype) for _ in range(4))
            asked = Asked(causal, d**-0.5, dropout, False)
            kernel = kernel_for(q, k, v, None, asked, cudnn=cudnn_first(device.type))
            told = causal, asked.scale, dropout, False, kernel
            one = 2.0 * b * h * s * s * d / (2 if causal else 1)
            out, lse, state = ops.attention(q, k, v, None, *told)
            given = g, q, k, v, None, out, lse, state, *told
            name = ("causal" if causal else "full") + (DROPPED if dropout else "")
            for op, flops, call, args in (
                ("autopar.attention", 2 * one, ops.attention, (q, k, v, None, *told)),
                ("autopar.attention_backward", 5 * one, ops.attention_backward, given),
            ):
                yield work(f"{op}.{name}", "attention", flops, call, *args, own=True, held=held)
