"""Backward with create_graph=True: what one process computes, by programs of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

import autopar
from tests.processes.compare import GRADIENT, LOSS, ZERO, near, same_gradients, same_state

Loss = Callable[[nn.Module, Tensor], Tensor]


class Scores(nn.Module):
    """What forward counts, keeps and writes is as it was when its gradients are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.calls, self.mean = nn.Linear(8, 8), 0, torch.zeros(8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        made = torch.tanh(self.up(x)) * self.calls + self.average + self.mean
        self.mean = self.mean + made.detach().mean(0)
        self.average.mul_(0.9).add_(made.detach().mean(0))
        return made.square().sum(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sin(self.up(x))).mean(1)


class Named(nn.Module):
    """A loss, and what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = torch.tanh(self.up(x))
        return {"loss": made.square().mean(), "logits": made}


class Attending(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 24), nn.Linear(8, 1), dropout

    def forward(self, x: Tensor) -> Tensor:
        rows = self.up(x).view(2, 3, 3, 8).unbind(2)
        q, k, v = (one.view(2, 3, 2, 4).transpose(1, 2) for one in rows)
        made = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.down(made.transpose(1, 2).reshape(6, 8))


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)),
            nn.ConvTranspose2d(2, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.2),
            nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.InstanceNorm2d(8), nn.GELU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.score = parametrizations.spectral_norm(nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.look(x).flatten(1))


class Features(nn.Module):
    """Keeps what it gives, and what it is made of; counts, and divides by that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(8, 8), nn.Linear(8, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.features = torch.tanh(self.up(x)) * (1 + 1 / self.calls)
        self.last = self.down(self.features)
        return self.last


def _of_features(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    score = model(x)
    (slope,) = torch.autograd.grad(score.sum() + model.features.square().sum(), x, create_graph=True)
    return slope.square().mean() + model.features.mean()


def _of_parts(model: nn.Module, x: Tensor) -> Tensor:
    """By convolutions of a part, whose second derivatives do not reach all that it has."""
    x = model.look(x).detach().requires_grad_()
    (slope,) = torch.autograd.grad(model.look[4:](x[:, :4]).sum(), x, create_graph=True)
    return slope.square().mean() + model(x.flatten(1)[:, :8]).mean()


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    score = model(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + score.mean()


def _of_two_calls(model: nn.Module, x: Tensor) -> Tensor:
    return _penalty(model, x) + _penalty(model, 2 * x)


def _third(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    found = model(x)
    for _ in range(3):
        (found,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return found.square().mean()


def _of_parameters(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    slopes = torch.autograd.grad(loss, [one for one in model.parameters() if one.requires_grad], create_graph=True)
    return loss + sum((one.square().sum() for one in slopes), torch.zeros(()))


def _along(model: nn.Module, x: Tensor) -> Tensor:
    """By one parameter, and the argument, from a gradient that has one itself."""
    x = x.clone().requires_grad_()
    score = model(x)
    weight = next(model.parameters())
    first, second = torch.autograd.grad(torch.exp(score / 10).sum(), (weight, x), create_graph=True)
    return first.square().mean() + second.square().mean()


def _of_logits(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    found = model(x)
    (slope,) = torch.autograd.grad(found["logits"].square().sum(), x, create_graph=True)
    return slope.square().sum() + found["loss"]


def _of_loss(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    found = model(x)
    (slope,) = torch.autograd.grad(found["loss"], x, create_graph=True)
    return slope.square().sum() + found["loss"]


def _inner_step(model: nn.Module, x: Tensor) -> Tensor:
    """MAML's (Finn et al. 2017, algorithm 1), twice."""
    weights = dict(model.named_parameters())
    for _ in range(2):
        loss = torch.func.functional_call(model, weights, (x,)).square().mean()
        slopes = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
        weights = {name: one - 0.1 * slope for (name, one), slope in zip(weights.items(), slopes, strict=True)}
    return torch.func.functional_call(model, weights, (x.flip(0),)).square().mean()


def _hessian(model: nn.Module, x: Tensor) -> Tensor:
    of = torch.autograd.functional.hessian(lambda at: model(at).sum(), x[:1], create_graph=True)
    assert isinstance(of, Tensor)
    return of.square().sum()


def _layers(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *more, nn.Softplus(), nn.Linear(16, 1))


def _frozen() -> nn.Module:
    model = _layers()
    model[0].requires_grad_(False)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "penalty": (_layers, _penalty),
    "of two calls": (_layers, _of_two_calls),
    "third": (_layers, _third),
    "of parameters": (_layers, _of_parameters),
    "by a parameter and the argument": (_layers, _along),
    "of frozen parameters": (_frozen, _of_parameters),
    "beside frozen parameters": (_frozen, _penalty),
    "dropout": (lambda: _layers(nn.Dropout(0.3), nn.LayerNorm(16)), _penalty),
    "dropout, of parameters": (lambda: _layers(nn.Dropout(0.3)), _of_parameters),
    "tied": (Tied, _penalty),
    "tied, of parameters": (Tied, _of_parameters),
    "what forward keeps": (Scores, _penalty),
    "what two calls keep": (Scores, _of_two_calls),
    "pictures": (Pictures, _penalty),
    "logits": (Named, _of_logits),
    "a loss": (Named, _of_loss),
    "inner steps": (_layers, _inner_step),
    "inner steps of what is tied": (lambda: _layers(nn.Tanh()), _inner_step),
    "a Hessian": (_layers, _hessian),
    "attention": (Attending, _penalty),
    "what forward gives and keeps": (Features, _penalty),
    "features that it keeps": (Features, _of_features),
    "parts": (Pictures, _of_parts),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_gradients_of_one_process(one: DeviceMesh, name: str) -> None:
    build, loss_of = CASES[name]
    torch.manual_seed(0)
    plain = build().double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(3):
        x, losses = torch.randn(6, 8, dtype=torch.float64), list[Tensor]()
        for model in (parallel, plain):
            torch.manual_seed(step)
            with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels have no second derivatives
                losses.append(loss_of(model, x))
                losses[-1].backward()
        near(*losses, LOSS, f"{name}: the loss of step {step}")
        same_gradients(plain, parallel)
        for model in (parallel, plain):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.01 * parameter.grad)
            model.zero_grad()
        same_state(plain, parallel)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # torch's, of any model
def test_backward_leaves_gradients_that_have_gradients(one: DeviceMesh) -> None:
    plain, x = _layers(), torch.randn(6, 8)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for model in (parallel, plain):
        model(x).square().mean().backward(create_graph=True)
        slopes = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        sum(slope.square().sum() for slope in slopes if slope is not None).backward()
    same_gradients(plain, parallel)


def test_the_first_derivative_is_there_behind_the_second(one: DeviceMesh) -> None:
    """And none is left on parameters that nobody asked for."""
    plain, x = _layers(), torch.randn(6, 8)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    at = x.clone().requires_grad_()
    score = parallel(at)
    torch.autograd.grad(score.sum(), at, create_graph=True)
    assert all(parameter.grad is None for parameter in parallel.parameters())
    score.sum().backward()
    plain(x).sum().backward()
    same_gradients(plain, parallel)


@pytest.mark.parametrize("precision", ["bf16"])
def test_in_another_precision(one: DeviceMesh, precision: str) -> None:
    """As near to float32 as a plain model under it is."""
    torch.manual_seed(0)
    plain, x = _layers(), torch.randn(6, 8)
    half = copy.deepcopy(plain).to(torch.bfloat16)
    parallel = autopar.compile(copy.deepcopy(plain), one, precision=precision)
    for model in (plain, parallel):
        _of_parameters(model, x).backward()
        _penalty(model, x).backward()
    _of_parameters(half, x.bfloat16()).backward()
    _penalty(half, x.bfloat16()).backward()
    for (name, wanted), ours, rough in zip(
        plain.named_parameters(), parallel.parameters(), half.parameters(), strict=True
    ):
        assert wanted.grad is not None and ours.grad is not None and rough.grad is not None
        off = (rough.grad.float() - wanted.grad).abs().max() / wanted.grad.abs().max()
        assert ours.grad.dtype == torch.float32
        near(ours.grad, wanted.grad, max(3 * float(off), 0.02), name)


def _refused(parallel: nn.Module, x: Tensor, told: str) -> None:
    x = x.clone().requires_grad_()
    loss: Any = parallel(x)
    with pytest.raises(RuntimeError, match=told):
        torch.autograd.grad(loss.sum(), x, create_graph=True)
    assert all(parameter.grad is None for parameter in parallel.parameters())


def test_what_draws_in_a_kernel_without_second_derivatives_is_refused(one: DeviceMesh) -> None:
    _refused(autopar.compile(Attending(0.3), one), torch.randn(6, 8), r"create_graph=True.*dropout of attention")


def test_micro_batches_are_refused(one: DeviceMesh) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _layers()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    parallel = autopar.compile(Loss(), one, micro_batches=2)
    _refused(parallel, torch.randn(6, 8), r"create_graph=True.*in micro-batches.* one module")


def test_what_changes_before_the_second_derivative_is_refused(one: DeviceMesh) -> None:
    parallel, x = autopar.compile(_layers(nn.Dropout(0.1)), one), torch.randn(6, 8, requires_grad=True)
    score = parallel(x)
    parallel.eval()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*since its forward .*train"):
        torch.autograd.grad(score.sum(), x, create_graph=True)
    parallel.train()
    score = parallel(x)
    with torch.no_grad():
        next(parallel.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match=r"a parameter or an input was changed in place"):
        torch.autograd.grad(score.sum(), x, create_graph=True)


def test_a_gradient_of_zeros_is_one(one: DeviceMesh) -> None:
    """Of what hangs on an argument in a line, the second derivative is zero, and not missing."""
    plain, x = nn.Linear(8, 1), torch.randn(4, 8)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for model in (plain, parallel):
        _penalty(model, x).backward()
    near(parallel.bias.grad, plain.bias.grad, GRADIENT, "of the score alone", ZERO)
    near(parallel.weight.grad, plain.weight.grad, GRADIENT, "of both")


def test_gradients_in_a_batch_are_those_of_arguments_alone(one: DeviceMesh) -> None:
    plain, x = _layers(), torch.randn(2, 8)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    found = [torch.autograd.functional.jacobian(model, x, vectorize=True) for model in (plain, parallel)]
    near(found[1], found[0], GRADIENT, "rows of a Jacobian")
    made = parallel(x).flatten()
    with pytest.raises(RuntimeError, match=r"in a batch .* take them one by one"):
        torch.autograd.grad(made, parallel[0].weight, torch.eye(made.numel()), is_grads_batched=True)


def test_gradients_in_a_batch_are_refused(one: DeviceMesh) -> None:
    parallel, x = autopar.compile(_layers(), one), torch.randn(1, 8)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*in a batch .is_grads_batched"):
        torch.autograd.functional.hessian(lambda at: parallel(at).sum(), x, create_graph=True, vectorize=True)


def test_what_no_gradient_reaches_has_none(one: DeviceMesh) -> None:
    plain, x = Tied(), torch.randn(4, 8)
    plain.unused = nn.Linear(8, 8)
    parallel = autopar.compile(plain, one)
    found: list[list[Tensor | None]] = []
    for model in (plain, parallel):
        parameters = list(model.parameters())
        found.append([*torch.autograd.grad(model(x).sum(), parameters, create_graph=True, allow_unused=True)])
        with pytest.raises(RuntimeError, match="allow_unused"):
            torch.autograd.grad(model(x).sum(), parameters, create_graph=True)
    assert [one is None for one in found[1]] == [one is None for one in found[0]] == [False] * 3 + [True] * 2
