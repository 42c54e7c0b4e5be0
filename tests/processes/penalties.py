"""Backward with create_graph=True, whatever the plans split: penalties on gradients, residuals of differential
equations, and gradients of gradients of parameters.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import autopar
from autopar.attach.tensors import mesh_of
from autopar.measure.twin import traced
from autopar.search import Request, search
from tests.processes.compare import GRADIENT, LOSS, near, same_gradients
from tests.processes.errors import refused
from tests.processes.worker import Ranks
from tests.support.machines import FAST

POLICIES = ("data-parallel", "fsdp", "tensor-parallel")


class Critic(nn.Module):
    """A score for each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 3, 2, 1), nn.Tanh())
        self.norm, self.up, self.score = nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(torch.nn.functional.silu(self.up(self.norm(self.look(x).flatten(1)))))


class Solution(nn.Module):
    """Of an equation, at places and times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.layers(torch.cat((x, t), 1))


def _penalty(critic: nn.Module, x: Tensor) -> Tensor:
    """WGAN-GP's (Gulrajani et al. 2017, section 4), and the score."""
    x = x.detach().clone().requires_grad_()
    score = critic(x)
    (slope,) = torch.autograd.grad(score, x, torch.ones_like(score), create_graph=True)
    return 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean() + score.mean()


def _residual(solution: nn.Module, x: Tensor) -> Tensor:
    """Of Burgers' equation (Raissi et al. 2019, section 3.1), with what hangs on what the module gave."""
    at, t = (x[:, 0, 0, :1].clone().requires_grad_(), x[:, 1, 0, :1].clone().requires_grad_())
    u = solution(at, t)
    (in_time,) = torch.autograd.grad(u.sum(), t, create_graph=True)
    (slope,) = torch.autograd.grad(u.square().sum() / 2, at, create_graph=True)  # begins with u, which has a gradient
    (along,) = torch.autograd.grad(u.sum(), at, create_graph=True)
    (bent,) = torch.autograd.grad(along.sum(), at, create_graph=True)
    return (in_time + slope - 0.1 * bent).square().mean()


def _gradients_of_parameters(critic: nn.Module, x: Tensor) -> Tensor:
    slopes = torch.autograd.grad(critic(x).square().mean(), list(critic.parameters()), create_graph=True)
    return sum((one.square().sum() for one in slopes), torch.zeros(()))


def _curved(critic: nn.Module, x: Tensor) -> Tensor:
    """Twice, each time from gradients that have gradients themselves."""
    x = x[:, 0, :3].flatten(1).clone().requires_grad_()
    along = x[:, :1].detach().exp().requires_grad_()
    score = critic(x)
    (slope,) = torch.autograd.grad(score.exp().sum(), x, create_graph=True)
    (bent,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    (product,) = torch.autograd.grad(score, x, along, create_graph=True)
    (ahead,) = torch.autograd.grad((product * x.detach().cumsum(1)).sum(), along, create_graph=True)
    return bent.square().mean() + ahead.square().mean()


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 1))


def _planned(ranks: Ranks, model: nn.Module, policy: str, args: tuple[Tensor, ...], **options: Any) -> Any:
    mesh = ranks.mesh(*((2, 2) if ranks.count == 4 else ()))
    if policy == "whatever is best":
        return autopar.compile(copy.deepcopy(model), mesh, **options)
    plan = search(traced(model, args, {}), mesh_of(mesh), FAST, Request(policy=policy))
    return autopar.compile(copy.deepcopy(model), mesh, plan=plan, **options)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "penalty": (Critic, _penalty),
    "residual": (Solution, _residual),
    "curved": (_layers, _curved),
    "gradients of parameters": (Critic, _gradients_of_parameters),
}


def _args(name: str) -> tuple[Tensor, ...]:
    """What a plan is made for."""
    if name == "curved":
        return (torch.randn(8, 24).requires_grad_(),)
    if name == "residual":
        return torch.randn(8, 1).requires_grad_(), torch.randn(8, 1).requires_grad_()
    return (torch.randn(8, 3, 8, 8).requires_grad_(name == "penalty"),)


