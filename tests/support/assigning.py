"""Branches that are taken by values, and assign names, write to whole tensors, ask several things, or have an else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tests.support import returning
from tests.support.branching import COUNT, Form, Layer

STEPS = ((0, 1, 2, 3), (1,), (3, 0), (2,))  # the experts that have tokens


def adds_a_loss(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    loss = layer.experts[0](x).square().mean()
    for number in range(1, COUNT):
        mask = chosen == number
        if mask.any():
            loss = loss + layer.experts[number](x[mask]).square().mean()
    return x + loss


def adds_in_place(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    loss = x.new_zeros(())
    for number in range(COUNT):
        mask = chosen == number
        if mask.any():
            loss += layer.experts[number](x[mask]).square().mean()
    return x + loss


def from_a_number(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    loss, mask = 0.0, chosen == 0
    if mask.sum() > 0:
        loss = (layer.experts[0](x).square().mean(-1) * mask).sum() / mask.sum()
    return x + loss


def has_an_else(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    mask = chosen == 1
    if mask.any():
        loss = functional.mse_loss(layer.experts[1](x[mask]), x[mask].sin())
    else:
        loss = layer.experts[2](x).sum() * 0.1
    return x * loss


def has_an_elif(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    h = x
    if (chosen == 0).all():
        h = layer.experts[0](h)
    elif (chosen == 1).any():
        h = layer.experts[1](h)
        h = h.relu()
    elif layer.training:
        h = layer.experts[2](h) + h
    return h


def one_behind_another(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    h = x
    for number, expert in enumerate(layer.experts):
        if (chosen == number).any():
            h = h + expert(h).tanh()
    return h


def within_one_another(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    h, seen = x, torch.zeros(COUNT)
    if (chosen == 0).any():
        h = layer.experts[0](h)
        if (chosen == 3).any():
            h = h / scores.sum(-1, keepdim=True)
            seen[0] = 2.0
        else:
            h = layer.experts[2](h)
            seen[1:3] += 1.5
        h = h * 2
    return h + seen.sum()


def nothing_to_divide_by(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    mask, out = chosen == 2, layer.experts[1](x)
    if mask.any():
        weights = layer.experts[2](x).masked_fill(~mask.unsqueeze(-1), float("-inf")).softmax(0)
        mean = (x * mask.unsqueeze(-1)).sum(0) / mask.sum()
        last = out[mask.nonzero().squeeze(-1)].mean(0) + out[mask.sum() - 1]
        out = layer.experts[2](out - mean + (weights * out).sum(0)).exp().sqrt() + last.square().log() * 0.1
    return out


def asks_several(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, loss = torch.zeros_like(x), x.new_zeros(())
    for number in range(COUNT):
        mask = chosen == number
        if layer.training and mask.any() and not mask.all() and number < 3:
            out[mask] = layer.experts[number](x[mask])
            loss = loss + out[mask].detach().square().mean()
        if number == 2 or not mask.any():
            continue
        loss = loss + layer.experts[number](x[mask]).sum()
    return out + loss + x


def returns_early(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    loss, mask = x.square().mean(), chosen == 3
    if not mask.any():
        return loss
    loss = loss + layer.experts[3](x[mask]).square().mean()
    loss = loss * 2
    return loss


def kept_truth(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    has, h, count = (chosen == 0).any(), x, torch.zeros((), dtype=torch.long)
    if has:
        h = layer.experts[0](h)
        count = count + 1
    h = h * 2 + count
    if has:
        h = h + layer.experts[1](h)
    return h


def skips_at_random(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    h = x
    for expert in layer.experts:
        if torch.rand(()) < 0.5:
            h = h + expert(h)
    return h


def written_as_a_whole(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, flat = layer.experts[0](x), torch.zeros_like(x)
    if (chosen == 1).any():
        flat.add_(1.5)
        out[0] = layer.experts[1](x[0])
        out.mul_(scores[:, :1])
        own = torch.zeros_like(x)
        own += out
        own.div_(scores.sum(-1, keepdim=True))
        flat.copy_(own)
    return out * flat + out


def loops_over_hits(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    total = x * 0.5
    for number in (torch.bincount(chosen, minlength=COUNT) > 0).nonzero().flatten().tolist():
        mask = chosen == number
        total = total + layer.experts[number](x[mask]).mean()
    return total


def name_outside(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, rows = torch.zeros_like(x), x
    if (chosen == 0).any():
        rows = x * 2
    return out + rows


def another_else(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), chosen == 0
    if mask.any():
        out[mask] = x[mask]
    else:
        out = out + 1
    return out


def of_another_turn(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, last = torch.zeros_like(x), x
    for number in range(COUNT):
        mask = chosen == number
        if mask.any():
            if number:
                out[mask] = last[mask]
            last = x * number
    return out


def several(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    mask, out = chosen == 0, torch.zeros_like(x)
    if mask.any() and not mask.all():
        out[mask] = x[mask]
    return out


def in_place(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), chosen == 0
    if mask.any():
        flat = out.view(-1)
        flat.add_(1.0)
    return out


def at_a_place(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), chosen == 0
    if mask.any():
        out[0] = x[0]
    return out


def mean_of_masked(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """Nothing is picked, and nothing to divide by."""
    out, mask = torch.zeros_like(x), chosen == 0
    if mask.any():
        out[mask] = x[mask] + (x * mask.unsqueeze(-1)).sum(0) / mask.sum()
    return out


def of_infinite(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), chosen == 0
    if mask.any():
        weights = scores.masked_fill(~mask.unsqueeze(-1), float("-inf")).softmax(0)
        out[mask] = x[mask] + (weights.T @ x).sum(0)
    return out


def at_a_counted_place(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), chosen == 0
    if mask.any():
        out[mask] = x[mask] + x[mask.sum() - 1]
    return out


def added_to_behind(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask, y = torch.zeros_like(x), chosen == 0, x * 1
    if mask.any():
        y = x * 2
        out[mask] = y[mask]
    y += 1
    return out + y


def inverse_ahead(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), chosen == 0
    inverse = 1 / mask.sum()
    if mask.any():
        out[mask] = layer.experts[1](x[mask]) * inverse
    return out + layer.experts[1](x)


def names_what_it_asks(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    if (count := (chosen == 0).sum()) > 0:
        x = x + layer.experts[0](x).sum() / count
    made = layer.experts[1](x)
    kept = x if (chosen == 1).any() else made
    if (chosen == 2).any():
        kept = kept.clone()
        kept[chosen == 2] = layer.experts[2](x[chosen == 2])
    return kept


def under_two_names(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """What is written to behind a branch is what it was ahead of it, where that is not taken."""
    first = x * 2
    h = seen = first
    if (chosen == 0).any():
        h = layer.experts[0](first.clone())
    h.mul_(2)
    h += 1
    rows = h[:2]
    if (chosen == 1).any():
        rows = rows * 2
    rows[0] = 3.0
    first.mul_(0.5)
    return h + seen + rows.sum()


def without_gradient(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    h = layer.experts[0](x)
    with torch.no_grad():
        if (chosen == 0).any():
            h = h * 2
    return layer.experts[1](h)


def places_made_ahead(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    h, place = layer.experts[0](x), chosen * 9 - 9
    if (place >= 0).all() and (place < 6).all():
        h = h + h.gather(1, place[:, None])
    return h * int((chosen == 3).any()) + h


class _State(NamedTuple):
    h: Tensor
    aux: Any


def states_in_tuples(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    h = layer.experts[0](x)
    state = h, h * 2
    if (chosen == 1).any():
        state = layer.experts[1](h), state[0]
    if (chosen == 0).any():
        made = _State(state[0].tanh(), (state[1].sum(), 2))
    else:
        made = _State(layer.experts[2](h), (0.5, 3))
    return made.h + made.aux[0] * made.aux[1]


def _beside(form: Form) -> Form:
    """Of what has gradients, and is trained whether a branch is taken or not."""
    return lambda layer, x, scores, chosen: layer.experts[3](x) * 0.1 + form(layer, x + scores[:, :1], scores, chosen)


FORMS: dict[str, Form] = {
    one.__name__: _beside(one)
    for one in (
        adds_a_loss, adds_in_place, from_a_number, has_an_else, has_an_elif, one_behind_another, within_one_another,
        nothing_to_divide_by, asks_several, returns_early, kept_truth, skips_at_random, written_as_a_whole,
        names_what_it_asks, under_two_names, without_gradient, places_made_ahead, loops_over_hits, name_outside,
        another_else, of_another_turn, several, in_place, at_a_place, mean_of_masked, of_infinite,
        at_a_counted_place, added_to_behind, inverse_ahead, returning.returns_either_way,
        returning.returns_a_name_either_way, returning.returns_zeros, returning.copies_rows, returning.returned,
        returning.returns_another, returning.returns_in_turn, returning.returns_two, returning.chooses,
        returning.skips_layers, states_in_tuples,
    )
}  # fmt: skip
