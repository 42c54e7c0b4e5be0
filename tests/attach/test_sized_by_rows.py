"""Tensors as long as a mask picks rows."""

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
from tests.processes.compare import same_calls
from tests.support.branching import quick_ones


def labels(rows: Tensor, h: Tensor, mask: Tensor) -> Tensor:
    real = functional.binary_cross_entropy_with_logits(rows[:, 0], torch.ones(rows.shape[0]).double())
    return real + functional.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.long))


def of_two_masks(rows: Tensor, h: Tensor, mask: Tensor) -> Tensor:
    others = h[~mask]
    wanted = torch.cat([torch.ones(len(rows)), torch.full((len(others),), 0.3)]).double()
    return functional.binary_cross_entropy_with_logits(torch.cat([rows, others])[:, 1], wanted)


def of_sums(rows: Tensor, h: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum().item()
    many = torch.zeros(size=(count, 4), dtype=h.dtype) + 2
    kind = torch.empty(int(mask.sum()), dtype=torch.long).fill_(3)
    return (rows * many).sum() + functional.cross_entropy(rows, kind)


def written_to(rows: Tensor, h: Tensor, mask: Tensor) -> Tensor:
    made = torch.zeros(rows.shape).double()
    made[:, 0] = rows[:, 1]
    for turn in range(3):
        made += rows * turn
    back = torch.zeros_like(h)
    back[mask] = made
    return made.square().mean() + back.sum()


def of_indices(rows: Tensor, h: Tensor, mask: Tensor) -> Tensor:
    (places,) = mask.nonzero(as_tuple=True)
    return (h[places] * torch.ones(places.numel(), 4)).sum()


def of_all_dims(rows: Tensor, h: Tensor, mask: Tensor) -> Tensor:
    values = h[h > 0.2]
    return functional.binary_cross_entropy_with_logits(values, torch.zeros(values.shape[0]).double())


def of_none(rows: Tensor, h: Tensor, mask: Tensor) -> Tensor:
    """Sizes that are numbers of Python's are theirs."""
    made = [torch.ones(2, 3), torch.zeros([]), torch.full([2], 1.5), torch.empty(0), torch.ones(size=(2,))]
    return torch.stack([one.sum() for one in made]).sum() + rows.sum()


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    one.__name__: one
    for one in (labels, of_two_masks, of_sums, written_to, of_indices, of_all_dims, of_none)
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.form, self.inner = form, nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Any:
        h = self.inner(x)
        mask = h[:, 0] > 0
        return self.form(h[mask], h, mask)


@pytest.mark.parametrize("name", quick_ones(FORMS, ("labels", "of_two_masks", "of_sums", "written_to")))
def test_they_are_as_on_one_process(name: str, one: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain = Model(FORMS[name])
    parallel = autopar.compile(copy.deepcopy(plain), one)
    same_calls(plain, parallel, 4, lambda _: torch.randn(9, 4).double())
    functions = (torch.zeros, torch.ones, torch.full, torch.empty)
    assert all(type(function).__name__ == "builtin_function_or_method" for function in functions)


def twice_as_many(rows: Tensor, h: Tensor, mask: Tensor) -> Tensor:
    return torch.ones(2 * len(rows)).sum() * h.mean()


def behind_another_dim(rows: Tensor, h: Tensor, mask: Tensor) -> Tensor:
    return torch.ones(3, len(rows)).sum() * h.mean()


def of_a_mask_that_changes(rows: Tensor, h: Tensor, mask: Tensor) -> Tensor:
    mask = mask.clone()
    count = mask.sum().item()
    mask[0] = False
    return torch.ones(count, 4).sum() * h[mask].mean()


@pytest.mark.parametrize("form", [twice_as_many, behind_another_dim, of_a_mask_that_changes])
def test_others_are_refused(form: Callable[[Tensor, Tensor, Tensor], Tensor], one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match="a number out of a tensor"):
        autopar.compile(Model(form), one)(torch.randn(9, 4).double())
