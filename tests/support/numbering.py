"""Branches that are taken by values, and count, skip, and go on with numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.branching import COUNT, Layer


def of_types_of_numbers(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    x = layer.experts[0](x)
    weight = 2.0 if (chosen == 0).any() else 0.5
    bonus = 1 if x.sum() > 0 else 0
    return x * weight + bonus


def returns_by_its_count(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    total, number = 0.0, 0
    for at in range(3):
        if not (chosen == at).any():
            continue
        total = total + layer.experts[at](x[chosen == at]).sum()
        number += 1
    if number == 0:
        return layer.experts[3](x).sum() * 0.0
    return x.sum() + total / number


def counts_either_way(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    x, number = layer.experts[2](x), 1
    if (chosen == 0).any():
        number = 3
        x = layer.experts[0](x)
    else:
        number += 1
        x = x * number
    return x / number


def counts_and_asks(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    x, number, weight, has_last = layer.experts[2](x), 0, 0.5, False
    for at in range(COUNT):
        if (chosen == at).any():
            number = number + 1
            weight *= 1.5
        if (chosen == at).sum() > 3:
            has_last = at > 1
    if number == 2:
        x = layer.experts[0](x)
    if has_last and layer.training:
        x = layer.experts[1](x)
    return x * weight / number


def counts(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    total, number = x.new_zeros(()), 0
    for at in range(COUNT - 1):
        mask = chosen == at
        if mask.any():
            total = total + layer.experts[at](x[mask]).square().mean()
            number += 1
    return x + total / max(number, 1)


def divides_by_what_it_counts(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    total, other, number = x.new_zeros(()), layer.experts[3](x).mean(), 0
    for at in (0, 2):
        mask = chosen == at
        if mask.any():
            total = total + layer.experts[at](x[mask]).square().mean()
            number += 1
    if number > 0:
        total = total / number
        other /= number
    else:
        other *= number + 0.5
    return x + total + other


def divides_at_its_end(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses = []
    for at in (0, 2):
        mask = chosen == at
        if mask.any():
            losses.append(layer.experts[at](x[mask]).square().mean())
    if not losses:
        return layer.experts[1](x).mean()
    return sum(losses) / len(losses)


def numbers_in_place(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    h = layer.experts[0](x)
    seen, mask = x.new_ones(4), chosen == 0
    if mask.any():
        value = h.max().item()
        seen.mul_(0.9).add_(value)
        seen[1] = value
        seen[2:] = len(x[mask])
        h = h * 0.7
    return h * seen.sum()


def within_what_has_none(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    total = layer.experts[1](x).mean()
    mask = chosen == 0
    if mask.any():
        value = layer.experts[0](x[mask]).mean()
        if value > -5:
            total = total + value
    return x + total


def spread_of_what_is_there(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses = [layer.experts[1](x).mean()]
    if (chosen == 0).any():
        losses.append(layer.experts[0](x).mean())
    return x + torch.stack(losses).std(unbiased=False) + torch.stack(losses).mean()


def floats(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    weight = 0.3
    if (chosen == 0).any():
        weight = 0.7
    return layer.experts[1](x) * weight


def one_under_two_names(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses, parts, key = {"all": layer.experts[1](x).mean()}, [x.mean(), x.sum()], "all"
    others = losses
    if (chosen == 0).any():
        losses["all"] = layer.experts[0](x).mean()
        parts[1] = x.max()
    else:
        others[key] = layer.experts[2](x).mean()
        parts[-1] = x.min()
    return x * losses["all"] + parts[1]


def skips_within_what_is_known(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    synced, x = False, layer.experts[0](x)
    for at, expert in enumerate(layer.experts):
        skip = False
        if layer.training and at > 0:
            skip = (chosen == at).any()
        if not skip or synced:
            x = x + expert(x).tanh()
    for at, expert in enumerate(layer.experts):
        if layer.training:
            h = expert(x)
            if (chosen == at).any():
                continue
            x = x + h.sin()
        x = x * 0.5 + expert(x)
    return x


def _kept(expert: torch.nn.Module, x: Tensor, cache: list[Tensor] | None) -> Tensor:
    if cache is not None:
        cache.append(x)
    return expert(x)


def calls_what_might_keep(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    x = layer.experts[1](x)
    if (chosen == 0).any():
        x = _kept(layer.experts[0], x, None)
    return x


FORMS = (
    counts, counts_and_asks, counts_either_way, returns_by_its_count, of_types_of_numbers, divides_by_what_it_counts,
    divides_at_its_end, numbers_in_place, within_what_has_none, spread_of_what_is_there, floats, one_under_two_names,
    skips_within_what_is_known, calls_what_might_keep,
)  # fmt: skip
