"""Branches on tensors that forward makes of numbers alone."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import CheckFailed, TraceError
from autopar.trace.beside import Beside
from autopar.trace.literals import Literals
from tests.processes.compare import both_backward, same_gradients
from tests.support.stepping import train_alike


class Model(nn.Module):
    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(4, 4).double(), does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self.linear(x)).square().mean()


def solved(x: Tensor) -> Tensor:
    """As solvers step, with every point written down."""
    times = torch.linspace(0, 1, 5, dtype=torch.float64)
    rises = times[1:] > times[:-1]
    assert rises.all() or (~rises).all()
    wanted, found = times[::2], torch.empty(3, *x.shape, dtype=x.dtype)
    found[0], place = x, 1
    for now, then in itertools.pairwise(times):
        x = x + (then - now) * torch.tanh(x)
        while place < len(wanted) and then >= wanted[place]:
            found[place], place = x, place + 1
    assert place == 3
    return found


def of_sizes(x: Tensor) -> Tensor:
    sizes = torch.tensor([[1, 3], [2, 2]])
    return torch.cat([part * (i + 1) for i, part in enumerate(x.split(sizes.prod(1).sub(1).clamp(max=2).tolist(), 1))])


def of_numbers(x: Tensor) -> Tensor:
    rates = torch.arange(3).float().diff()
    x = x * float(rates.sum()) if torch.equal(rates, torch.ones(2)) else x - 1
    return x[: int(torch.full((), 3))] if bool(torch.eye(2)[0, 0] == 1) else x


def of_quotients(x: Tensor) -> Tensor:
    """Of Python's numbers, as sizes of views, by name and as arguments (Longformer)."""
    rows = torch.div(x.shape[0], 2, rounding_mode="trunc")
    pairs = x.view(rows, 2, 4).contiguous()
    shifted = pairs.as_strided(size=(rows - 1, 3, 4), stride=(8, 4, 1))
    return shifted + x.new_ones((rows - 1, 1, 1))


def of_places(x: Tensor) -> Tensor:
    """Where a mask of numbers is true."""
    kept = (torch.arange(4) % 3 == 0).nonzero().squeeze(-1)
    return x.index_select(1, kept) * len(kept)


ANSWERED = {
    "quotients": of_quotients,
    "places": of_places,
    "solved": solved,
    "of sizes": of_sizes,
    "of numbers": of_numbers,
}


@pytest.mark.parametrize("name", ANSWERED)
def test_branches_on_literals_are_those_of_the_model(one: DeviceMesh, name: str) -> None:
    plain = Model(ANSWERED[name])
    parallel = autopar.compile(plain, one)
    for _ in range(2):
        both_backward(plain, parallel, torch.randn(6, 4, dtype=torch.float64))
    same_gradients(plain, parallel)


def item_set(ones: Tensor, x: Tensor) -> None:
    ones[0] = x.mean()


def added(ones: Tensor, x: Tensor) -> None:
    ones += x.mean()


def added_to_a_look(ones: Tensor, x: Tensor) -> None:
    ones.view(3)[1:].add_(x.mean())


def written_out(ones: Tensor, x: Tensor) -> None:
    torch.mul(x[0, :3].detach(), 2, out=ones)


def by_a_norm(ones: Tensor, x: Tensor) -> None:
    nn.functional.batch_norm(x[:, :3], ones, torch.ones(3, dtype=x.dtype), training=True)


def added_to_a_transposed(ones: Tensor, x: Tensor) -> None:
    ones.reshape(1, 3).mT.add_(x.mean())


def added_to_a_cast(ones: Tensor, x: Tensor) -> None:
    same = ones.to(x)
    same += x.mean()


