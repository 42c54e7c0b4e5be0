"""A training run saved on one number of ranks goes on with another."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar
from autopar.optim import Streamed
from autopar.plan import Plan
from tests.processes.compare import LOSS, adamw, near
from tests.processes.models import Net, batch, net
from tests.processes.saving_memory import ALL, fastest, saving_memory
from tests.processes.worker import Ranks
from tests.support.machines import FAST
from tests.support.nets import batch_of, made


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


def check_states_loaded_before_the_plan_lie_as_it_has_them(ranks: Ranks) -> None:
    """As scripts do that load right behind compile, without example inputs."""
    batches = torch.randn(6, 16, 512).unbind()
    wanted: list[float] = []
    for planned in (True, False):
        torch.manual_seed(int(planned))
        plain = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
        example = {"example_inputs": (batches[0],)} if planned else {}
        parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST, **example)
        optimizer = adamw(parallel.parameters())
        losses: list[float] = []
        if not planned:
            model_state, optimizer_state = get_state_dict(parallel, optimizer)
            dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=ranks.folder / "early")
            set_state_dict(parallel, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        for number, x in enumerate(batches if planned else batches[3:]):
            if number == 3 and planned:
                model_state, optimizer_state = get_state_dict(parallel, optimizer)
                dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=ranks.folder / "early")
            loss = (parallel(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        wanted = losses if planned else wanted
    near(torch.tensor(losses), torch.tensor(wanted[3:]), LOSS, "losses")
    split = 0
    for parameter, states in optimizer.state.items():
        placements = getattr(parameter, "placements", None)
        split += placements is not None and any(placement.is_shard() for placement in placements)
        assert getattr(states["exp_avg"], "placements", None) == placements
    assert split, "a plan that splits no parameter shows nothing"


# --- from one residence to another -----------------------------------------------------------------------------------

FROZEN = "half-frozen"  # and tied
AFTER = 5  # steps


def check_save_in_either_residence(ranks: Ranks) -> None:
    """Saved where forward values are recomputed and offloaded, with parameters and states on both tiers, and where
    everything stays on the device.
    """
    kept = fastest(FROZEN, ranks.count)
    for name, plan in (("saving_memory", saving_memory(kept, ALL)), ("kept", kept)):
        parallel, optimizer = _begin_anywhere(ranks, 0, plan)
        _losses(parallel, optimizer, range(3))
        model_state, optimizer_state = get_state_dict(parallel, optimizer)
        where = ranks.folder / f"{name}-{ranks.count}"
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=where)
        losses = _losses(parallel, optimizer, range(3, 3 + AFTER))
        if ranks.rank == 0:
            where.with_suffix(".json").write_text(json.dumps(losses))


def check_load_in_the_other_residence(ranks: Ranks) -> None:
    """What the other of one and two ranks has saved, in the other residence."""
    kept = fastest(FROZEN, ranks.count)
    for name, plan in (("kept", saving_memory(kept, ALL + 1)), ("saving_memory", kept)):
        parallel, optimizer = _begin_anywhere(ranks, 9, plan)
        model_state, optimizer_state = get_state_dict(parallel, optimizer)
        where = ranks.folder / f"{name}-{3 - ranks.count}"
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=where)
        set_state_dict(parallel, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        assert parallel.head.weight is parallel.tokens.weight
        wanted = torch.tensor(json.loads(where.with_suffix(".json").read_text()))
        found = torch.tensor(_losses(parallel, optimizer, range(3, 3 + AFTER)))
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)


def _begin_anywhere(ranks: Ranks, seed: int, plan: Plan) -> tuple[autopar.ParallelModule, torch.optim.Optimizer]:
    given = batch_of(FROZEN, 0)
    parallel = autopar.compile(made(FROZEN, seed), ranks.mesh(), example_kwargs=given, plan=plan)
    return parallel, Streamed(adamw(parallel.parameters()), parallel)


def _losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses: list[float] = []
    for seed in seeds:
        loss = model(**batch_of(FROZEN, seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
