"""Models that ask for values. They are no tests: pytest writes the asserts of those anew."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from transformers.utils import torch_compilable_check


class Model(nn.Module):
    def __init__(self, does: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(4, 4).double(), does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self.linear(x), x).square().mean()


def asserted(y: Tensor, x: Tensor) -> Tensor:
    assert (x < 9).all(), "too large"
    assert not (x > 9).any()
    return y


def raised(y: Tensor, x: Tensor) -> Tensor:
    if (x > 9).any():
        raise ValueError(f"too large: {x.max()}")
    return y


def raised_otherwise(y: Tensor, x: Tensor) -> Tensor:
    if (x < 9).all():
        y = y * 2
    else:
        raise ValueError("too large")
    return y


def in_a_loop(y: Tensor, x: Tensor) -> Tensor:
    for row in x:
        assert row.max() < 9
        y = y + row
    return y


def by_transformers(y: Tensor, x: Tensor) -> Tensor:
    torch_compilable_check((x < 9).all(), "too large")
    return y


def number(y: Tensor, x: Tensor) -> Tensor:
    assert x.max().item() < 9, "too large"
    largest = x.abs().max().item()
    assert largest >= 0 and not largest > 9, "too large"
    assert 0 <= x.min().item() <= largest < 9, "too large"
    assert bool((x < 9).all()), "too large"
    if not (0 <= x.min() <= x.max() < 9):
        raise ValueError("too large")
    return y


def raised_for_a_number(y: Tensor, x: Tensor) -> Tensor:
    if (x > 9).any().item() or (x > 9).sum().item() + 1 != 1:
        raise ValueError(f"too large: {x.max().item():.3f}")
    return y


ENDING = {
    "asserted": asserted, "raised": raised, "otherwise": raised_otherwise, "loop": in_a_loop,
    "transformers": by_transformers, "number": number, "raised for a number": raised_for_a_number,
}  # fmt: skip
