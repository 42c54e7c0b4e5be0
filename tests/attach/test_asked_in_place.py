"""What forward makes of its arguments, writes to in place and asks then; and tensors where torch takes integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from tests.processes.compare import both_backward, same_gradients

ROWS, WIDTH = 6, 4
Mask = Callable[[Tensor], Tensor]


def written_at(there: Tensor) -> Tensor:
    there[0] |= ~there.any()
    return there


def through_a_view(there: Tensor) -> Tensor:
    pairs = there.view(3, 2)
    pairs[:, 0] = True
    pairs.t()[1].logical_and_(there[:3])
    return there


def at_each_row(there: Tensor) -> Tensor:
    for row in there.view(3, 2):
        row[1] = False
    return there


def at_both_halves(there: Tensor) -> Tensor:
    first, second = there.chunk(2)
    first[0] = False
    second.fill_(True)
    first[1] = second[0]
    return there


def by_itself(there: Tensor) -> Tensor:
    part = there[1:]
    part[part] = False
    return there


def under_another_name(there: Tensor) -> Tensor:
    other = there.detach()
    other[0] = True
    there.view(3, 2).diagonal()[1] = False
    return there


def a_copy(there: Tensor) -> Tensor:
    picked = there[torch.tensor([0, 1])]
    picked[:] = True
    return there


def empty_at_first(there: Tensor) -> Tensor:
    ends = torch.empty(ROWS + 1, dtype=torch.long)
    ends[0] = 0
    ends[1:] = there.cumsum(0)
    return torch.arange(ROWS) < ends[-1]


class Picking(nn.Module):
    """Asks how many rows there are that a mask picks, which hangs on arguments alone."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(WIDTH, WIDTH), mask

    def forward(self, x: Tensor) -> Tensor:
        picked = x[self.mask((x != 0).any(1))].contiguous()
        return (self.layer(picked) * torch.ones(size=[picked.shape[0], 1])).sum()


@pytest.mark.parametrize(
    "mask",
    [written_at, through_a_view, at_each_row, at_both_halves, by_itself, under_another_name, a_copy, empty_at_first],
    ids=lambda mask: mask.__name__,
)
def test_what_is_written_in_place_is_known_as_it_is_behind_that(one: DeviceMesh, mask: Mask) -> None:
    plain = Picking(mask)
    parallel = autopar.compile(plain, one)
    for seed, zero in enumerate(([1], [0, 3], [1, 2, 3, 4, 5])):
        torch.manual_seed(seed)
        x = torch.randn(ROWS, WIDTH)
        x[zero] = 0.0
        both_backward(plain, parallel, x)
        same_gradients(plain, parallel)


OF_INTEGERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "full": lambda y, n: y.sum() * torch.full((n.sum(),), 2.0).sum(),
    "interpolate": lambda y, n: functional.interpolate(y[None], size=(n.sum(),), mode="nearest"),
    "roll": lambda y, n: y.roll(n[0], 0)[0],
    "linspace": lambda y, n: y.sum() * torch.linspace(0, 1, n.sum()),
    "chunk": lambda y, n: y.chunk(n.sum())[0],
    "topk": lambda y, n: y.topk(n[0], 0)[0],
    "eye": lambda y, n: y.sum() * torch.eye(n.sum())[0],
    "adaptive_avg_pool1d": lambda y, n: functional.adaptive_avg_pool1d(y[None], n[0]),
    "one_hot": lambda y, n: y.sum() * functional.one_hot(n % 3, n.sum() + 1),
    "triu": lambda y, n: y.triu(diagonal=n[0]),
    "select": lambda y, n: y.select(0, n[0]),
    "avg_pool1d": lambda y, n: functional.avg_pool1d(y[None], kernel_size=n[0]),
    "unfold": lambda y, n: y.unfold(0, n[0], 1),
    "diagonal": lambda y, n: y.diagonal(n[0]),
    "repeat_interleave": lambda y, n: y.repeat_interleave(n[0], 0).square(),
    "repeat_interleave by name": lambda y, n: torch.repeat_interleave(y, repeats=n[0], dim=0).square(),
}


class Integers(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(WIDTH, WIDTH), form

    def forward(self, x: Tensor, numbers: Tensor) -> Any:
        return self.form(self.layer(x), numbers).sum()


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_a_tensor_may_stand_where_torch_takes_an_integer(one: DeviceMesh, name: str) -> None:
    plain = Integers(OF_INTEGERS[name])
    parallel = autopar.compile(plain, one)
    for seed, numbers in enumerate(([1, 2], [2, 3], [1, 2])):
        torch.manual_seed(seed)
        both_backward(plain, parallel, torch.randn(ROWS, WIDTH), torch.tensor(numbers))
        same_gradients(plain, parallel)
    assert len(parallel._autopar.prepared()) == 2


class Counts(nn.Module):
    """Of rows that are not empty, as numpy has them."""

    def __init__(self, form: Callable[[Tensor], int]) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(WIDTH, WIDTH), form

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() * self.form((x != 0).sum(1))


def of_an_array_of_before(counts: Tensor) -> int:
    array = counts.numpy()
    counts += 1
    return int(array.max())


def of_a_copy_of_before(counts: Tensor) -> int:
    array = counts.numpy().copy()
    counts += 1
    return int(array.max())


def of_an_array_of_after(counts: Tensor) -> int:
    counts += 1
    return int(counts.numpy()[1:].max())


def shifted(counts: Tensor) -> int:
    counts <<= 2
    return int(((counts >> 1) << 3).max())


@pytest.mark.parametrize("form", [of_a_copy_of_before, of_an_array_of_after, shifted], ids=lambda form: form.__name__)
def test_an_array_is_what_was_there(one: DeviceMesh, form: Callable[[Tensor], int]) -> None:
    plain = Counts(form)
    parallel = autopar.compile(plain, one)
    both_backward(plain, parallel, torch.randn(ROWS, WIDTH))
    same_gradients(plain, parallel)


def test_an_array_does_not_see_what_is_written_behind_it(one: DeviceMesh) -> None:
    with pytest.raises(autopar.TraceError, match=r"test_asked_in_place\.py:\d+"):
        autopar.compile(Counts(of_an_array_of_before), one)(torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize("form", [lambda n: n.sum().item() * 2**61 % 7, lambda n: n.sum().item() ** 40 % 11])
def test_integers_of_more_than_64_bits_are_told_of(one: DeviceMesh, form: Callable[[Tensor], int]) -> None:
    parallel = autopar.compile(Counts(form), one)
    with pytest.raises(autopar.CheckFailed, match=r"computes an integer at .*test_asked_in_place\.py:\d+ .* 64 bits"):
        parallel(torch.randn(ROWS, WIDTH))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, bool]:
        hidden = self.layer(x)
        rows = hidden.permute(0, 2, 3, 1).contiguous().clone()
        rows.mul_(3.0)
        return (hidden * rows.permute(0, 3, 1, 2)).mean(), rows, x.is_contiguous()


def test_arguments_that_lie_otherwise_are_computed_with_as_any_others(one: DeviceMesh) -> None:
    plain = Convolved()
    parallel = autopar.compile(plain, one)
    torch.manual_seed(0)
    x = torch.randn(2, 3, ROWS, ROWS).to(memory_format=torch.channels_last)
    (ours, rows, lies), (loss, wanted, _) = parallel(x), plain(x)
    torch.testing.assert_close((ours, rows), (loss, wanted))
    assert lies and not x.is_contiguous()  # as the boundary says
    ours.backward(), loss.backward()
    same_gradients(plain, parallel)
