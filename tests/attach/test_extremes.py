"""`max` and `min` of Python, of tensors whose order hangs on values."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import CheckFailed, TraceError
from tests.support.stepping import penalise_alike, train_alike

ROWS, WIDTH, CALLS = 6, 4, 8


class Layer(nn.Module):
    def __init__(self, form: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.form = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), form
        self.register_buffer("bound", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x)


def larger_loss(model: Layer, x: Tensor) -> Tensor:
    return max(model.first(x).mean(), model.second(x).mean())


def of_a_list(model: Layer, x: Tensor) -> Tensor:
    return min([model.first(x).mean(), model.second(x).mean(), model.first(x).sin().mean()])


def beside_numbers(model: Layer, x: Tensor) -> Tensor:
    return model.first(x).mean() / max(model.second(x).norm(), 4.0) * min(1, x.norm())


def from_a_first_one(model: Layer, x: Tensor) -> Tensor:
    best = float("-inf")
    for row in model.first(x).unbind():
        best = max(best, row.sum())
    return best * 1.0


def of_counts(model: Layer, x: Tensor) -> Tensor:
    h = model.first(x)
    return h[h > 0].sum() / max((h > 3).sum(), 1)


def of_what_is_known(model: Layer, x: Tensor) -> Tensor:
    return model.first(x).sum() * max(model.bound, 2) / max(x.shape[0], 2)


def in_a_branch(model: Layer, x: Tensor) -> Tensor:
    h = model.first(x)
    if h.mean() > 0:
        h = h * max(h.sum(), model.second(x).sum())
    return h.sum()


def written_behind_it(model: Layer, x: Tensor) -> Tensor:
    first, second = model.first(x).mean(), model.second(x).mean()
    loss = max(first, second)
    loss += 1.0
    second *= 2
    return loss * 3 + first * 5 + second


FORMS = [
    written_behind_it,
    larger_loss,
    of_a_list,
    beside_numbers,
    from_a_first_one,
    of_counts,
    of_what_is_known,
    in_a_branch,
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_they_are_those_of_one_process(one: DeviceMesh, form: Callable[[Layer, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    plain = Layer(form).double()
    batches = [torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in range(CALLS)]
    train_alike(plain, autopar.compile(copy.deepcopy(plain), one), batches)


def test_what_is_not_taken_may_not_spoil_gradients(one: DeviceMesh) -> None:
    parallel = autopar.compile(Layer(lambda model, x: max(model.first(x).mean(), x.sum().log())), one)
    parallel(torch.ones(ROWS, WIDTH)).backward()
    with pytest.raises(CheckFailed, match=r"does not take of max\(\.\.\) at .*is not finite in this call"):
        parallel(torch.zeros(ROWS, WIDTH).requires_grad_())


def which_one(model: Layer, x: Tensor) -> Tensor:
    first, second = model.first(x).mean(), model.second(x).mean()
    best = max(first, second)
    return best * 10 if best is second else best


def test_whoever_asks_which_one_it_is_is_refused(one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"which way forward goes depends on values at .*best = max"):
        autopar.compile(Layer(which_one), one)(torch.randn(ROWS, WIDTH))


def test_the_one_that_is_not_taken_has_no_second_gradient(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Layer(larger_loss).double()
    batches = [torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in range(4)]
    penalise_alike(plain, autopar.compile(copy.deepcopy(plain), one), batches)
