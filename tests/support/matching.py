"""A loss that matches predictions with targets by scipy, as DETR has it."""

from __future__ import annotations

from typing import Any

import scipy.optimize
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional

QUERIES, WIDTH, CLASSES = 5, 6, 3


class Matched(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.queries, self.way = nn.Parameter(torch.randn(QUERIES, WIDTH)), way
        self.hidden, self.classes, self.boxes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES + 1), nn.Linear(6, 4)

    def pairs(self, costs: Tensor) -> tuple[Any, Any]:
        match self.way:
            case "arrays":
                return scipy.optimize.linear_sum_assignment(costs.numpy())
            case "most":
                return linear_sum_assignment(-costs, maximize=True)
            case _:
                return linear_sum_assignment(costs)

    def forward(self, x: Tensor, labels: list[Tensor], boxes: list[Tensor]) -> Tensor:
        h = torch.tanh(self.hidden(x[:, None] + self.queries))
        scores, found = self.classes(h), self.boxes(h).sigmoid()
        with torch.no_grad():
            costs = torch.cdist(found.flatten(0, 1), torch.cat(boxes), p=1)
            costs = (costs - scores.softmax(-1).flatten(0, 1)[:, torch.cat(labels)]).view(len(x), QUERIES, -1).cpu()
            parts = costs.split([len(one) for one in boxes], -1)
            made = [self.pairs(part[image]) for image, part in enumerate(parts)]
            taken = torch.from_numpy if self.way == "most" else torch.as_tensor
            pairs = [tuple(taken(one).long() for one in pair) for pair in made]
        image = torch.cat([torch.full_like(query, place) for place, (query, _) in enumerate(pairs)])
        query = torch.cat([query for query, _ in pairs])
        wanted = torch.full(scores.shape[:2], CLASSES)
        wanted[image, query] = torch.cat([one[target] for one, (_, target) in zip(labels, pairs, strict=True)])
        matched = torch.cat([one[target] for one, (_, target) in zip(boxes, pairs, strict=True)])
        return functional.cross_entropy(scores.transpose(1, 2), wanted) + (found[image, query] - matched).abs().mean()


def batch(sizes: tuple[int, ...]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    labels = [torch.randint(0, CLASSES, (size,)) for size in sizes]
    return torch.randn(len(sizes), WIDTH).double(), labels, [torch.rand(size, 4).double() for size in sizes]
