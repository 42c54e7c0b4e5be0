"""On one rank the program draws as the model does, and leaves the generator as it does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar


class Drawing(nn.Module):
    def __init__(self, form: Callable[[Drawing, Tensor], Tensor]) -> None:
        super().__init__()
        self.form, self.linear, self.dropout = form, nn.Linear(4, 4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x)


def dropped_and_not_read(model: Drawing, x: Tensor) -> Tensor:
    h = model.linear(x)
    model.dropout(h)
    torch.randn(3)
    return (model.dropout(h) * torch.rand(4)).square().mean()


def written_in_place(model: Drawing, x: Tensor) -> Tensor:
    torch.empty(4).uniform_(), torch.bernoulli(torch.full((4,), 0.5)), torch.randint(0, 4, (3,)), torch.randperm(5)
    return (model.linear(x) * torch.rand_like(x)).mean()


def of_distributions(model: Drawing, x: Tensor) -> Tensor:
    torch.normal(0.0, 1.0, (4,)), torch.multinomial(torch.ones(5), 2), torch.empty(3).exponential_()
    return model.dropout(model.linear(x)).sum()


def scheduled(model: Drawing, x: Tensor) -> Tensor:
    """The last number that is drawn is read by nobody."""
    made: list[Tensor] = []
    given = x
    for step in range(3):
        y = model.linear(given)
        made.append(y)
        given = torch.where(torch.rand(()) < 0.5, x * step, y)
    return torch.stack(made).square().sum()


FORMS = (dropped_and_not_read, written_in_place, of_distributions, scheduled)


@pytest.mark.parametrize("form", FORMS)
def test_what_nobody_reads_is_drawn_too(one: DeviceMesh, form: Callable[[Drawing, Tensor], Tensor]) -> None:
    plain = Drawing(form)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x = torch.randn(4, 4)
    parallel(x).backward()
    drawn: list[list[Tensor]] = []
    for model in (plain, parallel):
        torch.manual_seed(1)
        drawn.append([*(model(x).detach() for _ in range(3)), torch.rand(4)])
    torch.testing.assert_close(drawn[1], drawn[0])


def test_in_micro_batches_it_is_not(one: DeviceMesh) -> None:
    """Each round would draw its own, and nobody could tell."""

    def form(model: Drawing, x: Tensor) -> Tensor:
        torch.randn(3)
        return functional.mse_loss(model.linear(x), x)

    plain = Drawing(form)
    parallel = autopar.compile(copy.deepcopy(plain), one, micro_batches=2)
    x = torch.randn(4, 4)
    torch.testing.assert_close(parallel(x).detach(), plain(x).detach())
    assert parallel.plan.graph.rounds.count == 2
