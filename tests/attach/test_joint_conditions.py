"""Branches whose conditions ask several things of values."""

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
from tests.support.branching import quick_ones


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