WRITES = (item_set, added, added_to_a_look, written_out, by_a_norm, added_to_a_transposed, added_to_a_cast)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_was_written_to_is_no_literal(one: DeviceMesh, write: Callable[[Tensor, Tensor], None]) -> None:
    def does(x: Tensor) -> Tensor:
        ones = torch.ones(3, dtype=x.dtype)
        write(ones, x)
        return x * 2 if ones.sum() > 3 else x

    plain = Model(does)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for shift in (-2.0, 0.0, 2.0):
        both_backward(plain, parallel, torch.randn(6, 4, dtype=torch.float64) + shift)
    same_gradients(plain, parallel)


def test_only_what_is_made_of_numbers_is_known() -> None:
    literals, made, other = Literals(Beside()), torch.empty(3), torch.empty(3)
    literals.made(torch.linspace, (0, 1, 3), {"device": "cuda"}, made)
    literals.made(torch.Tensor.to, (made, "cuda:1"), {}, moved := torch.empty(3))
    literals.made(torch.Tensor.to, (moved, torch.device("meta")), {}, again := torch.empty(3))
    assert literals.answer(torch.Tensor.tolist, (again,), {}) == [0.0, 0.5, 1.0]
    assert literals.answer(torch.equal, (made, other), {}) is None
    literals.made(torch.Tensor.__add__, (made, other), {}, torch.empty(3))
    assert literals.answer(torch.equal, (made, moved), {}) is True
    literals.made(torch.rand, (3,), {}, other)
    literals.made(torch.arange, (10**9,), {}, torch.empty(10**9, device="meta"))
    assert literals.answer(torch.Tensor.tolist, (other,), {}) is None
    literals.made(torch.Tensor.unfold, (made, 0, 2, 1), {}, torch.empty(2, 2))
    assert literals.answer(torch.Tensor.tolist, (again,), {}) is None
    literals.made(torch.zeros, (3,), {}, made)
    literals.made(torch.Tensor.to, (made, other), {}, torch.empty(3))  # perhaps a look at the same memory
    assert literals.answer(torch.Tensor.tolist, (made,), {}) is None


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
def test_conditions_of_bytes(one: DeviceMesh) -> None:
    def does(x: Tensor) -> Tensor:
        kept = torch.tensor([1, 0, 1, 1], dtype=torch.uint8)
        return torch.where(kept, x, 2 * x) + x.where(kept, x.sin())

    plain, x = Model(does), torch.randn(6, 4, dtype=torch.float64)
    parallel = autopar.compile(plain, one)
    both_backward(plain, parallel, x)
    same_gradients(plain, parallel)


def test_where_a_buffer_is_not_zero(one: DeviceMesh) -> None:
    """Coupling layers of flows ask it of their masks; another mask is another call's error."""

    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", torch.tensor([True, False, True, True]))

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return x[:, self.mask.nonzero().squeeze(-1)].sin().sum() + x[:, (~self.mask).nonzero().squeeze(-1)].sum()

    plain, x = Coupling(), torch.randn(3, 4)
    parallel = autopar.compile(plain, one)
    both_backward(plain, parallel, x)
    same_gradients(plain, parallel)
    parallel.mask[1] = True
    with pytest.raises(CheckFailed, match="a buffer that forward asks"):
        parallel(x)


def array() -> np.ndarray:
    mask = np.zeros(4, bool)
    start = random.randrange(3)
    mask[start : start + 2] = True
    return mask


def by_a_tensor_of_it(x: Tensor) -> Tensor:
    return x[:, torch.from_numpy(array())]


def by_itself(x: Tensor) -> Tensor:
    return x[:, array()]


def copied_and_written_to(x: Tensor) -> Tensor:
    mask, weights, places = np.zeros(4, bool), np.ones(4), np.arange(2)
    mask[2 * random.randrange(2)] = True
    there, weighs = torch.tensor(mask), torch.tensor(weights)
    mask[1], weights[1] = True, 2.0
    return x[:, there] + x[:, places].sum(-1, keepdim=True) * weighs[1]


def asked(x: Tensor) -> Tensor:
    mask = torch.as_tensor(array())
    return x * 2 if mask[0] else x[:, ~mask]


