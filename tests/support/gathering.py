"""Branches that are taken by values, and append to lists, or assign what is in dicts and objects."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support import numbering
from tests.support.branching import COUNT, Form, Layer


def stacks(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses = []
    for at in range(COUNT):
        mask = chosen == at
        if mask.any():
            losses.append(layer.experts[at](x[mask]).square().mean())
    return x + torch.stack(losses).mean()


def stacks_vectors(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    means: list[Tensor] = [x.sin().mean(0)]
    for at, expert in enumerate(layer.experts):
        mask = chosen == at
        if mask.sum() == 0:
            continue
        means.append(expert(x[mask]).mean(0))
    made = torch.stack(means, dim=0)
    return x + (made * made.norm(dim=-1, keepdim=True)).sum(0) / len(means)


def adds_up(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses = list()
    for at in range(COUNT):
        mask = chosen == at
        if mask.any():
            losses.append(layer.experts[at](x[mask]).square().mean())
    return x * (sum(losses) / len(losses))


def adds_up_at_most(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses = []
    for at in range(1):
        mask = chosen == at
        if mask.any():
            losses.append((layer.experts[at](x).square().mean(-1) * mask).sum() / mask.sum())
    return x + sum(losses, layer.experts[3](x).mean()) / max(len(losses), 1)


def asks_whether_there_are(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses = []
    for at in (1, 2):
        mask = chosen == at
        if mask.any():
            losses.append(layer.experts[at](x[mask]).square().mean())
    if losses:
        x = x + torch.stack(losses).sum()
    if not losses:
        x = layer.experts[3](x)
    return x


def returns_where_there_are_none(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses = []
    for at in (1, 2):
        mask = chosen == at
        if mask.any():
            losses.append(layer.experts[at](x[mask]).square().mean())
    if len(losses) == 0:
        return layer.experts[3](x).sum() * 0
    return torch.stack(losses).mean()


def chooses_by_their_number(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses = []
    for at in (1, 2):
        mask = chosen == at
        if mask.any():
            losses.append(layer.experts[at](x[mask]).square().mean())
    return x + (torch.stack(losses).mean() if len(losses) > 0 else layer.experts[3](x).mean())


def appends_either_way(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    parts = []
    for at in range(COUNT):
        mask = chosen == at
        if mask.any():
            parts.append(layer.experts[at](x[mask]).mean(0))
        else:
            parts.append(torch.zeros_like(x[0]))
    return x + torch.stack(parts)[:, None].sum(0) + torch.stack(parts, dim=1).sum(-1) + len(parts)


def appends_two_or_one(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    parts = []
    if (chosen == 0).any():
        parts.append(layer.experts[0](x).mean())
        parts.append(x.mean())
    else:
        parts.append(layer.experts[1](x).mean())
    return x + torch.stack(parts).mean() * len(parts)


def within_one_another(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    parts = [layer.experts[1](x).mean()]
    if (chosen == 0).any():
        parts.append(layer.experts[0](x).mean())
        if (chosen == 3).any():
            parts.append(layer.experts[3](x).mean())
        else:
            parts.append(layer.experts[2](x).mean())
            parts.append(layer.experts[2](x).sum())
        parts.append(x.sin().mean())
    return x + torch.stack(parts).square().mean() + len(parts)


def puts_rows_together(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    rows, places = [], []
    for at, expert in enumerate(layer.experts):
        mask = chosen == at
        if mask.any():
            rows.append(expert(x[mask]))
            places.append(mask.nonzero().squeeze(-1))
    out = torch.zeros_like(x)
    return out.index_add(0, torch.cat(places), torch.cat(rows))


def two_lists(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    those, others = [], []
    for at, expert in enumerate(layer.experts):
        mask = chosen == at
        if mask.any():
            those.append(expert(x[mask]).mean(0))
            others.append(x[mask].mean(0))
    return x + (torch.stack(those) - torch.stack(others)).square().sum(-1).mean()


def of_each_turn(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(())
    for expert in layer.experts[:2]:
        parts = []
        for at in range(COUNT):
            if (chosen == at).any():
                parts.append(expert(x[chosen == at]).square().mean())
        total = total + torch.stack(parts).mean()
    return x + total


def goes_on_with_another(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses, seen = [], 0
    for at, expert in enumerate(layer.experts):
        mask = chosen == at
        if not mask.any():
            losses.append(layer.experts[0](x).sum() * 0.5)
            continue
        seen += 1
        if at == 3:
            continue
        losses.append(expert(x[mask]).square().mean())
    return x + torch.stack(losses).mean() * len(losses) * seen


def goes_on_or_does(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    total = x.new_zeros(())
    for at, expert in enumerate(layer.experts):
        mask = chosen == at
        if mask.sum() < 2:
            total = total + layer.experts[0](x).mean()
            continue
        else:
            total = total * 2
        total = total + expert(x[mask]).square().mean()
    return x + total


class Box:
    loss: Tensor


def entries_either_way(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses = {"all": layer.experts[2](x).mean()}
    for at in (0, 1):
        mask, key = chosen == at, f"of_{at}"
        if mask.any():
            losses[key] = layer.experts[at](x[mask]).square().mean()
            losses["all"] = losses["all"] * 2 + losses[key]
        else:
            losses[key] = layer.experts[3](x).sum() * 0
    return x + sum(losses.values()) * len(losses)


def entries_that_are_there(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses: dict[str, Tensor | float] = {"box": 0.0, "class": layer.experts[2](x).mean(), "number": 0}
    parts = [x.mean(), x.sum()]
    if (chosen == 0).any():
        losses["box"] = layer.experts[0](x).square().mean()
        losses["class"] += x.mean()
        losses["number"] += 1
        parts[1] = parts[1] * losses["class"]
        if (chosen == 3).any():
            losses["box"] = losses["box"] + layer.experts[3](x).mean()
    return x * losses["box"] + losses["class"] + parts[0] * parts[1] + losses["number"]


def _into(losses: dict[str, Tensor], layer: Layer, x: Tensor, mask: Tensor) -> None:
    if mask.any():
        losses["here"] = layer.experts[0](x[mask]).mean()
    else:
        losses["here"] = layer.experts[1](x).mean() * 0


def entries_of_an_argument(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses = {"there": layer.experts[2](x).mean()}
    alias = losses
    _into(losses, layer, x, chosen == 0)
    return x + alias["here"] + losses["there"]


def _returning(losses: dict[str, Tensor], layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    if not mask.any():
        losses["all"] = losses["all"] + layer.experts[0](x).mean()
        return x.mean()
    losses["all"] = losses["all"] * 3 + layer.experts[1](x[mask]).sum()
    return layer.experts[1](x[mask]).mean()


def entries_and_returns(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses = {"all": layer.experts[2](x).mean()}
    for at in (0, 3):
        x = x + _returning(losses, layer, x, chosen == at)
    return x + losses["all"]


def _named(losses: dict[str, Tensor], layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    if mask.any():
        losses["all"] = losses["all"] * 2
        return x
    losses["all"] = losses["all"] + layer.experts[0](x).mean()
    x = layer.experts[3](x)
    return x


def entries_and_names_returned(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses = {"all": layer.experts[2](x).mean()}
    x = _named(losses, layer, x, chosen == 0)
    return x + losses["all"]


def attributes(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    box, layer.seen = Box(), x.mean()
    box.loss = layer.experts[2](x).mean()
    for at in range(2):
        if (chosen == at).any():
            box.loss = box.loss + layer.experts[at](x).square().mean()
            layer.seen = layer.seen + box.loss.detach()
    if (chosen == 3).sum() > 2:
        layer.last = box.loss.detach()
    else:
        layer.last = x.sum()
    return x + box.loss * layer.seen + layer.last


FORMS: dict[str, Form] = {
    one.__name__: one
    for one in (
        stacks, stacks_vectors, adds_up, adds_up_at_most, asks_whether_there_are, returns_where_there_are_none,
        chooses_by_their_number, appends_either_way, appends_two_or_one, within_one_another, puts_rows_together,
        two_lists, of_each_turn, goes_on_with_another, goes_on_or_does, entries_either_way, entries_that_are_there,
        entries_of_an_argument, entries_and_returns, entries_and_names_returned, attributes,
        *numbering.FORMS,
    )
}  # fmt: skip
