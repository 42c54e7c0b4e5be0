"""Writes to the `.data` of what forward has made, as code from before `no_grad` has it: as on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from autopar import TraceError
from tests.processes.compare import near, same_gradients
from tests.support.branching import quick_ones

ROWS, LONG, WIDTH = 4, 5, 6
Form = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.first, self.last, self.form = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1, bias=False), form

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        h = self.form(self.first(x), hidden)
        return (self.last(torch.tanh(h) * torch.sigmoid(h))).square().mean()


def masked(h: Tensor, hidden: Tensor) -> Tensor:
    """As attention of Tacotron and of older translators has it."""
    scores = (h * 2).sum(-1, keepdim=True).squeeze(-1)
    scores.data.masked_fill_(hidden, -float("inf"))
    return functional.softmax(scores, 1).unsqueeze(-1) * h


def at_a_mask(h: Tensor, hidden: Tensor) -> Tensor:
    h.data[hidden] = 0.5
    return h


def in_rows(h: Tensor, hidden: Tensor) -> Tensor:
    h.data[0].mul_(3)
    h.data[:, 1:3, 0] = 7.0
    for row, count in enumerate(hidden.long().sum(1)):
        h.data[row, LONG - 1 - int(count > 1) :] = -1.0
    return h


def by_a_name(h: Tensor, hidden: Tensor) -> Tensor:
    data = h.data
    data *= 2
    data[0] += 1
    return h + data


def added(h: Tensor, hidden: Tensor) -> Tensor:
    before = h + 1
    h.data += 1
    h.data.view(-1)[3:9].fill_(2.0)
    return h * before.detach() + before


def seen_by_a_look(h: Tensor, hidden: Tensor) -> Tensor:
    row = h[0]
    h.data.clamp_(min=-0.5).clamp_(max=0.5)
    return h + row


def by_a_condition(h: Tensor, hidden: Tensor) -> Tensor:
    if hidden[:, 1].any():
        h.data.masked_fill_(hidden[..., None], 0)
    return h


def less_the_largest(h: Tensor, hidden: Tensor) -> Tensor:
    h.data.sub_(h.data.amax((1, 2), keepdim=True))
    return h


def drawn(h: Tensor, hidden: Tensor) -> Tensor:
    h = functional.dropout(h, 0.5)
    h.data[h.data == 0] = 3.0
    return h


def detached(h: Tensor, hidden: Tensor) -> Tensor:
    h.detach().mul_(2)
    h.detach()[0] = 2
    return h


FORMS: dict[str, Form] = {
    form.__name__: form
    for form in (
        masked, at_a_mask, in_rows, by_a_name, added, seen_by_a_look, by_a_condition, less_the_largest, drawn, detached,
    )
}  # fmt: skip
OF_EACH_ROW = ("masked", "at_a_mask", "by_a_condition", "less_the_largest")


def batch(shift: float) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([5, 4, 2, 3])
    return torch.randn(ROWS, LONG, WIDTH).double() + shift, torch.arange(LONG)[None] >= lengths[:, None]


def same(form: Form, one: DeviceMesh, **settings: Any) -> None:
    torch.manual_seed(0)
    plain = Net(form).double()
    parallel = autopar.compile(copy.deepcopy(plain), one, **settings)
    for seed, given in enumerate((batch(0.0), batch(1.0))):
        losses = list[Tensor]()
        for model in (plain, parallel):
            model.zero_grad()
            torch.manual_seed(seed)
            losses.append(loss := model(*given))
            loss.backward()
        near(losses[1], losses[0], 1e-12, "loss")
        same_gradients(parallel, plain)


@pytest.mark.parametrize("form", quick_ones(FORMS, ("masked", "by_a_name", "added")))
def test_what_data_is_set_to_is_read_and_gradients_go_on(form: str, one: DeviceMesh) -> None:
    same(FORMS[form], one)


@pytest.mark.parametrize("form", quick_ones(OF_EACH_ROW, ("masked",)))
def test_in_micro_batches(form: str, one: DeviceMesh) -> None:
    same(FORMS[form], one, micro_batches=2)


def kept_for_backward(h: Tensor, hidden: Tensor) -> Tensor:
    h = torch.tanh(h)
    h.data.mul_(2)
    return h


def read_before(h: Tensor, hidden: Tensor) -> Tensor:
    squares = h * h
    h.data.mul_(2)
    return h + squares


@pytest.mark.parametrize("form", [kept_for_backward, read_before])
def test_what_backward_reads_is_not_changed(form: Form, one: DeviceMesh) -> None:
    """torch takes the changed values, and gives gradients of nothing."""
    with pytest.raises(TraceError, match=r"it changes in place, maybe through .data, what backward reads"):
        autopar.compile(Net(form).double(), one)(*batch(0.0))


def resized(h: Tensor, hidden: Tensor) -> Tensor:
    kept = h.data.new().resize_((1, WIDTH)).bernoulli_(0.5)
    return h * kept.expand(LONG, WIDTH)


def test_another_size_in_place_is_told_as_such(one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"gives a tensor another size in place .*: x.new_empty\(sizes\)"):
        autopar.compile(Net(resized).double(), one)(*batch(0.0))
