"""Rows that a mask of values picks, with their dims in another order: columns of places, sums of products over rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import TraceError
from tests.processes.compare import same_calls
from tests.support.branching import Formed, quick_ones


def places(h: Tensor) -> Tensor:
    points = torch.nonzero(h > 0.2)
    rows, columns = points.T
    return h[tuple(points.t())].square().sum() + (h[points.t()[0], columns] * rows).sum()


def covariance(h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0.3]
    rows = rows - rows.mean(0)
    loss = (rows.T @ rows).square().sum() + torch.eye(4).double().sum()
    assert rows.T.shape[0] == len(rows.t()) == rows.T.size(0) == 4
    return loss + sum(column.square().sum() for column in rows.transpose(0, 1).unbind()) + rows.T.t().sum()


def of_each(h: Tensor) -> Tensor:
    pairs = h.view(4, 2, 2)
    rows = pairs[h[:, 0] > 0]
    turned = (rows.transpose(1, 2) * torch.tensor([1.0, 2.0]).double()).permute(0, 2, 1)
    return (rows.transpose(-1, -2) @ rows).exp().sum() + torch.bmm(rows, turned).sin().sum()


def by_a_mask_of_each(h: Tensor) -> Tensor:
    chosen = h[:, 0] > 0
    rows, wanted = torch.stack([h, -h], -1)[chosen], h[chosen] > 0.1
    left = torch.where(h > 0, 1, 0)[chosen]
    left[h[chosen] > 1] = 0
    loss = nn.functional.cross_entropy(rows[wanted, :], left[wanted].view(-1), reduction="sum")
    return loss + rows[wanted, 1].exp().sum() + rows.flip(-1)[:, 0].sum()


FORMS = {one.__name__: one for one in (places, covariance, of_each, by_a_mask_of_each)}


@pytest.mark.parametrize("name", quick_ones(FORMS, ("places", "covariance", "by_a_mask_of_each")))
def test_they_are_as_on_one_process(name: str, one: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain = Formed(FORMS[name])
    same_calls(plain, autopar.compile(copy.deepcopy(plain), one), 6, lambda number: torch.randn(4, 4).double())


@pytest.mark.parametrize(
    "form, told",
    [
        (lambda h: (h[h[:, 0] > 0].T * 2).sum(), "mul of such rows"),
        (lambda h: torch.sin(h[h[:, 0] > 0].T).sum(), "sin of such rows"),
        (lambda h: h[h[:, 0] > 0].T[:, 0], "such an index of such rows"),
        (lambda h: h[h[:, 0] > 0].T @ h[h[:, 0] < 0], "a product over rows of such rows"),
        (lambda h: h[h[:, 0] > 0] @ h[h[:, 0] > 0], "matmul of such rows"),
        (lambda h: h.view(4, 2, 2)[h[:, 0] > 0].permute(1, 0, 2), "their number as another dim of such rows"),
        (lambda h: h[h[:, 0] > 0].T, "returns rows that a boolean mask picks"),
    ],
)
def test_the_rest_is_refused(form: Callable[[Tensor], Any], told: str, one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=told):
        autopar.compile(Formed(form), one)(torch.randn(4, 4).double())
