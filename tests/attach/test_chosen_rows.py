"""Names that hold rows which a mask of values picks, and branches by values assign; checks in branches."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import CheckFailed, TraceError
from tests.processes.compare import both_backward, same_gradients
from tests.support.branching import Formed, quick_ones

assert_async = vars(torch)["_assert_async"]  # as packages call it


def assigned(h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0]
    if h.mean() > 0:
        rows = rows * 2 + rows.mean(0)
    return rows.square().sum() + h.mean()


def assigned_either_way(h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0]
    if h.mean() > 0:
        rows = rows.exp()
    elif h.max() > 1.5:
        rows = rows - h.mean()
    else:
        rows = rows.sigmoid()
    return rows.square().sum() + h.mean()


def chosen(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for place in range(3):
        mask = h.argmax(1) == place
        out[mask] = h[mask].tanh() * (place + 1) if mask.any() else out[mask]
    rows = h[h[:, 0] > 0]
    rows = rows.exp() if h.sum() > 1 or rows.sum() > 2 else rows
    return out.square().sum() + rows.mean(1).sum() + h.mean()


def returned(h: Tensor) -> Tensor:
    def expert(rows: Tensor) -> Tensor:
        if rows.shape[0] == 0:
            return rows
        return rows.exp() - 1

    return sum((expert(h[h.argmax(1) == place]).sum() for place in range(3)), h.mean())


def in_turn(h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0]
    for place in range(3):
        if h[place].sum() > 0:
            rows = rows * (h[place].mean() + 1)
    return rows.square().sum() + h.mean()


def extremes(h: Tensor) -> Tensor:
    """Row by row, of two."""
    rows = h[h[:, 0] > 0]
    return torch.min(rows.abs(), rows.exp()).sum() + torch.max(rows, rows.square() - 1).sum() + h.mean()


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    one.__name__: one for one in (assigned, assigned_either_way, chosen, returned, in_turn, extremes)
}


@pytest.mark.parametrize("name", quick_ones(FORMS, ("assigned", "chosen", "extremes")))
def test_they_are_as_on_one_process(name: str, one: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain = Formed(FORMS[name], 6)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for seed in range(6):
        torch.manual_seed(seed)
        both_backward(plain, parallel, torch.randn(5, 6).double() * 2 + (0.5 if seed % 2 else -0.5), within=1e-12)
        same_gradients(plain, parallel)


def other_rows(h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0]
    if h.mean() > 0:
        rows = h[h[:, 1] > 0]
    return rows.sum()


def of_another_width(h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0]
    if h.mean() > 0:
        rows = rows[:, 1:]
    return rows.sum()


@pytest.mark.parametrize("form", [other_rows, of_another_width])
def test_others_are_refused(form: Callable[[Tensor], Tensor], one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"assigns 'rows' .* it is rows that a mask picks, and else others"):
        autopar.compile(Formed(form, 6), one)(torch.randn(5, 6).double())


def largest(h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0]
    if len(rows) > 2 and rows.max() > 0.5:
        h = h * 2
    most = rows.max() if len(rows) > 2 else rows.sum()
    return h.square().mean() + most + (rows.min() if h.mean() > 5 else h.sum())


def test_there_is_no_largest_of_no_rows(one: DeviceMesh) -> None:
    """And none is asked for in a branch that is not taken."""
    plain = Formed(largest, 6)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    with torch.no_grad():
        for model in (plain, parallel):
            model.inner.weight.copy_(torch.eye(6) + 0.01)
    x = torch.randn(5, 6).double().abs() + 1
    for given in (x, -x, x * 9):
        both_backward(plain, parallel, given, within=1e-12)
        same_gradients(plain, parallel)
    x[:, 0] = -50
    x[:, 1] = 900
    with pytest.raises(RuntimeError, match="min"):
        plain(x)
    with pytest.raises(
        CheckFailed, match=r"picks no row in this call, and forward asks for the min of all .*there is none"
    ):
        parallel(x)


def checks(h: Tensor) -> Tensor:
    if h.mean() > 0:
        if h.max() > 100:
            raise RuntimeError("too large")
        h = h * 2
    assert_async(h.min() > -400, "too small")
    return h.square().mean()


@pytest.mark.parametrize(("by", "told"), [(200.0, "too large"), (-900.0, "too small")])
def test_checks_are_asked_where_the_model_asks_them(by: float, told: str, one: DeviceMesh) -> None:
    plain = Formed(checks, 6)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    with torch.no_grad():
        for model in (plain, parallel):
            model.inner.weight.copy_(torch.eye(6) + 0.01)
    x = torch.randn(5, 6).double()
    for added in (x * 0, x, x - 150):  # the last one has no place in the branch, and passes
        both_backward(plain, parallel, x + added, within=1e-12)
        same_gradients(plain, parallel)
    with pytest.raises(RuntimeError, match=told):
        plain(x + by)
    with pytest.raises(CheckFailed, match=r"test_chosen_rows.py:\d+"):
        parallel(x + by)
