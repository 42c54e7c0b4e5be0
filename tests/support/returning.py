"""Branches that are taken by values, and return, or choose in an expression."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.branching import COUNT, Layer


def returned(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    mask, out = chosen == 0, torch.zeros_like(x)
    if not mask.any():
        return x
    out[mask] = x[mask]
    return out


def returns_another(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    mask = chosen == 1
    if not mask.any():
        return layer.experts[0](x).sum() * 0.25
    rows = layer.experts[1](x[mask])
    return functional.smooth_l1_loss(rows, x[mask].sin())


def returns_in_turn(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    first, out = (chosen == 0).any(), x * 0.5
    if first:
        out += 1.5
        more = layer.experts[1](x).tanh()
        return out + more
    if (chosen == 3).sum() == 0:
        return out / scores.sum()
    if layer.training:
        out = out * 2
    last = layer.experts[2](out)
    return (
        last.square()
        .mul(out)
    )  # fmt: skip


def returns_two(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    loss, correct = _pair(layer, x, chosen == 1)
    other, _ = _pair(layer, x, chosen == 2)
    return x + loss * correct + other


def _pair(layer: Layer, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    if mask.sum() == 0:
        return x.sum() * 0.0, x.new_zeros(())
    rows = layer.experts[1](x[mask])
    loss = rows.square().mean()
    correct = (rows > 0).double().mean()
    return loss, correct


def chooses(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    mask = chosen == 0
    loss = layer.experts[0](x[mask]).square().mean() if mask.any() else x.new_zeros(())
    loss = loss + (x if not mask.any() else (x * loss).tanh()).mean()
    loss += layer.experts[2](x).mul(2).sum() if layer.training and (chosen == 2).any() else loss
    return x * functional.relu(loss) if (chosen == 1).any() else x + _either(layer, x, chosen)


def _either(layer: Layer, x: Tensor, chosen: Tensor) -> Tensor:
    return layer.experts[1](x[chosen == 1]).sum(0) / (chosen == 1).sum() if (chosen == 1).any() else x[0]


class Skipped(nn.Module):
    """A layer that is left out at random, as a module that returns early."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(1).item() < 0.4:
            return x
        return x + self.inner(x)


def skips_layers(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    for expert in layer.experts:
        x = Skipped(expert)(x)
    return x


def returns_zeros(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    def run(number: int) -> Tensor:
        mask = chosen == number
        if not mask.any():
            return torch.zeros_like(x)
        out, parts = torch.zeros_like(x), []
        out[mask] = layer.experts[number](x[mask])
        for part in out.chunk(2, -1):
            parts.append(part * 2)
        out[0] = torch.cat(parts, -1)[1]
        return out

    return sum((run(number) for number in range(COUNT)), torch.zeros_like(x))


def returns_either_way(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    if (chosen == 0).all():
        y = layer.experts[0](x)
        return y.square()
    elif (chosen == 1).any():
        return layer.experts[1](x) * 2
    else:
        z = x.cos()
        return z - layer.experts[2](z)


def returns_a_name_either_way(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    y = x.sin()
    if layer.training:
        if not (chosen == 1).any():
            return layer.experts[1](x)
        y = y + layer.experts[2](x)
    if (chosen == 0).any():
        return y.square()
    else:
        return y


def copies_rows(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        (rows,) = torch.where(chosen == number)
        if len(rows) == 0:
            continue
        out = out.index_copy(0, rows, expert(x[rows]) * scores[rows, number, None])
    return out
