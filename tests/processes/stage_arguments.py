"""Gradients of arguments in pipeline stages: those of one process, whichever stages read them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

import autopar
from tests.processes.compare import loss_of, near, whole
from tests.processes.pipelines import doubled, mesh_of
from tests.processes.worker import Ranks
from tests.support.machines import machine

NEAR = 1e-10
SMALL = {"hardware": machine(1e10, flops=1e10), "memory": "4GiB", "time_limit_s": 10}  # batches are split on it


class Reading(nn.Module):
    """`x` is read by the first layer and by the last one, `scale` by all of them, `late` from the middle on, `y` by the
    loss; each layer is `width` wide.
    """

    def __init__(self, layers: int = 6, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor, scale: Tensor, late: Tensor, unused: Tensor | None = None) -> Tensor:
        hidden = x
        for number, layer in enumerate(self.layers):
            hidden = hidden + torch.tanh(layer(hidden)) * scale
            if 2 * number >= len(self.layers):
                hidden = hidden * late.sigmoid()
        return functional.mse_loss(hidden + x, y)


def given(rows: int, asked: str = "x y scale late") -> dict[str, Tensor]:
    made = {name: torch.randn(rows, 8, dtype=torch.float64) for name in ("x", "y", "late")}
    made |= {"unused": torch.ones(3, dtype=torch.float64)} if "unused" in asked else {}
    made["scale"] = torch.rand(8, dtype=torch.float64) + 0.5
    return {name: value.requires_grad_(name in asked.split()) for name, value in made.items()}


def gradient_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def alike(plain: nn.Module, parallel: nn.Module, inputs: dict[str, Any], what: str, within: float = NEAR) -> None:
    """Loss, and all gradients of a loss that is multiplied, are those of the plain model."""
    leaves = [
        {name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in inputs.items()}
        for _ in range(2)
    ]
    losses: list[Tensor] = []
    for model, own in zip((parallel, plain), leaves, strict=True):
        model.zero_grad()
        losses.append(loss_of(model(**own)))
        (3 * losses[-1]).backward()
    near(losses[0], losses[1], within, f"{what}: loss")
    for name, value in leaves[1].items():
        assert (leaves[0][name].grad is None) == (value.grad is None), f"{what}: gradient of {name}"
        if value.grad is not None:
            near(gradient_of(leaves[0][name]), value.grad, within, f"{what}: gradient of {name}", within / 100)
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9) for model in (parallel, plain)]
    near(whole(norms[0]), norms[1], within, f"{what}: norm of gradients of parameters")


def check_gradients_of_arguments(ranks: Ranks) -> None:
    """Of some arguments and of others, in whole and in unequal batches, under every kind of schedule."""
    torch.manual_seed(0)
    for schedule, chunks, count in (
        ("1f1b", None, 1),
        ("1f1b", None, 2),
        ("gpipe", None, 4),
        ("zb-h1", None, 4),
        ("interleaved", 2, 4),
        ("zb-v", None, 3),
    ):
        plain = Reading().double()
        parallel = autopar.compile(
            copy.deepcopy(plain),
            mesh_of(ranks),
            schedule=schedule,
            stages_per_rank=chunks,
            micro_batches=count,
            **SMALL,
        )
        rows = 2 * count * ranks.count
        for asked in ("x y scale late unused", "late", "x", "scale y"):
            alike(plain, parallel, given(rows, asked), f"{schedule} in {count}, of {asked}")
        assert parallel.plan.graph.rounds.count == count
        alike(plain, parallel, given(3 * ranks.count), f"{schedule} in {count}, another batch")


def check_models_train_through_their_inputs(ranks: Ranks) -> None:
    """Labels, and what stands in the place of tokens; a weight is tied over the stages."""
    for name, schedule, count in (("through", "1f1b", 2), ("embeds", "zb-h1", 4)):
        model, inputs = doubled(name)
        inputs = {key: value.requires_grad_(value.is_floating_point()) for key, value in inputs.items()}
        parallel = autopar.compile(
            copy.deepcopy(model), mesh_of(ranks), schedule=schedule, micro_batches=count, **SMALL
        )
        alike(model, parallel, inputs, f"{name} {schedule}", 1e-6)  # models of transformers make losses in float32


def check_what_is_in_front_of_the_pipeline_trains(ranks: Ranks) -> None:
    """An encoder that every rank runs whole: the gradients that reach it are those of the whole batch, on all ranks."""
    torch.manual_seed(0)
    encoders, layers = [nn.Linear(8, 8).double() for _ in range(2)], Reading().double()
    encoders[1].load_state_dict(encoders[0].state_dict())
    parallel = autopar.compile(copy.deepcopy(layers), mesh_of(ranks), micro_batches=2, **SMALL)
    inputs = given(4 * ranks.count, "")
    for _ in range(3):
        for encoder, model in zip(encoders, (parallel, layers), strict=True):
            encoder.zero_grad()
            model(**{**inputs, "x": encoder(inputs["x"]), "late": encoder(inputs["late"])}).backward()
        for ours, wanted in zip(encoders[0].parameters(), encoders[1].parameters(), strict=True):
            near(gradient_of(ours), gradient_of(wanted), NEAR, "the encoder")
            ours.data -= 0.1 * gradient_of(ours)
            wanted.data -= 0.1 * gradient_of(wanted)


def check_inputs_of_a_frozen_model_are_trained(ranks: Ranks) -> None:
    """As attacks and soft prompts do: no parameter has a gradient."""
    torch.manual_seed(0)
    plain = Reading().double().requires_grad_(False)
    parallel = autopar.compile(copy.deepcopy(plain), mesh_of(ranks), micro_batches=2, **SMALL)
    for asked in ("x", "scale late"):
        alike(plain, parallel, given(4 * ranks.count, asked), f"frozen, of {asked}")


def check_rows_of_each_rank(ranks: Ranks) -> None:
    """Under `inputs="local"` a gradient is that of the mean over the rank's own rows, as under DDP."""
    torch.manual_seed(0)
    plain = Reading().double()
    parallel = autopar.compile(copy.deepcopy(plain), mesh_of(ranks), micro_batches=2, inputs="local", **SMALL)
    inputs = given(8 * parallel.data_ranks, "x y")
    inputs["scale"] = inputs["scale"].expand_as(inputs["x"])
    wanted = {key: value.detach().clone().requires_grad_(value.requires_grad) for key, value in inputs.items()}
    plain(**wanted).backward()
    rows = slice(8 * parallel.data_rank, 8 * parallel.data_rank + 8)
    own = {key: value[rows].detach().clone().requires_grad_(value.requires_grad) for key, value in inputs.items()}
    parallel(**own).backward()
    for key in ("x", "y"):
        right = gradient_of(wanted[key])[rows] * parallel.data_ranks
        near(gradient_of(own[key]), right, NEAR, f"own rows of {key}")


