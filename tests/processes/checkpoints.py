"""A training run saved on one number of ranks goes on with another."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar
from tests.processes.compare import LOSS, adamw, near
from tests.processes.models import Net, batch, net
from tests.processes.worker import Ranks
from tests.support.machines import FAST


def _begin(ranks: Ranks, seed: int, *sizes: int) -> tuple[autopar.ParallelModule, torch.optim.Optimizer]:
    parallel = autopar.compile(net(seed=seed), ranks.mesh(*sizes), hardware=FAST, example_kwargs=batch())
    return parallel, adamw(parallel.parameters())


def _steps(model: Net, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses: list[float] = []
    for seed in seeds:
        loss = model(**batch(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_save(ranks: Ranks) -> None:
    parallel, optimizer = _begin(ranks, 0, 2, 2)
    plain = net()
    first = _steps(plain, by_hand := adamw(plain.parameters()), range(3))
    near(torch.tensor(_steps(parallel, optimizer, range(3))), torch.tensor(first), 10 * LOSS, "losses before")
    model_state, optimizer_state = get_state_dict(parallel, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=ranks.folder / "checkpoint")
    if ranks.rank == 0:
        (ranks.folder / "losses.json").write_text(json.dumps(_steps(plain, by_hand, range(3, 6))))
    dist.barrier()


def check_load(ranks: Ranks) -> None:
    parallel, optimizer = _begin(ranks, 9)
    model_state, optimizer_state = get_state_dict(parallel, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=ranks.folder / "checkpoint")
    set_state_dict(parallel, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    wanted = json.loads((ranks.folder / "losses.json").read_text())
    near(torch.tensor(_steps(parallel, optimizer, range(3, 6))), torch.tensor(wanted), 10 * LOSS, "losses after")