def check_gradients_have_gradients(ranks: Ranks) -> None:
    """Three steps of each, on whole batches."""
    for name, (build, loss_of) in CASES.items():
        for policy in (*POLICIES, "whatever is best"):
            torch.manual_seed(0)
            plain = build()
            parallel = _planned(ranks, plain, policy, _args(name))
            for _ in range(3):
                x = torch.randn(8, 3, 8, 8)
                losses = [loss_of(model, x) for model in (plain, parallel)]
                near(losses[1], losses[0], LOSS, f"{name}, {policy}: loss")
                for loss in losses:
                    loss.backward()
                same_gradients(plain, parallel)
                for model in (plain, parallel):
                    torch.optim.SGD(model.parameters(), lr=1e-2).step()
                    model.zero_grad()


def check_rows_of_each_rank(ranks: Ranks) -> None:
    """Gradients are those of the mean of the ranks' losses, as under DDP."""
    for name in ("penalty", "residual", "curved"):
        build, loss_of = CASES[name]
        for policy in (*POLICIES, "whatever is best"):
            torch.manual_seed(0)
            plain = build()
            parallel = _planned(ranks, plain, policy, _args(name), inputs="local")
            for _ in range(2):
                x = torch.randn(8, 3, 8, 8)
                own = x.chunk(ranks.count)[ranks.rank]
                near(loss_of(parallel, own), loss_of(plain, own), LOSS, f"{name}, {policy}: loss")
                loss_of(parallel, own).backward()
                (sum(loss_of(plain, rows) for rows in x.chunk(ranks.count)) / ranks.count).backward()
                same_gradients(plain, parallel)
                for model in (plain, parallel):
                    torch.optim.SGD(model.parameters(), lr=1e-2).step()
                    model.zero_grad()


def check_pieces(ranks: Ranks) -> None:
    """Arguments and outputs that are DTensors."""
    for policy in POLICIES:
        torch.manual_seed(0)
        plain, x = Critic(), torch.randn(8, 3, 8, 8)
        parallel = _planned(ranks, plain, policy, _args("penalty"), outputs="sharded")
        pieces = distribute_tensor(x, parallel._autopar.device_mesh, [Shard(0)] + [Replicate()] * (ranks.count > 2))
        losses = list[Tensor]()
        for model, given in ((parallel, pieces), (plain, x)):
            at = given.detach().requires_grad_()
            score = model(at)
            (slope,) = torch.autograd.grad(score.square().sum(), at, create_graph=True)
            losses.append(slope.square().mean() + score.mean())
            losses[-1].backward()
        near(*losses, LOSS, f"{policy}: loss")
        same_gradients(plain, parallel)


class Tasks(nn.Module):
    """Two heads on what is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.shared(x)
        return self.heads[0](shared).square().mean(), self.heads[1](shared).square().mean()


def check_several_backwards(ranks: Ranks) -> None:
    """Through one call: of each task, and then of both."""
    for policy in POLICIES:
        torch.manual_seed(0)
        plain = Tasks()
        parallel = _planned(ranks, plain, policy, (torch.randn(16, 24),))
        for _ in range(2):
            x, found = torch.randn(16, 24), list[list[Tensor]]()
            for model in (parallel, plain):
                losses, shared = model(x), list(model.shared.parameters())
                tasks = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
                found.append([gradient for task in tasks for gradient in task])
                (losses[0] + 2 * losses[1]).backward()
            for ours, wanted in zip(*found, strict=True):
                near(ours, wanted, GRADIENT, f"{policy}: of a task")
            same_gradients(plain, parallel)
            for model in (plain, parallel):
                torch.optim.SGD(model.parameters(), lr=1e-2).step()
                model.zero_grad()


def check_arguments_may_go(ranks: Ranks) -> None:
    """A rank keeps its rows for a backward, and not the whole batch."""
    parallel = _planned(ranks, Critic(), "data-parallel", _args("gradients of parameters"))
    x = torch.randn(8, 3, 8, 8)
    held = weakref.ref(x)
    score = parallel(x)
    del x
    assert held() is None
    slopes = torch.autograd.grad(score.square().sum(), list(parallel.parameters()), create_graph=True)
    sum((one.square().sum() for one in slopes), torch.zeros(())).backward()
    assert all(parameter.grad is not None for parameter in parallel.parameters())


def check_gradients_in_a_batch_are_refused(ranks: Ranks) -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(4, 8, requires_grad=True)
    parallel = autopar.compile(model, ranks.mesh(), hardware=FAST)
    refused(RuntimeError, "take them one by one", lambda: jacobian(parallel, x, vectorize=True))
    near(jacobian(parallel, x), jacobian(model, x), GRADIENT, "rows of a Jacobian, one by one")