def check_pieces_get_pieces(ranks: Ranks) -> None:
    """A DTensor of a stage's ranks has its gradient where it lies."""
    torch.manual_seed(0)
    plain, mesh = Reading().double(), mesh_of(ranks)
    parallel = autopar.compile(copy.deepcopy(plain), mesh, micro_batches=2, **SMALL)
    inputs = given(4 * ranks.count)
    wanted = {key: value.detach().clone().requires_grad_() for key, value in inputs.items()}
    plain(**wanted).backward()
    parallel(**inputs)
    here = parallel._autopar.device_mesh
    placements = [Shard(0), *[Replicate()] * (here.ndim - 1)]
    x = distribute_tensor(inputs["x"].detach(), here, placements).requires_grad_()
    parallel(**{**inputs, "x": x}).backward()
    assert isinstance(x.grad, DTensor) and [*x.grad.placements] == placements
    near(x.grad, gradient_of(wanted["x"]), NEAR, "pieces")


class Conditioned(nn.Module):
    """What is made of `t` at first is read by all layers, in forward and in backward: as diffusion transformers, FiLM
    and gates have it.
    """

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.made = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.Sigmoid())
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.shifts = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        made = self.made(t)
        for layer, shift in zip(self.layers, self.shifts, strict=True):
            x = x + layer(x + shift(made)) * made
        return functional.mse_loss(x, y)


def check_what_all_layers_read_crosses_all_cuts(ranks: Ranks) -> None:
    torch.manual_seed(0)
    for schedule, chunks, asked in (("1f1b", None, ""), ("interleaved", 2, "x"), ("zb-v", 2, "t y")):
        plain = Conditioned().double()
        parallel = autopar.compile(
            copy.deepcopy(plain), mesh_of(ranks), schedule=schedule, stages_per_rank=chunks, micro_batches=4, **SMALL
        )
        inputs = {key: torch.randn(8 * ranks.count, 8, dtype=torch.float64) for key in "xyt"}
        inputs = {key: value.requires_grad_(key in asked.split()) for key, value in inputs.items()}
        alike(plain, parallel, inputs, f"{schedule}, of {asked}")
