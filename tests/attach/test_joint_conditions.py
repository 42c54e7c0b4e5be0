"""Branches whose conditions ask several things of values."""

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


def either(model: Any, h: Tensor) -> Tensor:
    loss = h.mean()
    if (h > 1.5).any() or h.min() < -1.2 or h.sum().item() > 3:
        loss = loss + h.square().mean()
    return loss


def both_or_else(model: Any, h: Tensor) -> Tensor:
    loss = h.mean()
    if h.max() > 1 and not (h > -1).all():
        loss = loss + h.square().mean()
    else:
        more = h.abs().mean()
        loss = loss * more
    return loss


def neither(model: Any, h: Tensor) -> Tensor:
    loss = h.mean()
    if not ((h > 1.2).any() and (h < -1.2).any()):
        loss = loss + h.exp().mean()
    return loss


def in_a_loop(model: Any, h: Tensor) -> Tensor:
    loss = h.sum() * 0
    for row in h:
        if row.max() < 0.5 or row.mean() > 0.3:
            continue
        loss = loss + row.square().sum()
    return loss


def returns(model: Any, h: Tensor) -> Tensor:
    if h.max() < 1.3 or h.min() > -1:
        return h.exp().mean()
    return h.square().mean()


def known_too(model: Any, h: Tensor) -> Tensor:
    loss = h.mean()
    if model.training and len(h) > 1 and h.max() > 1.5 and h.min() < -1.5:
        loss = loss + 1
    if model.calls > 1 or h.max() > 1:
        loss = loss * 3
    return loss


def known_within(model: Any, h: Tensor) -> Tensor:
    loss, never = h.mean(), not model.training
    if (h.max() > 0.5 and never) or h.min() < -1.5:
        loss = loss * 3
    if (h.max() > 0.5 or never) and h.min() < -1:
        loss = loss + 2
    if h.max() > 0.5 and not (never or h.min() > -1):
        loss = loss * h.std()
    return loss


def of_rows(model: Any, h: Tensor) -> Tensor:
    high, low, loss = h[h[:, 0] > 1], h[h[:, 0] < -1], h.mean()
    if len(high) > 0 and len(low) > 0:
        loss = loss + high.mean() * low.mean()
    if len(high) == 0 or len(low) == 0:
        loss = loss * 2
    return loss


def chooses(model: Any, h: Tensor) -> Tensor:
    scale = h.exp() if h.max() > 1.3 or h.min() < -1.2 else h * 2
    return (h.square() if h.max() > 1 and h.min() < -1 else h).mean() * scale.mean()


def nested(model: Any, h: Tensor) -> Tensor:
    loss = h.mean()
    if h.max() > 1 and (h.min() < -1.2 or h.sum() > 2):
        loss = loss + h.square().mean()
    if h.max() < 1.5 or not (h.min() < -1 and h.sum() > 1):
        more = h.std()
        loss = loss * more
    else:
        loss = loss + 3
    return loss


def nested_in_a_loop(model: Any, h: Tensor) -> Tensor:
    for row in h:
        if (row.max() > 1 or row.min() < -1.2) and model.training and not (row.sum() > 2 or row.mean() < -0.5):
            h = h * 1.1
            continue
        h = h - 0.1
    return h.square().mean()


def between(model: Any, h: Tensor) -> Tensor:
    loss, mean = h.mean(), h.mean().item()
    if -0.2 < mean < 0.4:
        loss = loss + h.square().mean()
    if not -2.5 < h.min() <= h.max() < 3 or h.sum() > 4:
        loss = loss * 2
    return loss.exp() if 1 < h.max() < 2 > h.std() else loss


def between_in_a_loop(model: Any, h: Tensor) -> Tensor:
    loss = h.sum() * 0
    for row in h:
        if model.training and 0.2 < row.max() < 1.5 and (row.min() > -1.2 or 0.5 > row.sum() > -0.5):
            loss = loss + row.square().sum()
            continue
        loss = loss + row.sum()
    return loss


def spread(model: Any, h: Tensor) -> Tensor:
    """Of one row there is none, and no gradient of it."""
    loss = h.mean()
    for number in range(3):
        rows = h[h.argmax(1) == number]
        if len(rows) > 1:
            loss = loss + rows.std(0).sum() + rows[:, 0].var() + ((rows - rows.mean(0)) / rows.std(0)).exp().mean()
    return loss


def of_no_row(model: Any, h: Tensor) -> Tensor:
    """Nor is there any of none."""
    rows = h[h[:, 0] > 100]
    return rows.std(0).nan_to_num(7.0).sum() + rows.var().nan_to_num(2.0) + rows[:, 1].std().nan_to_num(3.0) + h.mean()


FORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    one.__name__: one
    for one in (
        either, both_or_else, neither, in_a_loop, returns, known_too, known_within, of_rows, chooses, nested,
        nested_in_a_loop, between, between_in_a_loop, spread, of_no_row,
    )
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, form: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.form, self.calls, self.inner = form, 0, nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.form(self, self.inner(x))


def batch(number: int) -> Tensor:
    return torch.randn(4, 4).double() * (1 + number % 4)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize(
    "name", quick_ones(FORMS, ("either", "both_or_else", "returns", "nested", "known_within", "between", "spread"))
)
def test_they_are_as_on_one_process(name: str, one: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain = Model(FORMS[name])
    same_calls(plain, autopar.compile(copy.deepcopy(plain), one), 8, batch)


def ends_with_what_is_known(model: Any, h: Tensor) -> Tensor:
    loss = h.mean()
    if h.max() > 1 or model.calls > 3:
        loss = loss * 2
    return loss


def divides(model: Any, h: Tensor) -> Tensor:
    count = (h > 5).sum().item()
    if count == 0 or h.sum().item() / count > 1:
        return h.mean()
    return h.sum()


def draws(model: Any, h: Tensor) -> Tensor:
    if h.sum() > 0 or torch.rand(()) > 0.5:
        h = h * 2
    return h.mean()


def raises(model: Any, h: Tensor) -> Tensor:
    if (h.min() < -30 and h.max() > 30) or h.max() > 80:
        raise ValueError("too large")
    return h.mean()


@pytest.mark.parametrize("form", [ends_with_what_is_known, divides, draws, raises])
def test_what_need_not_be_asked_is_refused(form: Callable[[Any, Tensor], Tensor], one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"asks several things"):
        autopar.compile(Model(form), one)(torch.randn(3, 4).double())


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


WRITING = {one.__name__: one for one in (normalises, normalises_in_between, writes, branches_itself, names)}


@pytest.mark.parametrize("name", quick_ones(WRITING, ("normalises", "normalises_in_between", "writes")))
def test_what_a_later_part_writes_to_is_as_on_one_process(name: str, one: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain = Norms(WRITING[name])
    same_calls(plain, autopar.compile(copy.deepcopy(plain), one), 6, batch)
    asked = int(plain.norm.num_batches_tracked) if name != "writes" else plain.seen.count_nonzero().item() // 4
    assert 0 < asked < 12  # not in every step


class Ahead(Norms):
    """A norm that is called in two branches, ahead of them and behind them."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.inner(x))
        for bound in (1.2, 1.5):
            if h.max() > bound:
                h = self.norm(h * 2 + self.inner(h))
        return self.norm(h * x).square().mean() + h.exp().mean()


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
