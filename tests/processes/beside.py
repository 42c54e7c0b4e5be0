"""What scripts make of outputs and parameters, beside the module, where each rank has rows of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import autopar
from tests.processes.compare import whole
from tests.processes.worker import Ranks
from tests.support.machines import machine

ROWS, STEPS = 16, 3


class TwoTasks(nn.Module):
    """Two outputs, parameters that forward and the script read, and one for the script alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
        self.classes, self.value = nn.Linear(8, 4), nn.Linear(8, 1)
        self.log_variances, self.scale = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.classes(hidden) * self.scale, self.value(hidden).squeeze(-1)


Batch = tuple[Tensor, Tensor, Tensor]
Loss = Callable[[TwoTasks, Batch], Tensor]


def two_losses(model: TwoTasks, batch: Batch) -> tuple[Tensor, Tensor]:
    x, labels, values = batch
    classes, value = model(x)
    return functional.cross_entropy(classes, labels), functional.mse_loss(value, values)


def put_together(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def weighed(model: TwoTasks, batch: Batch) -> Tensor:
    """Kendall, Gal and Cipolla, arXiv 1705.07115, equation 10."""
    first, second = two_losses(model, batch)
    logs = model.log_variances
    return torch.exp(-logs[0]) * first + torch.exp(-logs[1]) * second + logs.sum()


def all_weighed(model: TwoTasks, batch: Batch) -> Tensor:
    weights = torch.exp(-model.log_variances)
    return (weights * torch.stack(two_losses(model, batch))).sum()


def over_a_norm(model: TwoTasks, batch: Batch) -> Tensor:
    first, second = two_losses(model, batch)
    return first / (1 + model.body[0].weight.norm()) + second


def adapted(model: TwoTasks, batch: Batch) -> Tensor:
    """A penalty that is as large as a loss, and one of a weight that each rank weighs otherwise."""
    first, second = two_losses(model, batch)
    penalty = second.detach() * model.body[2].weight.square().sum()
    return first + 0.1 * penalty + 0.01 * (model.body[0].weight * first.detach()).sum()


def shifted(model: TwoTasks, batch: Batch) -> Tensor:
    x, labels, _ = batch
    logits = model(x)[0]
    return functional.cross_entropy((logits + model.classes.bias) * model.scale / model.scale.exp(), labels)


def shifted_by_hand(model: TwoTasks, batch: Batch) -> Tensor:
    x, labels, _ = batch
    logits = model(x)[0]
    return functional.cross_entropy(logits + put_together(model.classes.bias), labels)


def penalised(model: TwoTasks, batch: Batch) -> Tensor:
    first, second = two_losses(model, batch)
    return first + second + 1e-2 * sum(one.square().sum() for one in model.parameters())


LOSSES: tuple[Loss, ...] = (weighed, all_weighed, over_a_norm, adapted, shifted, shifted_by_hand, penalised)


def drawn(step: int) -> Batch:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 8, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 4, (ROWS,), generator=draw)
    return x, labels, torch.randn(ROWS, generator=draw, dtype=torch.float64)


def _train(model: nn.Module, losses: Sequence[Any], mesh: Any, **options: Any) -> None:
    plain = model.double()
    for loss in losses:
        alone = copy.deepcopy(plain)
        parallel = autopar.compile(copy.deepcopy(plain), mesh, inputs="local", **options)
        optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (alone, parallel)]
        for step in range(STEPS):
            batch = drawn(step)
            mine = tuple(part.chunk(parallel.data_ranks)[parallel.data_rank] for part in batch)
            for optimizer, model, given in zip(optimizers, (alone, parallel), (batch, mine), strict=True):
                optimizer.zero_grad()
                loss(model, given).backward()
            for (name, wanted), held in zip(alone.named_parameters(), parallel.parameters(), strict=True):
                if (wanted.grad is None) or not wanted.grad.any():
                    continue
                told = f"{loss.__name__}, step {step}, {name}"
                assert held.grad is not None, told
                made = whole(held.grad)
                torch.testing.assert_close(made, wanted.grad, msg=lambda m, t=told: f"{t}: {m}")
            for optimizer in optimizers:
                optimizer.step()


class Contrasted(nn.Module):
    """Gives what each rank has whole (a scale, as open_clip does; a table as long as the batch), and rows that lie
    along the second dim, where the first one is as long as the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(ROWS, 8))
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        over_time = (x[:, None] * torch.linspace(0, 1, ROWS, dtype=x.dtype)[:, None]).transpose(0, 1)
        hidden = self.body(over_time)  # [time, rows, 8]
        return hidden, self.scale.exp(), self.table * 2, hidden.square().mean()


def contrasted(model: Contrasted, batch: Batch) -> Tensor:
    x, labels, values = batch
    hidden, scale, table, penalty = model(x)
    assert hidden.shape[:2] == (ROWS, len(x)) and table.shape == (ROWS, 8)
    first = functional.cross_entropy(scale * hidden[-1] @ table.t(), labels)
    return first + (hidden.mean((0, 2)) * values).mean() + penalty * values.square().mean()


def check_losses_beside_the_module(ranks: Ranks) -> None:
    """Each rank kept the gradient of its own rows, and copies of a parameter drifted apart."""
    _train(TwoTasks(), LOSSES, ranks.mesh())
    _train(TwoTasks(), LOSSES, ranks.mesh(), hardware=machine(flops=1e8))


def check_outputs_that_are_no_rows(ranks: Ranks) -> None:
    """A scale's gradient was that of the rank's own rows; a table as long as the batch was cut, and so was time."""
    _train(Contrasted(), [contrasted], ranks.mesh())
    _train(Contrasted(), [contrasted], ranks.mesh(), hardware=machine(flops=1e8))
