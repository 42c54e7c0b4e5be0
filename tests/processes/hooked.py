"""Hooks of submodules that keep what these give: on all ranks what one process has, whichever of them makes it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from tests.processes.compare import near, same_gradients
from tests.processes.pipelines import Blocks, mesh_of
from tests.processes.worker import Ranks
from tests.support.machines import machine

NEAR = 1e-10
SMALL = {"hardware": machine(1e10, flops=1e10), "memory": "4GiB", "time_limit_s": 10}  # batches are split on it


def keeping(model: nn.Module, names: tuple[str, ...], detached: bool) -> dict[str, Tensor]:
    """What these submodules give, as of the last call."""
    kept: dict[str, Tensor] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, made: Tensor) -> None:
            kept[name] = made.detach() if detached else made

        return hook

    for name in names:
        model.get_submodule(name).register_forward_hook(hook_of(name))
    return kept


def inputs_of(rows: int) -> dict[str, Tensor]:
    return dict(zip("xy", torch.randn(2, rows, 8, dtype=torch.float64), strict=True))


def check_what_hooks_keep(ranks: Ranks) -> None:
    """Where the batch is split, where layers are, in micro-batches, and in stages."""
    torch.manual_seed(0)
    names = ("layers.0.0", "layers.1", "layers.3.2")
    flat = autopar.init_mesh("cpu")
    for mesh, options in ((flat, {}), (flat, {"micro_batches": 2}), (mesh_of(ranks), {"micro_batches": 2})):
        plain = Blocks().double()
        parallel = autopar.compile(copy.deepcopy(plain), mesh, **options, **SMALL)
        wanted, kept = keeping(plain, names, detached=True), keeping(parallel, names, detached=True)
        for step in range(3):
            inputs = inputs_of(8 * ranks.count)
            for model in (parallel, plain):
                model.zero_grad()
                model(**inputs).backward()
            for name in names:
                near(kept[name], wanted[name], NEAR, f"{options}, step {step}: what {name} gives")
            same_gradients(plain, parallel)


class Looked(Blocks):
    """Gives numbers of parameters that lie in one stage and in the other one."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        weights = [layer[0].weight.detach() for layer in self.layers]
        return super().forward(x, y), [weight.norm() for weight in weights], self.layers[1][2].bias.detach() * 2


def check_outputs_of_parameters_alone(ranks: Ranks) -> None:
    """In stages: their gradients are made by another stage than the one that gives the outputs."""
    torch.manual_seed(0)
    for count in (1, 2):
        plain = Looked().double()
        parallel = autopar.compile(copy.deepcopy(plain), mesh_of(ranks), micro_batches=count, **SMALL)
        for step in range(3):
            inputs = inputs_of(8 * ranks.count)
            given = [model(**inputs) for model in (parallel, plain)]
            for loss, _, _ in given:
                loss.backward()
            near(given[0][2], given[1][2], NEAR, f"step {step}: a bias")
            for ours, wanted in zip(given[0][1], given[1][1], strict=True):
                near(ours, wanted, NEAR, f"step {step}: a norm")
            norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9) for model in (parallel, plain)]
            near(norms[0], norms[1], NEAR, f"step {step}: norm of gradients")


def check_a_loss_of_what_hooks_keep(ranks: Ranks) -> None:
    """As distillation has it: the loss outside reads features, whose gradients go back."""
    torch.manual_seed(0)
    names = ("layers.0.0", "layers.2")
    plain = Blocks().double()
    parallel = autopar.compile(copy.deepcopy(plain), autopar.init_mesh("cpu"), **SMALL)
    models = [(model, keeping(model, names, detached=False)) for model in (parallel, plain)]
    for step in range(3):
        inputs = inputs_of(4 * ranks.count)
        losses: list[Tensor] = []
        for model, kept in models:
            model.zero_grad()
            loss = model(**inputs)
            losses.append(loss + sum(0.1 * kept[name].square().mean() for name in names))
            losses[-1].backward()
        near(losses[0], losses[1], NEAR, f"step {step}")
        same_gradients(plain, parallel)


def check_rows_of_each_rank(ranks: Ranks) -> None:
    """Under `inputs="local"` each rank has what is made of its own rows."""
    torch.manual_seed(0)
    plain = Blocks().double()
    parallel = autopar.compile(copy.deepcopy(plain), autopar.init_mesh("cpu"), inputs="local", **SMALL)
    wanted, kept = (keeping(model, ("layers.1",), detached=True) for model in (plain, parallel))
    inputs = inputs_of(8 * ranks.count)
    plain(**inputs)
    rows = slice(8 * ranks.rank, 8 * ranks.rank + 8)
    parallel(**{name: value[rows] for name, value in inputs.items()}).backward()
    near(kept["layers.1"], wanted["layers.1"][rows], NEAR, "own rows")
