"""Updates of parameters on the host beside the next forward, on real processes: the bits of those that are waited for.

The thread of each rank is slow in its own way, so ranks are never in step but for the program's collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar
from autopar.optim import Streamed
from autopar.plan import Plan
from tests.processes.saving_memory import batch, fastest, local, net, saving_memory
from tests.processes.worker import Ranks
from tests.support.residence import hosted

MODELS = ("mlp", "half-frozen")
STEPS = 6

Step = Callable[[autopar.ParallelModule, torch.optim.Optimizer, int], Iterator[Tensor]]


class Slow(torch.optim.AdamW):
    """Whoever does not wait for it sees what was there before; each rank sees other things."""

    rank = 0

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.003 * (1 + type(self).rank))
        return super().step(closure)


class Failing(torch.optim.AdamW):
    """Fails where its thread has updated so many parameters."""

    left = 10**9

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread() is not threading.main_thread():
            if type(self).left == 0:
                raise ArithmeticError("no more")
            type(self).left -= 1
        return super().step(closure)


def plan_of(name: str, ranks: Ranks) -> Plan:
    """Several parameters on the host, beside those on the device and those whose states stream."""
    plan = next(
        plan for plan in (saving_memory(fastest(name, ranks.count), seed) for seed in range(50)) if has_all(plan)
    )
    assert plan.comm_bytes
    return plan


def has_all(plan: Plan) -> bool:
    split = [name for name in hosted(plan.residence) if "Shard" in str(plan.parameters[name])]
    return bool(split) and len(hosted(plan.residence)) > 2 and "stream" in plan.residence.values()


def made(name: str, ranks: Ranks, plan: Plan) -> autopar.ParallelModule:
    return autopar.compile(net(name), ranks.mesh(), example_kwargs=batch(name, 0), plan=plan)


def told(ranks: Ranks, name: str, step: Step, overlap: bool, fused: bool) -> list[Tensor]:
    """What the loop tells of each step, and this rank's pieces of parameters and states after the last."""
    Slow.rank = ranks.rank
    parallel = made(name, ranks, plan_of(name, ranks))
    kind = Slow if overlap else torch.optim.AdamW
    optimizer = Streamed(kind(parallel.parameters(), 1e-3, fused=fused), parallel, overlap=overlap)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    found: list[Tensor] = []
    for number in range(STEPS):
        found += step(parallel, optimizer, number)
        scheduler.step()
    for parameter in parallel.parameters():
        found.append(local(parameter.detach()))
        found += [local(value) for _, value in sorted(optimizer.state.get(parameter, {}).items())]
    return found


def same_bits(ranks: Ranks, step: Step) -> None:
    for name, fused in zip(MODELS, (True, False), strict=True):
        waited, overlapped = (told(ranks, name, step, overlap, fused) for overlap in (False, True))
        assert len(waited) == len(overlapped) and all(map(torch.equal, overlapped, waited)), name


def check_training(ranks: Ranks) -> None:
    def step(parallel: Any, optimizer: torch.optim.Optimizer, number: int) -> Iterator[Tensor]:
        loss = parallel(**batch(parallel_name(parallel), number))
        loss.backward()
        yield loss.detach()
        optimizer.step()
        optimizer.zero_grad()

    same_bits(ranks, step)


def check_clipped_and_evaluated(ranks: Ranks) -> None:
    def step(parallel: Any, optimizer: torch.optim.Optimizer, number: int) -> Iterator[Tensor]:
        given = batch(parallel_name(parallel), number)
        parallel(**given).backward()
        yield local(torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.05))
        optimizer.step()
        with torch.no_grad():
            yield parallel(**given)
        optimizer.zero_grad(set_to_none=bool(number % 2))

    same_bits(ranks, step)


def check_accumulated(ranks: Ranks) -> None:
    """Gradients that are cleared only now and then; the next ones are added to them."""

    def step(parallel: Any, optimizer: torch.optim.Optimizer, number: int) -> Iterator[Tensor]:
        for part in range(3):
            loss = parallel(**batch(parallel_name(parallel), 3 * number + part))
            (loss / 3).backward()
            yield loss.detach()
        optimizer.step()
        if number % 3 == 0:
            parallel.zero_grad()

    same_bits(ranks, step)


def check_saved(ranks: Ranks) -> None:
    """State dicts and a checkpoint, taken right behind the step, and loaded again."""

    def step(parallel: Any, optimizer: torch.optim.Optimizer, number: int) -> Iterator[Tensor]:
        parallel(**batch(parallel_name(parallel), number)).backward()
        optimizer.step()
        values = parallel.state_dict()
        yield from (local(value).clone() for value in values.values())
        optimizer.step()
        model_state, optimizer_state = get_state_dict(parallel, optimizer)
        where = ranks.folder / f"{parallel_name(parallel)}-{number}-{optimizer.overlap}"
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=where)
        wanted = [local(value).clone() for value in model_state.values()]
        optimizer.step()
        model_state, optimizer_state = get_state_dict(parallel, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=where)
        set_state_dict(parallel, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        found = [local(value) for value in parallel.state_dict().values()]
        assert all(map(torch.equal, found, wanted))
        optimizer.zero_grad()

    same_bits(ranks, step)


def check_an_error(ranks: Ranks) -> None:
    """Raised by the forward that comes next, on every rank that has it; and by none after it."""
    parallel = made("mlp", ranks, plan_of("mlp", ranks))
    optimizer = Streamed(Failing(parallel.parameters(), 1e-3), parallel, overlap=True)
    parallel(**batch("mlp", 0)).backward()
    optimizer.step()
    optimizer.state_dict()
    Failing.left = 1
    with pytest.raises(ArithmeticError, match="no more"):
        optimizer.step()
        parallel(**batch("mlp", 1))
    Failing.left = 10**9
    optimizer.step()
    parallel(**batch("mlp", 2)).backward()


def parallel_name(parallel: autopar.ParallelModule) -> str:
    """Which of MODELS it is."""
    return "mlp" if type(net("mlp")).__name__ in type(parallel).__name__ else "half-frozen"