@pytest.mark.parametrize("does", [by_a_tensor_of_it, by_itself, copied_and_written_to, asked])
def test_masks_of_numpys_are_no_secret(one: DeviceMesh, does: Callable[[Tensor], Tensor]) -> None:
    plain = Model(does)
    batches = [torch.randn(5, 4, dtype=torch.float64) for _ in range(6)]
    train_alike(plain, autopar.compile(copy.deepcopy(plain), one), batches)


def array_behind_a_tensor(x: Tensor) -> Tensor:
    weights = np.ones(4)
    weighs = torch.from_numpy(weights)
    weights += 1
    return x * weighs


def tensor_of_an_array(x: Tensor) -> Tensor:
    weights = np.ones(4)
    weighs = torch.as_tensor(weights)
    weighs.mul_(2)
    return x * weighs * weights[0]


@pytest.mark.parametrize("does", [array_behind_a_tensor, tensor_of_an_array])
def test_memory_that_is_shared_with_numpys_may_not_be_written_to(
    one: DeviceMesh, does: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(TraceError, match=r"forward writes to .*, which share their memory.*torch\.tensor\(\.\.\)"):
        autopar.compile(Model(does), one)(torch.randn(5, 4, dtype=torch.float64))


def test_a_flag_that_forward_sets_does_not_keep_a_step_from_being_planned_again(one: DeviceMesh) -> None:
    """As codebooks do that begin with the first batch: a gradient arrives for an output beside the loss."""

    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4).double()
            self.register_buffer("started", torch.tensor(False))
            self.register_buffer("center", torch.zeros(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.linear(x)
            if not self.started:
                self.center.copy_(h.detach().mean(0))
                self.started.fill_(True)
            return h, (h - self.center).square().mean()

    plain = Started()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for _ in range(3):
        x = torch.randn(5, 4, dtype=torch.float64)
        for model in (plain, parallel):
            model.zero_grad()
            h, loss = model(x)
            (loss + h.square().mean()).backward()
        same_gradients(plain, parallel)
        assert torch.equal(plain.started, parallel.started)
        torch.testing.assert_close(parallel.center, plain.center, rtol=1e-12, atol=0.0)


def stops(x: Tensor) -> Tensor:
    center = x.detach().mean(0)
    for _ in range(4):
        new = (center + x.mean(0)) / 2
        if torch.allclose(new, center, atol=0.05) or torch.equal(new, center):
            break
        center = new
    return center * x


def test_allclose_is_a_question_as_others_are(one: DeviceMesh) -> None:
    plain = Model(stops)
    both_backward(plain, autopar.compile(copy.deepcopy(plain), one), torch.randn(5, 4, dtype=torch.float64))


class Points(nn.Module):
    """Makes points in time of what is in a buffer, and writes to these."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).double()
        self.register_buffer("times", torch.linspace(0, 1, 4).double())

    def forward(self, x: Tensor) -> Tensor:
        start, end = self.times[0], self.times[-1]
        points = torch.arange(0, torch.ceil((end - start) / 0.3 + 1).item()).double() * 0.3 + start
        points[-1] = end
        last = torch.zeros(1).double()
        for step in points[1:] - points[:-1]:
            x = x + step * self.inner(x)
        last[0] = self.times[-1]
        return x.square().mean() * (2 if last > 0.9 else 1)


def test_what_is_made_of_a_buffer_that_was_asked_may_be_written_to(one: DeviceMesh) -> None:
    plain = Points()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for seed in range(2):
        torch.manual_seed(seed)
        both_backward(plain, parallel, torch.randn(5, 4, dtype=torch.float64))
    with torch.no_grad():
        parallel.times.mul_(0.5)  # as many points, and another answer behind them
    with pytest.raises(CheckFailed, match=r"a buffer that forward asks at .* is another one"):
        parallel(torch.randn(5, 4, dtype=torch.float64))
