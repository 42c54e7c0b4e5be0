"""Operators that give lists of tensors, also where there is one in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import TraceError
from tests.processes.compare import same_calls

exp_of_each, norm_of_each, mix_each = (
    vars(torch)[f"_foreach_{name}"] for name in ("exp", "norm", "lerp_")
)  # which optimizers and averages of weights are written with


@torch.library.custom_op("autopar_tests::halves", mutates_args=())
def halves(values: Sequence[Tensor]) -> list[Tensor]:
    return [value / 2 for value in values]


@halves.register_fake
def _(values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(value) for value in values]


halves.register_autograd(lambda ctx, gradients: [one / 2 for one in gradients])


@torch.library.custom_op("autopar_tests::with_halves", mutates_args=())
def with_halves(values: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    return values[0].clone(), [value / 2 for value in values]


@with_halves.register_fake
def _(values: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(values[0]), [torch.empty_like(value) for value in values]


with_halves.register_autograd(lambda ctx, gradient, gradients: [gradient + one / 2 for one in gradients])

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "one": lambda h: exp_of_each([h])[0].mean(),
    "number": lambda h: norm_of_each([h])[0] * 2,
    "two": lambda h: sum(exp_of_each([h, h * 2]), h).mean(),
    "own": lambda h: halves([h.exp()])[0].mean(),
    "own two": lambda h: halves([h.exp(), h])[1].square().mean(),
}


class Model(nn.Module):
    seen: Tensor

    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.form, self.inner = form, nn.Linear(4, 4).double()
        self.register_buffer("seen", torch.zeros(4).double())

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        with torch.no_grad():
            mix_each([self.seen], [h.mean(0)], 0.5)
        return self.form(h - self.seen)


@pytest.mark.parametrize("name", FORMS)
def test_they_are_as_on_one_process(name: str, one: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain = Model(FORMS[name])
    same_calls(plain, autopar.compile(copy.deepcopy(plain), one), 3, lambda number: torch.randn(6, 4).double())


def test_a_list_beside_a_tensor_is_refused(one: DeviceMesh) -> None:
    model = Model(lambda h: with_halves([h.exp()])[1][0].mean()).double()
    with pytest.raises(TraceError, match=r"with_halves.* gives a list of tensors beside others.*register one"):
        autopar.compile(model, one)(torch.randn(6, 4).double())
