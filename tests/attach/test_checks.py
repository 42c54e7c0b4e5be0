"""What forward asks of its values: questions of which one answer ends the call, and questions to small buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import CheckFailed, TraceError
from tests.processes.compare import both_backward, same_gradients
from tests.support.asking import ENDING, Model, by_transformers, raised


def batch(largest: float = 1.0) -> Tensor:
    x = torch.rand(6, 4, dtype=torch.float64)
    x[2, 3] = largest
    return x


@pytest.mark.parametrize("name", ENDING)
def test_what_would_end_the_call_is_checked_in_each(one: DeviceMesh, name: str) -> None:
    plain = Model(ENDING[name])
    parallel = autopar.compile(plain, one)
    for _ in range(2):
        both_backward(plain, parallel, batch())
    same_gradients(plain, parallel)
    with pytest.raises((AssertionError, ValueError), match=r"too large|^$"):
        plain(batch(10.0))
    with pytest.raises(CheckFailed, match=r"forward asks at \S+asking\S*:\d+ \(.*call the model without"):
        parallel(batch(10.0))
    both_backward(plain, parallel, batch())  # and goes on
    same_gradients(plain, parallel)


def clamped(y: Tensor, x: Tensor) -> Tensor:
    if not torch.isfinite(y).all():
        y = y.clamp(-1, 1)
    return y


def replaced(y: Tensor, x: Tensor) -> Tensor:
    if torch.isnan(y).any() or y.isinf().any():
        y = torch.zeros_like(y)
    bad = torch.isnan(y) | torch.isinf(y)
    return y if not bad.any() else y.nan_to_num()


@pytest.mark.parametrize("does", [clamped, replaced])
def test_values_are_taken_to_be_finite_and_are_checked(
    one: DeviceMesh, does: Callable[[Tensor, Tensor], Tensor]
) -> None:
    plain = Model(does)
    parallel = autopar.compile(plain, one)
    both_backward(plain, parallel, batch())
    same_gradients(plain, parallel)
    with pytest.raises(CheckFailed, match=r"test_checks.py:\d+"):
        parallel(batch(torch.inf))


def written(mask: Tensor) -> Tensor:
    mask[0] = True
    return mask


@pytest.mark.parametrize(
    "does",
    [
        lambda y, x: y * 2 if x.sum() > 0 else y,
        lambda y, x: y * 2 if torch.isfinite(x).sum() > 3 else y,
        lambda y, x: y * 2 if (torch.isnan(x) | (x > 1)).any() else y,
        lambda y, x: y * 2 if (torch.isnan(x) | torch.isfinite(x)).all() else y,
        lambda y, x: y * 2 if torch.isnan(x).logical_or_(x > 1).any() else y,
        lambda y, x: y * 2 if written(torch.isnan(x)).any() else y,
    ],
)
def test_a_branch_that_may_go_either_way_is_refused(one: DeviceMesh, does: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match=r"which way forward goes depends on values at .*a program goes one way"):
        autopar.compile(Model(lambda y, x: does(y, x + 0 * y)), one)(batch())


@pytest.mark.parametrize(("does", "wrong"), [(raised, 10.0), (clamped, torch.inf), (by_transformers, 10.0)])
def test_in_micro_batches_each_is_checked(
    one: DeviceMesh, does: Callable[[Tensor, Tensor], Tensor], wrong: float
) -> None:
    plain = Model(does)
    parallel = autopar.compile(plain, one, micro_batches=3)
    both_backward(plain, parallel, batch())
    same_gradients(plain, parallel)
    for row in range(6):
        x = batch()
        x[row, 1] = wrong
        with pytest.raises(CheckFailed):
            parallel(x)


class Strided(nn.Module):
    """As transformers' EnCodec pads: by numbers that are made of buffers."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.counts = nn.Conv1d(2, 4, 4, 2).double(), nn.BatchNorm1d(4).double(), counts
        self.register_buffer("stride", torch.tensor(2), persistent=False)
        self.register_buffer("size", torch.tensor([4, 1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        n, size = x.shape[-1], self.size[0]
        frames = torch.ceil((n - size + 2) / self.stride + 1).to(torch.int64) - 1
        more = frames * self.stride + size - 2 - n
        x = nn.functional.pad(x, (2, more)) if torch.equal(self.size, torch.tensor([4, 1])) else x
        if self.counts:
            self.stride += 1
        return self.norm(self.conv(x)[..., : frames - self.stride + 2]).square().mean()


def test_numbers_made_of_small_buffers_are_known(one: DeviceMesh) -> None:
    plain = Strided()
    parallel = autopar.compile(plain, one)
    x = torch.rand(4, 2, 17, dtype=torch.float64)
    for _ in range(2):
        both_backward(plain, parallel, x)
    same_gradients(plain, parallel)
    assert parallel.norm.num_batches_tracked == plain.norm.num_batches_tracked == 2
    with torch.no_grad():
        parallel.size[1] = 3
    with pytest.raises(CheckFailed, match=r"a buffer that forward asks at \S+:\d+ .* compile the model again"):
        parallel(x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = y * 2 if self.count < 2 else y
        self.count = self.count + 1
        return y.square().mean()


def test_a_buffer_that_is_asked_and_then_assigned_has_a_program_for_each_answer(one: DeviceMesh) -> None:
    plain = Counting()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for call in range(5):
        both_backward(plain, parallel, batch())
        same_gradients(plain, parallel)
        assert parallel.count == plain.count == call + 1
    assert len(parallel._autopar.prepared()) == 2


def test_a_buffer_that_is_asked_and_then_changed_is_refused(one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"asks for what is in a buffer at .*, and changes it at .*stride \+= 1"):
        autopar.compile(Strided(counts=True), one)(torch.rand(4, 2, 17, dtype=torch.float64))


def test_a_buffer_of_two_elements_that_is_asked_and_then_changed_is_refused(one: DeviceMesh) -> None:
    """Also where another one, of one element, may be."""

    class Both(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("pair", torch.zeros(2, dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            if int(self.pair[0]) < 2:
                made = made * 2
            self.pair += 1
            return made

    with pytest.raises(TraceError, match=r"asks for what is in a buffer at .*, and changes it at .*self\.pair \+= 1"):
        autopar.compile(Both(), one)(batch())


class OnlyTrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        while self.training and y.sum() > 100:
            y = y / 2
        return y.square().mean()


def test_a_model_that_cannot_be_traced_in_train_mode_may_be_called_in_eval_mode(one: DeviceMesh) -> None:
    plain = OnlyTrained().eval()
    parallel = autopar.compile(plain, one)
    both_backward(plain, parallel, batch())
    same_gradients(plain, parallel)
    with pytest.raises(TraceError, match=r"self.training and y\.sum"):
        parallel.train()(batch())


@pytest.mark.parametrize("gives", [lambda z: z, lambda z: z.detach(), lambda z: z.view(-1)])
def test_what_forward_writes_to_may_be_an_output(one: DeviceMesh, gives: Callable[[Tensor], Tensor]) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4).double()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.linear(x) * 2
            z += 1
            return z.square().mean(), gives(z)

    plain = Writes()
    parallel = autopar.compile(plain, one)
    x = batch()
    (loss, wanted), (found_loss, found) = plain(x), parallel(x)
    loss.backward(), found_loss.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    same_gradients(plain, parallel)


@pytest.mark.parametrize("way", ["where", "nonzero", "each"])
def test_places_of_a_mask_may_be_written_to(one: DeviceMesh, way: str) -> None:
    def written(y: Tensor, x: Tensor) -> Tensor:
        mask, full = x > 0.5, (x > 0.3).all(-1)
        if way == "where":
            mask[torch.where(full)] = False
        elif way == "nonzero":
            mask[full.nonzero(as_tuple=True)] = False
        else:
            rows, columns = torch.where(mask)
            mask[rows, columns] = False
        return y.masked_fill(mask, 0.25)

    plain = Model(written)
    parallel = autopar.compile(plain, one)
    both_backward(plain, parallel, batch())
    same_gradients(plain, parallel)
