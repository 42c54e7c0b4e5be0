"""Writes to places that are computed of what a mask of values picks: targets of detectors, kept tokens of samplers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from autopar import CheckFailed
from tests.processes.compare import same_calls
from tests.support.branching import Formed, quick_ones


def targets(h: Tensor) -> Tensor:
    chosen = h[:, 0] > 0
    places, kind = chosen.nonzero(as_tuple=True)[0], h.argmax(1)[chosen]
    wanted = torch.zeros_like(h)
    wanted[places, kind] = 1
    return functional.binary_cross_entropy_with_logits(h, wanted)


def in_their_order(h: Tensor) -> Tensor:
    rows, columns = torch.where(h > 0.2)
    order = h.argsort(1)
    made = torch.zeros_like(h)
    made[rows, order[rows, columns]] = h[rows, columns] * 2
    return (made * h).square().mean() + made.sum()


def kept_tokens(h: Tensor) -> Tensor:
    shares, order = h.softmax(-1).sort(descending=True)
    left_out = shares.cumsum(-1) > 0.5
    kept = torch.zeros_like(left_out)
    rows, columns = (left_out == 0).nonzero(as_tuple=True)
    kept[rows, order[rows, columns]] = 1
    return (h * kept).square().mean()


def whole_rows_from_the_end(h: Tensor) -> Tensor:
    rows, made = (h[:, 0] > 0).nonzero().squeeze(1), h * 1
    made[-1 - rows] = h[rows] * 3
    made[rows * 0] = h[0].exp()  # one row for all of them: however often
    return made.square().mean()


def in_a_branch(h: Tensor) -> Tensor:
    rows, made = (h[:, 0] > 0.3).nonzero().squeeze(1), h * 1
    if len(rows) > 1:
        made[rows ^ 1, rows % 4] = h[rows, 1].exp()
    return made.square().mean()


FORMS = {one.__name__: one for one in (targets, in_their_order, kept_tokens, whole_rows_from_the_end, in_a_branch)}


def batch(number: int) -> Tensor:
    return torch.randn(4, 4).double() * (number % 3)  # of zeros, too: all rows are the same ones then


@pytest.mark.parametrize("name", quick_ones(FORMS, ("targets", "in_their_order", "in_a_branch")))
def test_they_are_as_on_one_process(name: str, one: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain = Formed(FORMS[name])
    same_calls(plain, autopar.compile(copy.deepcopy(plain), one), 6, batch)


def twice(h: Tensor) -> Tensor:
    rows, made = (h[:, 0] > -99).nonzero().squeeze(1), h * 1
    made[rows // 2] = h[rows]
    return made.mean()


def beyond(h: Tensor) -> Tensor:
    rows, made = (h[:, 0] > -99).nonzero().squeeze(1), h * 1
    made[rows, rows * 2] = 1.0
    return made.mean()


@pytest.mark.parametrize(
    "form, told",
    [
        (twice, r"writes to one place twice at .*test_written_wherever.*picks two rows of that place"),
        (beyond, r"IndexError at .*test_written_wherever.*out of range for dim 1, which has 4 elements"),
    ],
)
def test_what_nobody_can_write_is_told(form: Callable[[Tensor], Tensor], told: str, one: DeviceMesh) -> None:
    with pytest.raises(CheckFailed, match=told):
        autopar.compile(Formed(form), one)(torch.randn(4, 4).double())
