"""Parts and other methods of a parallel module, and what a script computes with its parameters, on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.attach.tensors import mesh_of
from autopar.machine.device import hardware_or_here
from autopar.measure.twin import traced
from autopar.search import Request, search
from tests.processes.compare import near, same_gradients, whole
from tests.processes.worker import Ranks

POLICIES = ("data-parallel", "fsdp", "tensor-parallel")


class Coder(nn.Module):
    """Its parts are called by themselves: to sample, to look at codes, to train one of them with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Unflatten(1, (2, 16)), nn.Conv1d(2, 4, 3))
        self.recurrent, self.table = nn.LSTM(14, 16, batch_first=True), nn.Embedding(10, 16)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decode(self, code: Tensor) -> Tensor:
        return self.recurrent(self.decoder(code))[0]

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.decode(self.encode(x)).mean(1), x) + self.table.weight.square().mean()


def _both(ranks: Ranks, policy: str) -> tuple[Coder, Any, Tensor]:
    torch.manual_seed(0)
    plain, x = Coder(), torch.randn(16, 16)
    mesh, hardware = ranks.mesh(), hardware_or_here("cpu-gloo", "cpu")
    plan = search(traced(plain, (x,), {}), mesh_of(mesh), hardware, Request(policy=policy))
    parallel = autopar.compile(copy.deepcopy(plain), mesh, plan=plan)
    for model in (plain, parallel):
        model(x).backward()
    return plain, parallel, x


def check_parts_are_called_by_themselves(ranks: Ranks) -> None:
    """With gradients and without, of the parts' parameters and of their arguments."""
    for policy in POLICIES:
        plain, parallel, x = _both(ranks, policy)
        with torch.no_grad():
            near(parallel.decode(x[:, :8]), plain.decode(x[:, :8]), 1e-5, f"{policy}: decode")
            near(parallel.table(torch.arange(4)), plain.table(torch.arange(4)), 1e-6, f"{policy}: table")
        codes = [x[:, 8:].clone().requires_grad_() for _ in range(2)]
        losses = [
            model.decode(code).square().mean() + 0.1 * model.encode(x).mean()
            for model, code in zip((plain, parallel), codes, strict=True)
        ]
        near(losses[1], losses[0], 1e-5, f"{policy}: loss")
        for loss in losses:
            loss.backward()  # on top of those of the whole module
        same_gradients(plain, parallel)
        near(codes[1].grad, codes[0].grad, 1e-5, f"{policy}: the gradient of a code")
        for model in (plain, parallel):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        near(parallel(x), plain(x), 1e-5, f"{policy}: the loss behind a step")


