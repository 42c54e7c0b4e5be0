"""Mixtures of experts that ask whether an expert has a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.processes.compare import whole

WIDTH, COUNT, TOKENS = 6, 4, 12
STEPS = ((0, 1, 2, 3), (1,), (3, 0), (2,), (0, 1, 2, 3))  # the experts that have tokens
Form = Callable[["Layer", Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        return self.form(self, x, scores, scores.argmax(-1))

    def one(self, number: int, x: Tensor, chosen: Tensor, out: Tensor) -> None:
        """Has an expert write what it makes of its tokens."""
        mask = chosen == number
        if not mask.any():
            return
        out[mask] += self.experts[number](x[mask])


class Experts(nn.Module):
    """`depth` layers, one behind the other. The router's scores are hidden values, which `bias` moves."""

    def __init__(self, form: Form, depth: int = 1) -> None:
        super().__init__()
        self.depth = depth
        self.router = nn.Linear(WIDTH, COUNT)
        self.layers = nn.ModuleList(Layer(form) for _ in range(depth))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1) + bias
        h = x
        for layer in self.layers:
            h = h + layer(h, scores)
        return functional.mse_loss(h, x.sin())


class Formed(nn.Module):
    """What a form makes of what a linear layer gives, in double precision."""

    def __init__(self, form: Callable[[Tensor], Any], width: int = 4) -> None:
        super().__init__()
        self.form, self.inner = form, nn.Linear(width, width).double()

    def forward(self, x: Tensor) -> Any:
        return self.form(self.inner(x))


def tokens(used: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Tokens, and what makes each of them choose one of the experts that are `used`."""
    torch.manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    bias = torch.zeros(TOKENS, COUNT, dtype=torch.float64)
    for place in range(TOKENS):
        bias[place, used[place % len(used)]] = 5.0
    return x, bias


def alike(plain: nn.Module, parallel: nn.Module) -> None:
    """The same parameters, and the same of them with the same gradients."""
    for (name, one), (_, other) in zip(plain.named_parameters(), parallel.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        for mine, theirs in ((one, other), (one.grad, other.grad)):
            if mine is not None and theirs is not None:
                torch.testing.assert_close(whole(theirs.detach()), mine.detach(), rtol=1e-9, atol=1e-11)


def both_backward(plain: nn.Module, parallel: nn.Module, steps: Sequence[tuple[int, ...]]) -> None:
    """Backward of both in each step, of tokens for these experts, and the same gradients."""
    for seed, used in enumerate(steps):
        for each in (plain, parallel):
            each.zero_grad()
            each(*tokens(used, seed)).backward()
        alike(plain, parallel)


def quick_ones(forms: Iterable[str], first: Sequence[str]) -> list[Any]:
    """Names of forms, of which those that are not among the first run as slow tests."""
    return [name if name in first else pytest.param(name, marks=pytest.mark.slow) for name in forms]


def any_of_mask(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        mask = chosen == number
        if mask.any():
            out[mask] = expert(x[mask]) * scores[mask, number].unsqueeze(-1)
    return out


def goes_on_where_none(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        mask = chosen == number
        if not mask.any():
            continue
        rows = x[mask]
        made = expert(rows)
        made = made.relu()
        out[mask] += made
    return out


def as_a_number(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        mask = chosen == number
        if mask.sum().item() > 0:
            out[mask] = expert(x[mask])
    return out


def sum_is_zero(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = x.clone()
    for number, expert in enumerate(layer.experts):
        mask = chosen == number
        if mask.sum() == 0:
            continue
        out[mask] = expert(x[mask])
    return out


def number_of_indices(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        (rows,) = torch.where(chosen == number)
        if rows.numel() == 0:
            continue
        out.index_add_(0, rows, expert(x[rows]) * scores[rows, number, None])
    return out


def length_of_indices(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number in range(COUNT):
        rows = (chosen == number).nonzero(as_tuple=True)[0]
        if len(rows) > 0:
            with torch.autocast("cpu", enabled=False):
                out[rows] += layer.experts[number](x[rows])
    return out


def no_indices(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number in range(COUNT):
        rows = (chosen == number).nonzero().squeeze(-1)
        if not len(rows):
            continue
        out[rows] = layer.experts[number](x[rows])
    return out


def first_size(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    hot = functional.one_hot(chosen.unsqueeze(-1), COUNT).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for number in range(COUNT):
        _, rows = torch.where(hot[number])
        if rows.shape[0] == 0:
            continue
        out.index_add_(0, rows, layer.experts[number](x[rows]))
    return out


def a_shaped_mask(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    whole, out = x.view(2, -1, WIDTH), torch.zeros_like(x).view(2, -1, WIDTH)
    for number, expert in enumerate(layer.experts):
        mask = (chosen == number).view(2, -1)
        flat = mask.view(-1)
        if flat.any():
            out[mask] += expert(x[flat]) + whole[mask]
    return out.view_as(x)


def counted(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    counts = torch.bincount(chosen, minlength=COUNT).tolist()
    for number in range(COUNT):
        if counts[number] == 0:
            continue
        (rows,) = torch.where(chosen == number)
        out[rows] += layer.experts[number](x[rows])
    return out


def in_a_method(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number in range(COUNT):
        layer.one(number, x, chosen, out)
    return out


def behind_a_dim(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    hot = functional.one_hot(chosen.unsqueeze(-1), COUNT).permute(2, 1, 0)
    for number in range(COUNT):
        slots, rows = torch.where(hot[number])
        if rows.shape[0] == 0:
            continue
        listed, slots_listed = rows.tolist(), slots.tolist()
        own = x[None, listed].reshape(-1, WIDTH)
        weights = scores[:, number, None][listed, slots_listed]
        out.index_add_(0, rows, layer.experts[number](own) * weights.unsqueeze(-1))
    return out


def hits(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    hot = functional.one_hot(chosen.unsqueeze(-1), COUNT).permute(2, 1, 0)
    for number in torch.greater(hot.sum(dim=(-1, -2)), 0).nonzero():
        _, rows = torch.where(hot[number].squeeze(0))
        out.index_add_(0, rows, layer.experts[number](x[None, rows].reshape(-1, WIDTH)))
    return out


def listed_hits(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    found = torch.bincount(chosen, minlength=COUNT) > 0
    for number in found.nonzero().flatten().tolist():
        mask = chosen == number
        out[mask] = layer.experts[number](x[mask])
    return out


def two_that_name_alike(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number in (0, 1):
        mask = chosen == number
        if mask.any():
            rows = x[mask]
            out[mask] = layer.experts[number](rows)
    for number in (2, 3):
        mask = chosen == number
        if mask.any():
            if layer.training:
                rows = x[mask]
            else:
                scale = 1.0
                rows = x[mask] * scale
            rows = layer.experts[number](rows)
            out[mask] = rows
    rows = x * 0.5
    return out + rows


FORMS: dict[str, Form] = {
    one.__name__: one
    for one in (
        any_of_mask, goes_on_where_none, as_a_number, sum_is_zero, number_of_indices, length_of_indices, no_indices,
        first_size, a_shaped_mask, counted, in_a_method, behind_a_dim, hits, listed_hits, two_that_name_alike,
    )
}  # fmt: skip
