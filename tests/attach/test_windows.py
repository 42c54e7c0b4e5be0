"""Slices of one length that begin at hidden values, and elements there: as on one process."""

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
from autopar.errors import CheckFailed
from tests.processes.compare import near, same_gradients

ROWS, LONG, WIDTH = 4, 8, 6
Form = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(WIDTH, WIDTH), form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, self.linear(x)).square().mean()


def crop(model: Net, h: Tensor) -> Tensor:
    begin = torch.randint(0, h.size(1) - 3 + 1, (1,)).item()
    return h[:, begin : begin + 3]


def crop_by_a_tensor(model: Net, h: Tensor) -> Tensor:
    begin = torch.randint(0, h.size(1) - 3, (1,))
    return h[:, begin + 1 : begin + 4] + h[:, begin : begin + 3]


def crop_of_two_dims(model: Net, h: Tensor) -> Tensor:
    top, left = (int(torch.randint(0, size - 2, ())) for size in h.shape[1:])
    bottom = top + 2
    return h[1:, top:bottom, left - 0 : left + 2]


def segments(model: Net, h: Tensor) -> Tensor:
    """As VITS has them."""
    begins = (torch.rand(len(h)) * (h.size(1) - 3 + 1)).long()
    made = torch.zeros_like(h[:, :3])
    for place in range(len(h)):
        made[place] = h[place, begins[place] : begins[place] + 3]
    return made


def at_the_largest(model: Net, h: Tensor) -> Tensor:
    place = h.detach().mean((0, 2))[:-1].argmax()
    return torch.cat(
        [
            h.narrow(1, place, 2),
            h[:, place.item()][:, None],
            h[1, ..., place.item() % 2, None].mT.expand(4, 1, 8)[..., :6],
        ],
        1,
    )


def erased(model: Net, h: Tensor) -> Tensor:
    """As SpecAugment and cutout have it."""
    begin = torch.randint(0, 3, (1,)).item()
    h = h.clone()
    h[:, begin : begin + 2] = 0.0
    h[-1, :, begin : begin + 2] = h[0, :, :2] * 2
    h[0, begin] = h[1, begin]
    h[:, begin : begin + 2] += 1
    return h


def asked_twice(model: Net, h: Tensor) -> Tensor:
    places = torch.randint(0, 3, (2,))
    h = h.clone()
    h[0, places[1] : places[1] + 2] = torch.ones(1, 1, 2, 1, dtype=h.dtype) * h[1, :2]
    return h[:, places[0].item() : places[0].item() + 2] * torch.add(places[1], 1)


def in_a_branch(model: Net, h: Tensor) -> Tensor:
    begin = h.detach().mean((0, 2))[:-2].argmax()
    if h.mean() > 0:
        h = h * 2 + h[:, begin : begin + 1]
    return h


def rolled(model: Net, h: Tensor) -> Tensor:
    """As Autoformer has it, and as what is drawn shifts an image."""
    _, delays = torch.topk(h.detach().mean((0, 2)), 2)
    moved = sum(torch.roll(h, -int(delays[place]), 1) * (place + 1) for place in range(2))
    shift = torch.randint(0, 5, (1,)).item()
    moved = moved + h.roll(shifts=(shift, 1), dims=(1, -1)) * 2 + h.roll(delays[0], 0) * h.roll(2 * shift + 1)
    assert isinstance(moved, Tensor)
    return torch.stack([row.roll(shift * place, 0) for place, row in enumerate(moved)])


def of_sums(model: Net, h: Tensor) -> Tensor:
    """The k-th segment, counted from the end, and of two numbers."""
    k, other = torch.randint(0, 3, (2,)).tolist()
    size, first = 2, k * 3
    parts = h[:, k * size : (k + 1) * size] + h[:, LONG - k - size : LONG - k] * 2 + h[:, -k - 3 : -k - 1] * 3
    last = first + 1
    last -= k
    return parts + h[:, k + other : other + k + 2] * 4 + h[:, 2 - k : -k + 4] * 5 + h[:, 2 * k : last + 1][:, :1] * 6


FORMS = [
    of_sums,
    crop,
    crop_by_a_tensor,
    crop_of_two_dims,
    segments,
    at_the_largest,
    erased,
    asked_twice,
    in_a_branch,
    rolled,
]


def batch(number: int) -> Tensor:
    return torch.randn(ROWS, LONG, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def steps_alike(plain: nn.Module, parallel: Any, count: int = 4) -> None:
    for number in range(count):
        found = list[Tensor]()
        for model in (plain, parallel):
            model.zero_grad()
            torch.manual_seed(number)
            loss = model(batch(number))
            loss.backward()
            found.append(loss)
        near(found[1], found[0], 1e-12, f"loss {number}")
        same_gradients(plain, parallel)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_they_are_as_on_one_process(one: DeviceMesh, form: Form) -> None:
    torch.manual_seed(0)
    plain = Net(form).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    steps_alike(plain, parallel)
    assert len(parallel._autopar.prepared()) == 1


def beyond(model: Net, h: Tensor) -> Tensor:
    begin = h.detach().mean().mul(0).long() + LONG - 1
    return h[:, begin : begin + 2]


def test_what_reaches_beyond_the_end_is_no_such_slice(one: DeviceMesh) -> None:
    parallel = autopar.compile(Net(beyond).double(), one)
    with pytest.raises(
        CheckFailed, match=r"a slice of 2 elements that begins at a value at .* beyond the ends .* of 8"
    ):
        parallel(batch(0))


def set_anew(model: Net, h: Tensor) -> Tensor:
    begin = torch.randint(0, 3, ())
    end = begin + 1
    end.add_(2)
    return h[:, begin:end]


def written_to(model: Net, h: Tensor) -> Tensor:
    begin = torch.randint(0, 3, (1,)).item()
    h = h.clone()
    h[:, begin : begin + 2].zero_()
    return h


def of_twice_as_many(model: Net, h: Tensor) -> Tensor:
    begin = torch.randint(0, 3, (1,))
    return h[:, begin : torch.add(begin, 1, alpha=2)]


def of_a_length(model: Net, h: Tensor) -> Tensor:
    return h[:, : torch.randint(1, 3, (1,)).item()]


REFUSED = {
    written_to: "writes in place to what it has read at a place that is a value",
    of_a_length: "needs a number out of a tensor at once",
    of_twice_as_many: "it needs the values of a tensor",
    set_anew: r"depends? on values|needs the values of a tensor",
}


@pytest.mark.parametrize("form", REFUSED, ids=lambda form: form.__name__)
def test_what_has_no_one_size_or_would_be_lost_is_refused(one: DeviceMesh, form: Form) -> None:
    with pytest.raises(TraceError, match=REFUSED[form]):
        autopar.compile(Net(form).double(), one)(batch(0))
