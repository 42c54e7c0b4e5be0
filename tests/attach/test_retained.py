"""Several backwards through one call (`retain_graph=True`): gradients of each task, rows of Jacobians and Hessians."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.compare import GRADIENT, near, same_gradients


class Tasks(nn.Module):
    """Two heads on what is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.LayerNorm(16), nn.GELU())
        self.heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.shared(x)
        return tuple(head(shared).square().mean() for head in self.heads)  # type: ignore[return-value]


def both(one: DeviceMesh, model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, autopar.compile(copy.deepcopy(model), one)


def test_gradients_of_each_task_and_then_of_all(one: DeviceMesh) -> None:
    """As PCGrad (Yu et al. 2020) and GradNorm (Chen et al. 2018) take them."""
    torch.manual_seed(0)
    pair, x = both(one, Tasks()), torch.randn(6, 8)
    for step in range(3):
        found: list[list[Tensor]] = []
        for model in pair:
            torch.manual_seed(step)
            losses, shared = model(x), list(model.shared.parameters())
            tasks = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
            sum(losses).backward()
            found.append([gradient for task in tasks for gradient in task])
        for ours, wanted in zip(*found[::-1], strict=True):
            near(ours, wanted, GRADIENT, f"step {step}: of a task")
        same_gradients(*pair)
        for model in pair:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()


def test_gradients_are_added_up_each_time(one: DeviceMesh) -> None:
    pair, x = both(one, nn.Sequential(nn.Linear(8, 4), nn.Tanh())), torch.randn(6, 8)
    for model in pair:
        loss = model(x).sum()
        for time in range(3):
            loss.backward(retain_graph=time < 2)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    same_gradients(*pair)


def test_rows_of_a_jacobian(one: DeviceMesh) -> None:
    pair, x = both(one, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))), torch.randn(1, 8)
    ours, wanted = (torch.autograd.functional.jacobian(model, x) for model in pair[::-1])
    near(ours, wanted, GRADIENT, "rows")  # type: ignore[arg-type]


def test_rows_of_a_hessian(one: DeviceMesh) -> None:
    pair, x = both(one, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))), torch.randn(1, 8)
    found: list[list[Tensor]] = []
    for model in pair:
        at = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
        rows = [torch.autograd.grad(slope[0, place], at, retain_graph=True)[0] for place in range(8)]
        slope.square().sum().backward()
        found.append(rows)
    for ours, wanted in zip(*found[::-1], strict=True):
        near(ours, wanted, GRADIENT, "a row")
    same_gradients(*pair)


def test_what_is_kept_must_not_change(one: DeviceMesh) -> None:
    parallel, x = autopar.compile(nn.Linear(8, 4), one), torch.randn(6, 8)
    loss = parallel(x).square().sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        next(parallel.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        loss.backward()
