"""Optimizers that look at more than one number of a parameter at a time: as on one process, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.optim import Whole
from tests.processes.boundary import POLICIES, _batch, _both, _compiled, _net
from tests.processes.compare import near, same_state
from tests.processes.errors import refused
from tests.processes.worker import Ranks
from tests.support.machines import FAST


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, with states made as plain tensors, as third parties make them."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("m", torch.zeros(p.shape)), state.setdefault("v", torch.zeros(p.shape))
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                p.add_(update, alpha=-group["lr"] * float(p.norm() / update.norm()))


class OneStep(torch.optim.Optimizer):
    """SGD whose step is one number of all parameters and gradients, kept in its group (as D-Adaptation does)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            squares = sum((p.grad * p.grad).sum().item() for p in group["params"])
            largest = max(p.abs().max().item() for p in group["params"])
            group["d"] = 0.5 * group["d"] + largest / (1 + squares**0.5)
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * group["d"])


WHOLE: tuple[Callable[..., torch.optim.Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Rprop, Lamb, OneStep)


def _steps(models: tuple[nn.Module, nn.Module], optimizers: Any, batch: tuple[Tensor, Tensor], count: int = 3) -> None:
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.7) for one in optimizers]
    for step in range(count):
        losses: list[Tensor] = []
        for model, optimizer, schedule in zip(models, optimizers, schedules, strict=True):
            losses.append(model(*batch)[0])
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        near(losses[1], losses[0], 1e-5, f"loss of step {step}")


def check_whole_copies_take_any_optimizer(ranks: Ranks) -> None:
    x, y, _ = _batch()
    for policy in POLICIES:
        for make in WHOLE:
            plain, parallel = _both(ranks, policy, x, y)
            optimizers = make(plain.parameters(), lr=0.01), Whole(parallel.parameters(), make, lr=0.01)
            _steps((plain, parallel), optimizers, (x, y))
            same_state(plain, parallel)
            # it goes on from a state dict, with parameters that were loaded between steps
            held = optimizers[1].state_dict()
            with torch.no_grad():
                for ours, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
                    ours.mul_(1.5), theirs.mul_(1.5)
            further = Whole(parallel.parameters(), make, lr=0.01)
            further.load_state_dict(held)
            assert further.param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"]
            _steps((plain, parallel), (optimizers[0], further), (x, y), 2)
            same_state(plain, parallel)


def check_one_number_of_all_parameters_is_the_same_on_every_rank(ranks: Ranks) -> None:
    x, y, _ = _batch()
    for policy in POLICIES:
        plain, parallel = _both(ranks, policy, x, y)
        _steps((plain, parallel), (OneStep(plain.parameters()), OneStep(parallel.parameters())), (x, y))
        same_state(plain, parallel)


def check_what_dtensors_do_not_run_says_what_does(ranks: Ranks) -> None:
    x, y, _ = _batch()
    for make in (torch.optim.Adafactor, torch.optim.Rprop):
        parallel = _compiled(ranks, _net(), "fsdp", x, y)
        parallel(x, y)[0].backward()
        optimizer = make(parallel.parameters())
        refused(RuntimeError, rf"{make.__name__} .*autopar\.optim\.Whole\(parallel\.parameters\(\)", optimizer.step)


def check_states_of_the_plain_model_s_optimizer_are_laid_out(ranks: Ranks) -> None:
    """Loaded before there is a plan, and behind the first call."""
    x, y, _ = _batch()
    for policy in POLICIES:
        for early in (True, False):
            plain = _net()
            theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
            plain(x, y)[0].backward(), theirs.step(), theirs.zero_grad()
            parallel = _compiled(ranks, copy.deepcopy(plain), policy, x, y)
            ours = torch.optim.AdamW(parallel.parameters(), lr=0.01)
            if not early:
                parallel(x, y)
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
            _steps((plain, parallel), (theirs, ours), (x, y))
            same_state(plain, parallel)


WRITES: tuple[Callable[[nn.Module, dict[str, Tensor]], Any], ...] = (
    lambda model, values: [p.copy_(values[name]) for name, p in model.named_parameters()],
    lambda model, values: [p.detach().copy_(values[name]) for name, p in model.named_parameters()],
    lambda model, values: [p.data.copy_(values[name]) for name, p in model.named_parameters()],
    lambda model, values: [setattr(p, "data", values[name].clone()) for name, p in model.named_parameters()],
    lambda model, values: model.load_state_dict(values, strict=False),
)


