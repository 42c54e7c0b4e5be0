"""Functions that look at their operands before they give anything: factoring, solving, counting with minlength."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributions, linalg, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import CheckFailed, TraceError

Form = Callable[[Tensor], Tensor]  # of [8, 4]


def positive(h: Tensor) -> Tensor:
    return h.T @ h + torch.eye(4, dtype=h.dtype)


def several(h: Tensor) -> Tensor:
    return positive(h) + h.unsqueeze(1) * h.unsqueeze(2)


def normal(h: Tensor) -> distributions.MultivariateNormal:
    return distributions.MultivariateNormal(h[0], positive(h))


FORMS: dict[str, Form] = {
    "cholesky": lambda h: linalg.cholesky(positive(h)),
    "upper": lambda h: linalg.cholesky(positive(h), upper=True),
    "as it was called once": lambda h: torch.cholesky(positive(h), True),
    "of several": lambda h: linalg.cholesky(several(h)),
    "inv": lambda h: linalg.inv(positive(h)),
    "inverse": lambda h: several(h).inverse(),
    "solve": lambda h: linalg.solve(positive(h), h.T),
    "solve from the right": lambda h: linalg.solve(positive(h), h, left=False),
    "solve each": lambda h: linalg.solve(several(h), h),
    "lu": lambda h: linalg.lu_factor(positive(h)).LU,
    "a normal distribution": lambda h: normal(h).log_prob(h),
    "drawn from it": lambda h: normal(h).rsample((3,)),
    "of few dims": lambda h: distributions.LowRankMultivariateNormal(h[0], h[:4].T, h[1].exp()).log_prob(h),
    "beta": lambda h: distributions.Beta(h.exp(), h.exp() + 1).rsample() * h,
    "dirichlet": lambda h: distributions.Dirichlet(h.exp()).rsample() * h,
    "combinations": lambda h: h[torch.combinations(torch.arange(5), 3)],
    "with replacement": lambda h: torch.combinations(h[:, 0], with_replacement=True),
    "counts": lambda h: h * torch.bincount(h.argmax(1), minlength=4),
    "counts of more": lambda h: h * h.argmax(1).bincount(minlength=6)[:4],
    "weights": lambda h: h * torch.bincount(h.argmax(1), h[:, 1].detach(), 4),
    "weights in float": lambda h: h * torch.bincount(h.argmax(1), h[:, 1].detach().float(), minlength=5)[1:],
}


class Model(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(4, 4), form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.linear(x)).sin().sum()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
def test_as_torch_has_it(one: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    plain = Model(FORMS[name]).double()
    parallel = autopar.compile(plain, one)
    for seed in range(2):
        x = torch.randn(8, 4, dtype=torch.float64)
        losses = list[Tensor]()
        for model in (plain, parallel):
            torch.manual_seed(seed)
            losses.append(model(x))
            losses[-1].backward()
        torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=1e-9, atol=0)
    for mine, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-8, atol=1e-10)


def shifted(h: Tensor) -> Tensor:
    return torch.bincount(h.argmax(1) + 3, minlength=4)


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (lambda h: linalg.cholesky(h.T @ h - 9 * torch.eye(4)), "cholesky at .* is not positive-definite"),
        (lambda h: linalg.inv(h.T @ (h * 0)), r"linalg\.inv at .* singular matrix"),
        (lambda h: linalg.solve(h.T @ (h * 0), h.T), r"linalg\.solve at .* singular matrix"),
        (lambda h: h * shifted(h), "counts numbers of 4 or more, .* pass a larger minlength"),
    ],
)
def test_what_torch_would_refuse_is_refused_in_the_call(one: DeviceMesh, form: Form, told: str) -> None:
    parallel = autopar.compile(Model(form), one)
    with pytest.raises(CheckFailed, match=told):
        parallel(torch.randn(8, 4))


def test_as_many_as_values_say_is_refused(one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match="shape of what bincount gives depends on values"):
        autopar.compile(Model(lambda h: h * torch.bincount(h.argmax(1))), one)(torch.randn(8, 4))