def check_parameters_beside_plain_tensors(ranks: Ranks) -> None:
    for policy in POLICIES:
        plain, parallel, x = _both(ranks, policy)
        ours, theirs = parallel.encoder[0].weight, plain.encoder[0].weight
        near(x @ ours.t(), x @ theirs.t(), 1e-6, f"{policy}: a product")
        near(torch.cat([ours, x]), torch.cat([theirs, x]), 0.0, f"{policy}: put together")
        assert torch.allclose(ours, theirs.detach().clone())
        assert np.array_equal(ours.detach().cpu().numpy(), theirs.detach().numpy())
        assert parallel.encoder[0].bias.tolist() == plain.encoder[0].bias.tolist()
        assert np.allclose(np.asarray(ours.grad), theirs.grad, atol=1e-6)
        state = {name: value.cpu().numpy() for name, value in parallel.state_dict().items()}
        assert all(np.array_equal(state[name], value.numpy()) for name, value in plain.state_dict().items())
        assert torch.allclose(ours, ours)
        near(ours[ours > 0], theirs[theirs > 0], 0.0, f"{policy}: picked")
        parts = [
            weight.split([8, 24])[1].square().sum() + weight.chunk(2)[0].sum() * weight.unbind()[3].sum()
            for weight in (ours, theirs)
        ]
        of_parts = [torch.autograd.grad(part, weight)[0] for part, weight in zip(parts, (ours, theirs), strict=True)]
        near(whole(of_parts[0]), of_parts[1], 1e-5, f"{policy}: the gradient of a part")
        near(torch.add(ours.detach(), 1, out=torch.empty(32, 16)), theirs + 1, 1e-6, f"{policy}: out")
        numbers = [sum(one.item() for one in model.encoder[0].bias.detach()) for model in (plain, parallel)]
        assert numbers[0] == numbers[1]
        for row, other in zip(ours, theirs, strict=True):
            near(row, other, 0.0, f"{policy}: a row")
        with torch.no_grad():
            for weight in (ours, theirs):
                weight[weight < 0] *= 0.5
            near(whole(ours), theirs, 1e-6, f"{policy}: what is picked is changed")
            held = x.new_zeros(40, 16)
            held[:32] = ours
            near(held[:32], theirs, 0.0, f"{policy}: rows of a plain tensor")
            for model in (plain, parallel):
                model.encoder[0].weight.mul_(torch.arange(16.0)).add_(x[:1])
        near(whole(ours), theirs, 1e-6, f"{policy}: changed in place")


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "hardtanh": lambda weight: functional.hardtanh(weight, -0.1, 0.1),
    "softshrink": lambda weight: functional.softshrink(weight, 0.1),
    "group_norm": lambda weight: functional.group_norm(weight[None], 2),
    "prod": lambda weight: (1 + weight).prod(0),
    "polar": lambda weight: torch.polar(weight.abs(), weight).real,
    "tensordot": lambda weight: torch.tensordot(weight, torch.ones(16, 2).cumsum(0), 1),
    "as_strided": lambda weight: torch.as_strided(weight, (4, 4), (16, 1)),
    "slogdet": lambda weight: torch.linalg.slogdet(weight[:16].t() + torch.eye(16)).logabsdet,
    "det of a view": lambda weight: torch.linalg.det(weight[:16].t()),
}
CHANGES: dict[str, Callable[[Tensor], object]] = {
    "renorm_": lambda weight: weight.renorm_(2, 0, 0.5),
    "addmm_": lambda weight: weight.addmm_(torch.ones(32, 2).cumsum(0), torch.ones(2, 16)),
    "index_add_": lambda weight: weight.index_add_(0, torch.tensor([1, 30]), torch.ones(2, 16).cumsum(1)),
    "scatter_": lambda weight: weight.scatter_(0, torch.full((1, 16), 31), 0.2),
    "fill_diagonal_": lambda weight: weight.fill_diagonal_(1.0),
    "out": lambda weight: torch.add(weight, torch.ones(32, 16).cumsum(0), out=weight),
    "clamp_": lambda weight: weight.clamp_(min=torch.ones(32, 16).cumsum(1) / 8 - 1),
}


def check_operators_without_a_rule(ranks: Ranks) -> None:
    """Of DTensors: in a backward, in place, and those of which gradients come back in another order."""
    for policy in POLICIES:
        plain, parallel, x = _both(ranks, policy)
        ours, theirs = parallel.encoder[0].weight, plain.encoder[0].weight
        for name, of in OPERATORS.items():
            found = [
                torch.autograd.grad(of(weight).pow(3).sum() + weight.sum() + (x.sum() * own).sum(), [weight, own])
                for weight, own in ((ours, parallel.encoder[0].bias), (theirs, plain.encoder[0].bias))
            ]
            for one, wanted in zip(*found, strict=True):
                near(whole(one), wanted, 1e-5, f"{policy}: the gradient of {name}")
        for name, change in CHANGES.items():
            with torch.no_grad():
                for weight in (ours, theirs):
                    change(weight)
            near(whole(ours), theirs, 1e-6, f"{policy}: {name}")


def check_parts_of_own_rows(ranks: Ranks) -> None:
    """With `inputs="local"` gradients of parts are averages over the ranks, as those of the whole module are."""
    torch.manual_seed(0)
    plain, x = Coder(), torch.randn(16, 16)
    parallel: Any = autopar.compile(copy.deepcopy(plain), ranks.mesh(), inputs="local")
    own = x.chunk(ranks.count)[ranks.rank]
    losses = [
        model(rows) + model.decode(rows[:, :8]).square().mean() + (rows @ model.table.weight.t()).square().mean()
        for model, rows in ((plain, x), (parallel, own))
    ]
    for loss in losses:
        loss.backward()
    same_gradients(plain, parallel)


def check_parts_of_stages(ranks: Ranks) -> None:
    """All ranks call them, and each has what they give, whichever stage a part is in."""
    torch.manual_seed(0)
    plain, x = Coder(), torch.randn(16, 16)
    parallel: Any = autopar.compile(copy.deepcopy(plain), autopar.init_mesh("cpu", pipe=ranks.count), micro_batches=2)
    for model in (plain, parallel):
        model(x).backward()
    code = x[:, :8]
    losses = [model.decode(code).square().mean() + model.encode(x).mean() for model in (plain, parallel)]
    near(losses[1], losses[0], 1e-5, "loss")
    for loss in losses:
        loss.backward()
    same_gradients(plain, parallel)
