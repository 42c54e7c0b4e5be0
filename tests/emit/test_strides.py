"""What an operator gives hangs on numbers alone, and not on how these lie in memory: where layouts change, and where a
value comes from another rank, they lie otherwise than in the model, and some kernels of torch then give wrong numbers.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar._compat import pytree
from autopar.emit.writer import target_of
from tests.rules.test_rules import SAMPLES

DRAWS = ("rand", "dropout", "bernoulli", "poisson", "exponential", "geometric", "cauchy", "normal", "uniform", "empty")
# The rules of these say how an operand lies, or emitted code never calls them with one that lies otherwise.
ORDERED = ("_unsafe_view", "stride", "_grouped_mm")
# Steps of a program, and what CPUs have no kernel for.
OTHERS = ("autopar.fetch", "autopar.share", "autopar.store", "_fused_rms_norm_backward")
OPERATORS = [op for op in sorted(SAMPLES) if not any(name in op for name in DRAWS + ORDERED + OTHERS)]


def lying_otherwise(x: Tensor, draw: random.Random) -> Tensor:
    """The same numbers in another order in memory; dims of one element have any stride."""
    order = list(range(x.dim()))
    draw.shuffle(order)
    made = x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])
    pairs = zip(x.shape, made.stride(), strict=True)
    strides = [draw.choice([1, 7, 16]) if size == 1 else stride for size, stride in pairs]
    return made.as_strided(made.shape, strides)


def alike(found: Any, expected: Any) -> bool:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    floats = [(one, other) for one, other in pairs if isinstance(other, Tensor) and other.is_floating_point()]
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True) for one, other in floats)


@pytest.mark.parametrize("op", OPERATORS)
def test_no_result_hangs_on_how_an_operand_lies(op: str) -> None:
    draw, function = random.Random(0), target_of(op)
    for args, kwargs in SAMPLES[op]:
        expected = function(*args, **kwargs)
        for place, operand in enumerate(args):
            if not isinstance(operand, Tensor) or operand.dim() < 2:
                continue
            for _ in range(3):
                given = [*args[:place], lying_otherwise(operand, draw), *args[place + 1 :]]
                assert alike(function(*given, **kwargs), expected), (place, given[place].stride())


@pytest.mark.parametrize("shape", [(1, 4, 6, 5), (3, 4, 1, 5), (2, 16, 5, 1), (1, 3, 1, 8)])
def test_a_batch_norm_of_one_element_along_a_dim(shape: tuple[int, ...]) -> None:
    """As a convolution gives it in channels_last, viewed as a batch of one."""
    draw, aten = random.Random(0), torch.ops.aten
    torch.manual_seed(0)
    grad, x, weight = torch.randn(shape).double(), torch.randn(shape).double(), torch.randn(shape[1]).double()
    y, mean, rstd = aten._native_batch_norm_legit.no_stats(x, weight, None, True, 0.1, 1e-5)
    rest = weight, None, None, mean, rstd, True, 1e-5, [True, True, True]
    expected = aten.native_batch_norm_backward(grad, x, *rest)
    backward = target_of("aten.native_batch_norm_backward.default")
    for _ in range(30):
        lying = lying_otherwise(grad, draw), lying_otherwise(x, draw)
        assert alike(aten._native_batch_norm_legit.no_stats(lying[1], weight, None, True, 0.1, 1e-5)[0], y)
        assert alike(backward(*lying, *rest), expected)
