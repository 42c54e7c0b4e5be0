"""Gradients that forward takes itself: of energies, of solutions of differential equations, within inner steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near, same_gradients
from tests.support.derivatives import Forces, Penalty


class Pinn(nn.Module):
    """The residual of a differential equation of second order."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        solution = self.net(x)
        (slope,) = torch.autograd.grad(solution, x, torch.ones_like(solution), create_graph=True)
        of = (torch.autograd.grad(slope[:, at].sum(), x, create_graph=True)[0][:, at] for at in range(2))
        return (sum(of) + torch.sin(x.detach().sum(1))).square().mean() + solution[:1].square().mean()


class Steps(nn.Module):
    """Two steps within forward, through which the outer gradient goes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.bias = nn.Parameter(torch.randn(16, 2) * 0.3), nn.Parameter(torch.zeros(16))
        self.last = nn.Parameter(torch.randn(2, 16) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        weights: list[Any] = [self.hidden, self.bias, self.last]
        for _ in range(2):
            made = functional.linear(torch.relu(functional.linear(x[:2], *weights[:2])), weights[2])
            slopes = torch.autograd.grad(functional.mse_loss(made, x[:2]), weights, create_graph=True)
            weights = [weight - 0.1 * slope for weight, slope in zip(weights, slopes, strict=True)]
        made = functional.linear(torch.relu(functional.linear(x[2:], *weights[:2])), weights[2])
        return functional.mse_loss(made, x[2:])


class Attacked(nn.Module):
    """Also trained at inputs that are worse, which are constants; statistics of a batch on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Softplus(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        classes = (x[:, 0] > 0).long()
        x.requires_grad = True
        loss = functional.cross_entropy(self.net(x), classes)
        (slope,) = torch.autograd.grad(loss, [x], retain_graph=True)
        assert not slope.requires_grad
        return loss + functional.cross_entropy(self.net((x + 0.1 * slope.sign()).detach()), classes)


class Products(nn.Module):
    """With a Hessian and with a Jacobian, by torch's own functions, which take gradients twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        taken = torch.autograd.functional
        _, second = taken.hvp(lambda at: self.net(at).square().sum(), x, torch.ones_like(x), create_graph=True)
        _, along = taken.jvp(self.net, x, torch.cos(x), create_graph=True)
        return (second + along).square().mean() + self.net(x).mean()


class Within(nn.Module):
    """Also where the call has no gradients, as samplers that are guided do."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf, unused = x.detach().requires_grad_(), torch.ones_like(x).requires_grad_()
            slope, none = torch.autograd.grad(self.net(leaf).sum(), (leaf, unused), allow_unused=True)
        assert none is None
        return (self.net(x - slope) + self.other(x)).square().mean()


class Constants(nn.Module):
    """What is made to train in forward, of one element and of several, and is added to or asked for a slope."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        loss = torch.tensor(0.0, requires_grad=self.training) + torch.tensor([0.0, 1.0], requires_grad=True).sum()
        time = torch.tensor([0.5]).requires_grad_()
        extra = torch.FloatTensor([0.25])
        extra.requires_grad = True
        slope, *_ = torch.autograd.grad((y * time).sin().sum(), time, create_graph=True)
        return loss + (y * slope + extra).square().mean()


@pytest.mark.parametrize("kind", [Pinn, Steps, Attacked, Products, Within, Constants])
def test_gradients_in_forward_are_as_on_one_process(kind: type[nn.Module], one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = kind()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    models = (plain, parallel)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for call in range(4):
        losses = list[Tensor]()
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(call)
            optimizer.zero_grad()
            losses.append(model(torch.randn(6, 2)))
            losses[-1].backward()
        near(losses[1], losses[0], 1e-5, f"call {call}")
        same_gradients(plain, parallel)
        for optimizer in optimizers:
            optimizer.step()
    for model in models:
        model.eval()
    x = torch.randn(6, 2)
    near(parallel(x.clone()), plain(x.clone()), 1e-5, "evaluation")
    if kind is Within:
        with torch.no_grad():
            near(parallel(x), plain(x), 1e-5, "without gradients")


@pytest.mark.parametrize("kind", [Forces, Penalty])
def test_models_that_are_trained_by_slopes(kind: type[nn.Module], one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain: Any = kind()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    images = {name: torch.randn(4, 2, 8, 8) for name in ("real", "fake")}
    atoms = {"kinds": torch.randint(0, 10, (4, 6)), **{name: torch.randn(4, 6, 3) for name in ("places", "forces")}}
    inputs = atoms if kind is Forces else {**images, "share": torch.rand(4, 1, 1, 1)}
    outputs = [model(**inputs) for model in (plain, parallel)]
    if kind is Forces:
        near(outputs[1][1], outputs[0][1], 1e-5, "forces")
    losses = [one[0] if isinstance(one, tuple) else one for one in outputs]
    near(losses[1], losses[0], 1e-5, "loss")
    for loss in losses:
        loss.backward()
    same_gradients(plain, parallel)


class Asks(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(2, 2), way

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        made = self.layer(x)
        if self.way == "backward":
            made.sum().backward()
        elif self.way == "batched":
            torch.autograd.grad(made, x, torch.eye(2)[:, None].expand(2, 6, 2), is_grads_batched=True)
        elif self.way == "no scalar":
            torch.autograd.grad(made, x)
        elif self.way == "vmap":
            torch.vmap(torch.func.grad(lambda row: self.layer(row).sum()))(x)
        elif self.way == "vjp":
            _, back = torch.func.vjp(self.layer, x)
            made = made + back(made)[0]
        elif self.way == "unused":
            torch.autograd.grad(made.sum(), torch.ones(2).requires_grad_())
        else:
            torch.autograd.grad(made.detach().sum(), x)
        return made.mean()


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("backward", r"forward calls backward at .*take them by torch\.autograd\.grad there"),
        ("batched", r"forward takes gradients of a batch at .* one after the other"),
        ("vmap", r"forward takes gradients by torch\.func at .* take them by torch\.autograd\.grad"),
        ("vjp", r"torch\.func.* not built.*by torch\.autograd\.grad"),
        ("no scalar", "grad can be implicitly created only for scalar outputs"),
        ("unused", "appears to not have been used in the graph"),
        ("detached", "does not require grad"),
    ],
)
def test_what_cannot_be_taken_is_refused(way: str, told: str, one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=told):
        autopar.compile(Asks(way), one)(torch.randn(6, 2))


class Begun(nn.Module):
    """Losses that begin as a constant with a gradient of its own, and that a batch may add nothing to."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner = way, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        match self.way:
            case "told":
                loss = torch.tensor(0.5, requires_grad=True)
            case "variable":
                loss = torch.autograd.Variable(torch.full((), 0.5), requires_grad=True)
            case _:
                loss = torch.full((), 0.5).requires_grad_()
        count = 0
        for row in x:
            if row.sum() > 0:
                loss, count = loss + self.inner(row).square().mean(), count + 1
        return (loss / max(count, 1) if self.way == "divided" else loss), x.detach() * loss.detach()


@pytest.mark.parametrize("way", ["told", "asked", "variable", "divided"])
def test_a_loss_of_no_part_goes_backward_and_gives_no_parameter_a_gradient(way: str, one: DeviceMesh) -> None:
    plain = Begun(way)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for signs in (torch.ones(3, 1), -torch.ones(3, 1), torch.tensor([[1.0], [-1.0], [1.0]]), -torch.ones(3, 1)):
        x = torch.rand(3, 4) * signs
        for model in (plain, parallel):
            model.zero_grad()
            loss, beside = model(x)
            loss.backward()
            assert (model.inner.weight.grad is None) == bool((signs < 0).all()) and not beside.requires_grad
        near(parallel(x)[0], plain(x)[0], 1e-6, "loss")
        same_gradients(plain, parallel)
    with torch.no_grad():
        x = -torch.rand(3, 4)
        assert parallel(x)[0].requires_grad == plain(x)[0].requires_grad == (way != "divided")