@torch.no_grad()
def _as_laid_out(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those values, in the layouts of the parameters."""
    return {
        name: distribute_tensor(values[name], p.device_mesh, p.placements) if isinstance(p, DTensor) else values[name]
        for name, p in model.named_parameters()
    }


def check_whole_copies_see_what_is_written(ranks: Ranks) -> None:
    """Between two steps, however it is done."""
    x, y, _ = _batch()
    for policy in POLICIES:
        plain, parallel = _both(ranks, policy, x, y)
        optimizers = (
            torch.optim.Adafactor(plain.parameters(), lr=0.01),
            Whole(parallel.parameters(), torch.optim.Adafactor, lr=0.01),
        )
        for number, write in enumerate(WRITES):
            _steps((plain, parallel), optimizers, (x, y), 2)
            values = {name: torch.full_like(p, 0.1) + 0.01 * number * p for name, p in plain.named_parameters()}
            values = {name: value.detach() for name, value in values.items()}
            with torch.no_grad():
                write(plain, values), write(parallel, _as_laid_out(parallel, values))
        _steps((plain, parallel), optimizers, (x, y), 2)
        same_state(plain, parallel)


def check_states_of_whole_copies_are_read_and_set(ranks: Ranks) -> None:
    """By torch.distributed.checkpoint, which steps an optimizer that shows no states."""
    x, y, _ = _batch()
    for policy in POLICIES:
        plain, parallel = _both(ranks, policy, x, y)
        theirs, ours = torch.optim.AdamW(plain.parameters()), Whole(parallel.parameters(), torch.optim.AdamW)
        _steps((plain, parallel), (theirs, ours), (x, y))
        wanted, found = get_optimizer_state_dict(plain, theirs), get_optimizer_state_dict(parallel, ours)
        assert wanted["state"].keys() == found["state"].keys()
        for name, state in wanted["state"].items():
            for key, value in state.items():
                near(found["state"][name][key], value, 1e-4, f"{key} of {name}", 1e-9)
        assert all(float(ours.state[p]["step"]) == 3 for p in parallel.parameters())
        model, optimizer = get_state_dict(parallel, ours)
        model, optimizer = copy.deepcopy(model), copy.deepcopy(optimizer)
        _, other = _both(ranks, policy, x, y)
        further = Whole(other.parameters(), torch.optim.AdamW)
        set_state_dict(other, further, model_state_dict=model, optim_state_dict=optimizer)
        same_state(plain, other)
        _steps((plain, other), (theirs, further), (x, y), 2)
        same_state(plain, other)


class Averaged(torch.optim.SGD):
    """Has the parameters changed for evaluation and back, as schedule-free optimizers do."""

    @torch.no_grad()
    def scaled(self, by: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(by)


def check_whole_copies_do_what_is_done_to_the_optimizer(ranks: Ranks) -> None:
    """States are reset, a parameter and a group are taken out, methods of its own are called, all is copied."""
    x, y, _ = _batch()
    for policy in POLICIES:
        models = _both(ranks, policy, x, y)
        groups = [[{"params": [p]} for p in model.parameters()] for model in models]
        optimizers: list[Any] = [torch.optim.AdamW(groups[0], lr=0.01), Whole(groups[1], torch.optim.AdamW, lr=0.01)]

        def steps(count: int = 2, models: Any = models, optimizers: Any = optimizers) -> None:
            _steps((models[0], models[1]), optimizers, (x, y), count)
            same_state(models[0], models[1])

        steps()
        for model, optimizer in zip(models, optimizers, strict=True):
            first, *_ = model.parameters()
            optimizer.state[first] = {}
        steps()
        for optimizer in optimizers:
            optimizer.state.clear()
        steps()
        for optimizer in optimizers:
            optimizer.param_groups[-1]["params"] = []
        steps()
        for optimizer in optimizers:
            del optimizer.param_groups[0]
        steps()
        pairs = [copy.deepcopy(pair) for pair in zip(models, optimizers, strict=True)]
        steps(models=[model for model, _ in pairs], optimizers=[optimizer for _, optimizer in pairs])
        steps()
        others: list[Any] = [Averaged(models[0].parameters()), Whole(models[1].parameters(), Averaged)]
        for optimizer in others:
            optimizer.scaled(0.5)
        same_state(models[0], models[1])
        steps(optimizers=others)


def check_clipping_of_a_module_and_what_is_plain_around_it(ranks: Ranks) -> None:
    """A compiled trunk under a plain head, all of it clipped at once: torch refused to mix them."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).double()
    head = nn.Linear(4, 2).double()
    parallel = autopar.compile(copy.deepcopy(trunk), ranks.mesh(), hardware=FAST)
    models = nn.Sequential(trunk, head), nn.Sequential(parallel, copy.deepcopy(head))
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in models]
    for p, most in ((2.0, 0.1), (float("inf"), 0.05), (1.0, 1e3)):
        x = torch.randn(16, 16, dtype=torch.float64)
        norms: list[Tensor] = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), most, p))
            optimizer.step()
        assert not isinstance(norms[1], DTensor)
        near(norms[1], norms[0], 1e-12, f"norm of order {p}")
        for name, wanted in models[0].named_parameters():
            near(models[1].get_parameter(name), wanted, 1e-12, f"{name} clipped by the norm of order {p}")
    assert any(not all(one.is_replicate() for one in p.placements) for p in parallel.parameters())
    models[1][1].weight.grad = torch.full_like(models[1][1].weight, torch.nan)
    refused(
        RuntimeError,
        "The total norm of order 2.0 for gradients from `parameters` is non-finite",
        lambda: nn.utils.clip_grad_norm_(models[1].parameters(), 1.0, error_if_nonfinite=True),
    )


def check_collectives_of_a_script_say_what_to_do(ranks: Ranks) -> None:
    parallel = autopar.compile(nn.Linear(16, 4), ranks.mesh(), hardware=FAST)
    parallel(torch.randn(8, 16)).sum().backward()
    gradient, room = parallel.weight.grad, torch.zeros(4, 16)
    calls: dict[str, Callable[[], Any]] = {
        "allreduce_": lambda: dist.all_reduce(gradient),
        "broadcast_": lambda: dist.broadcast(parallel.weight.detach(), 0),
        "allgather_": lambda: dist.all_gather([room] * ranks.count, gradient),
        "_allgather_base_": lambda: dist.all_gather_into_tensor(torch.zeros(ranks.count * 4, 16), gradient),
        "reduce_": lambda: dist.reduce(gradient, 0),
        "gather_": lambda: dist.gather(gradient, [room] * ranks.count if ranks.rank == 0 else None),
    }
    for name, call in calls.items():
        refused(RuntimeError, rf"^c10d\.{name}\.default was given a DTensor, .* leave out what averages them", call)
    around = nn.Sequential(parallel)
    refused(RuntimeError, "leave out .* DistributedDataParallel around what", lambda: DistributedDataParallel(around))
