"""Later parts of conditions that ask several things of values: what they leave behind, where they are asked."""

from __future__ import annotations

import bisect
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
from tests.support.branching import quick_ones

add_to_each = vars(torch)["_foreach_add_"]


def batch(number: int) -> Tensor:
    return torch.randn(4, 4).double() * (1 + number % 4)


class Norms(nn.Module):
    """Later parts of its conditions leave something behind, where they are asked."""

    seen: Tensor

    def __init__(self, form: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.form, self.calls, self.inner, self.norm = form, 0, nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
        self.log: list[int] = []
        self.register_buffer("seen", torch.zeros(4).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, self.inner(x))

    def is_new(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.5).add_(h.mean(0))
        return self.seen.max() > 0.1

    def is_early(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h.max() > 1

    def is_sorted_in(self, h: Tensor) -> Tensor:
        bisect.insort(self.log, 1)
        return h.max() > 1

    def is_added_to(self, h: Tensor) -> Tensor:
        add_to_each([self.seen], 1.0)
        return h.max() > 1

    def is_high(self, h: Tensor) -> Tensor:
        if h.max() > 0.6:
            h = self.norm(h)
        return h.max() > 1.3


def normalises(model: Norms, h: Tensor) -> Tensor:
    if h.sum() > 0 and h.max() > 0.5 and model.norm(h).max() > 1.4:
        h = h * 2
    return h.square().mean()


def writes(model: Norms, h: Tensor) -> Tensor:
    if h.sum() > 0 and model.is_new(h):
        h = h * 2
    return h.square().mean()


def branches_itself(model: Norms, h: Tensor) -> Tensor:
    for row in range(2):
        if h.sum() > row and model.is_high(h):
            h = h * 2
    return h.square().mean()


def names(model: Norms, h: Tensor) -> Tensor:
    if (most := h.max()) > 1.5 and (normed := model.norm(h)).max() > 1.4:
        h = h * most + normed
    return h.square().mean() + most


def normalises_in_between(model: Norms, h: Tensor) -> Tensor:
    if 1 < h.max() < model.norm(h).max() + 1:
        h = h * 2
    return h.square().mean()


def normalises_or(model: Norms, h: Tensor) -> Tensor:
    if h.sum() > 3 or not model.norm(h).max() > 1.5 or h.min() < -2:
        h = h * 2
    return h.square().mean()


def normalises_else(model: Norms, h: Tensor) -> Tensor:
    for row in range(2):
        if (h.sum() > row and model.norm(h).max() > 1.5) or h.max() > 2:
            h = h * 2
        else:
            h = h - 1
            h = h.abs()
    return h.square().mean()


def normalises_by_what_is_known(model: Norms, h: Tensor) -> Tensor:
    never = not model.training
    if (h.sum() > 0 and never) or model.norm(h).max() > 1.5:
        h = h * 2
    if h.max() > 2 and (never or model.norm(h).max() > 1.5) and h.min() < -1:
        h = h.exp()
    return h.square().mean()


def normalises_and_chooses(model: Norms, h: Tensor) -> Tensor:
    y = h * 2 if h.sum() > 0 and model.norm(h).max() > 1.5 else h
    return (h.exp() if h.max() > 2 or model.norm(y).sum() > 3 else h).square().mean()


def normalises_and_returns(model: Norms, h: Tensor) -> Tensor:
    if 0 < h.sum() < model.norm(h).max() + 3:
        return (h * 2).square().mean()
    return h.square().mean()


def writes_or(model: Norms, h: Tensor) -> Tensor:
    y = h * 2 if h.sum() > 0 or model.is_new(h) or model.is_high(h) else h
    return y.square().mean()


OTHERWISE = (
    normalises_or, normalises_else, normalises_by_what_is_known, normalises_and_chooses, normalises_and_returns,
    writes_or,
)  # fmt: skip
WRITING = {one.__name__: one for one in (normalises, normalises_in_between, writes, branches_itself, names, *OTHERWISE)}
AT_ONCE = (
    "normalises",
    "normalises_in_between",
    "writes",
    "normalises_or",
    "normalises_else",
    "normalises_and_chooses",
)


@pytest.mark.parametrize("name", quick_ones(WRITING, AT_ONCE))
def test_what_a_later_part_writes_to_is_as_on_one_process(name: str, one: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain = Norms(WRITING[name])
    same_calls(plain, autopar.compile(copy.deepcopy(plain), one), 6, batch)
    asked = int(plain.norm.num_batches_tracked) if "writes" not in name else plain.seen.count_nonzero().item() // 4
    assert 0 < asked < 12  # not in every step


class Ahead(Norms):
    """A norm that is called in two branches, ahead of them and behind them."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.inner(x))
        for bound in (1.2, 1.5):
            if h.max() > bound:
                h = self.norm(h * 2 + self.inner(h))
        return self.norm(h * x).square().mean() + h.exp().mean()


class RowsToo(Norms):
    """A norm, in branches of all rows and then of some."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        mask = h.mean(1) > 0.1
        if mask.sum() > 2:
            h = h + self.norm(h)
            h = h + self.norm(h[mask]).max()
        more = self.norm(h * 2).mean(0) if h.sum() < 3 else self.norm(h[h[:, 0] > 0]).mean(0)
        return (h + more).square().mean()


class Together(Norms):
    """A norm, in a branch by arguments, of rows that it picks with others."""

    def forward(self, x: Tensor) -> Tensor:
        h, rows = self.inner(x), x[x[:, 0] > 2]
        if len(rows) > 0:
            h = h + self.norm(torch.cat([rows, h])).square().mean()
        return h.square().mean()


def test_a_norm_that_is_called_ahead_of_a_branch_too_is_as_on_one_process(one: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain = Ahead(normalises)
    same_calls(plain, autopar.compile(copy.deepcopy(plain), one), 6, batch)
    assert 12 < plain.norm.num_batches_tracked < 24


def test_a_norm_of_all_rows_and_of_some_is_as_on_one_process(one: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain = RowsToo(normalises)
    same_calls(plain, autopar.compile(copy.deepcopy(plain), one), 6, lambda number: torch.randn(8, 4).double() * 2)
    assert 6 < plain.norm.num_batches_tracked < 18


def test_norms_of_rows_put_together_are_left_alone_where_there_are_none(one: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain = Together(normalises)
    same_calls(plain, autopar.compile(copy.deepcopy(plain), one), 6, batch)
    assert 0 < plain.norm.num_batches_tracked < 6


def counts(model: Norms, h: Tensor) -> Tensor:
    if h.sum() > 0 and model.is_early(h):
        h = h * 2
    return h.mean()


def named_and_read_outside(model: Norms, h: Tensor) -> Tensor:
    other = h
    if h.sum() > 0 and (other := h * 2).max() > 1:
        h = h * 2
    return (h + other).mean()


def chosen_and_read_outside(model: Norms, h: Tensor) -> Tensor:
    other = h
    h = h * 2 if h.sum() > 0 and (other := h * 2).max() > 1 else h
    return (h + other).mean()


def changes_by_functions(model: Norms, h: Tensor) -> Tensor:
    if h.sum() > 0 and model.is_sorted_in(h):
        h = h * 2
    return h.mean()


def writes_to_lists(model: Norms, h: Tensor) -> Tensor:
    if h.sum() > 0 and model.is_added_to(h):
        h = h * 2
    return h.mean()


@pytest.mark.parametrize(
    "form, told",
    [
        (counts, r"is_early .*sets \.calls"),
        (changes_by_functions, r"calls \.insort"),
        (writes_to_lists, r"writes to a tensor .*, and not by a method of it"),
        (named_and_read_outside, "assigns 'other' behind something"),
        (chosen_and_read_outside, "assigns 'other' behind something"),
    ],
)
def test_else_what_a_later_part_leaves_is_refused(
    form: Callable[[Any, Tensor], Tensor], told: str, one: DeviceMesh
) -> None:
    with pytest.raises(TraceError, match=told):
        autopar.compile(Norms(form), one)(torch.randn(3, 4).double())
