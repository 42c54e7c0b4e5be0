"""Writes in place to rows that a mask of values picks: whoever looks at them sees that, and the tensor that they were
picked from does not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from autopar import TraceError
from tests.processes.compare import both_backward, same_gradients
from tests.support.branching import Formed, quick_ones


def by_another_name(h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0]
    other = rows
    other += 1
    other *= rows.detach().clone()
    return rows.square().sum() + h.mean()


def columns(h: Tensor) -> Tensor:
    """As splines write the ends of their intervals."""
    rows = functional.pad(h[h[:, 0] > 0].exp().cumsum(-1), (1, 0))
    rows[..., 0] = -3.0
    rows[..., -1] = rows[..., 2]
    rows[:, 1:3] = rows[:, 3:5]
    rows[..., -1:] += 1e-3
    return (rows[:, 1:] - rows[:, :-1]).square().sum()


def a_view(h: Tensor) -> Tensor:
    rows = h[torch.where(h[:, 0] > 0)[0]]
    view, kept = rows[:, 1:], rows.clone()
    rows[:, 1] = h.mean()
    view.mul_(2).sub_(kept.mean(1, keepdim=True))
    return view.square().sum() + rows.sum() * kept.sum() + h.square().mean()


def by_functions(h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0]
    made = functional.leaky_relu(rows, 0.2, inplace=True)
    more = (rows * 1).add_(1, alpha=2).clamp_(min=0.1)
    return made.square().sum() + more.sum() * rows.detach().mean() + h.mean()


def by_a_layer(h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0] - 0.3
    return (nn.ReLU(inplace=True)(rows) + 2 * rows).sum()


def rows_of_rows(h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0] * 1
    further = rows[rows[:, 1] > 0]
    further += 1
    rows[rows[:, 2] > 0] = 0.5
    rows[rows > 1.5] = 1.5
    rows.masked_fill_(rows < 0, 0.25)
    return rows.square().sum() + further.square().sum()


def given(h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0]
    zeros, same, source = torch.zeros_like(rows), rows.detach().clone().fill_(2.0), rows * 3
    zeros.copy_(source)
    source.zero_()
    return zeros.square().sum() + (same * rows).sum() + source.sum()


def put_back(h: Tensor) -> Tensor:
    mask, out = h[:, 0] > 0, h * 1
    rows = h[mask]
    rows[..., 2] = 3.0
    out[mask] = rows
    return out.square().mean()


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    one.__name__: one
    for one in (by_another_name, columns, a_view, by_functions, by_a_layer, rows_of_rows, given, put_back)
}
FIRST = "by_another_name", "columns", "a_view", "rows_of_rows"


@pytest.mark.parametrize("name", quick_ones(FORMS, FIRST))
def test_they_are_as_on_one_process(name: str, one: DeviceMesh) -> None:
    as_on_one_process(name, one, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FORMS.keys() - {"a_view", "by_functions"}))  # products of sums over the batch
def test_they_are_in_micro_batches(name: str, one: DeviceMesh) -> None:
    as_on_one_process(name, one, 2)


def as_on_one_process(name: str, one: DeviceMesh, micro_batches: int) -> None:
    plain = Formed(FORMS[name], 6)
    parallel = autopar.compile(copy.deepcopy(plain), one, micro_batches=micro_batches)
    for seed in range(3):
        torch.manual_seed(seed)
        both_backward(plain, parallel, torch.randn(8, 6).double(), within=1e-12)
        same_gradients(plain, parallel)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "places": lambda h: torch.nonzero(h[:, 0] > 0).squeeze(1).add_(1).sum() * h.sum(),
    "of other rows": lambda h: h[h[:, 0] > 0].add_(h[h[:, 1] > 0]).sum(),
    "a tensor of other rows": lambda h: h[h[:, 0] > 0].copy_(h).sum(),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_rows_are_refused(name: str, one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"(in place.* of such rows|rows of two masks)"):
        autopar.compile(Formed(WRONG[name], 6), one)(torch.randn(8, 6).double())


def test_a_function_that_makes_others_writes_to_none(one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match="and fill of such rows is not understood"):
        autopar.compile(Formed(lambda h: torch.fill(h[h[:, 0] > 0], 2.0).sum(), 6), one)(torch.randn(8, 6).double())
