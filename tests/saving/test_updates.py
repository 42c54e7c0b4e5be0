"""Updates of parameters on the host, overlapped with the next forward: the bits of those that are waited for."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.attach.late import Late
from autopar.attach.updates import Updates
from autopar.optim import Streamed
from autopar.plan import Plan
from tests.saving.test_module import compiled, everything, local, loss_of, model_of, sampler_of
from tests.support.residence import hosted

ROOT = Path(__file__).parent.parent.parent
Batch = Mapping[str, Any]


class Slow(torch.optim.AdamW):
    """Begins when somebody waits for it; whoever does not sees what was there before."""

    asked = threading.Event()

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.asked.wait(0.1)
        return super().step(closure)


@pytest.fixture
def lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Slow` is told who waits."""

    def told(method: Callable[..., Any], change: Callable[[], None]) -> Callable[..., Any]:
        def tells(*args: Any) -> Any:
            change()
            return method(*args)

        return tells

    monkeypatch.setattr(Updates, "begin", told(Updates.begin, Slow.asked.clear))
    monkeypatch.setattr(Updates, "finish", told(Updates.finish, Slow.asked.set))
    monkeypatch.setattr(Late, "arrived", told(Late.arrived, Slow.asked.set))


def drawn(name: str, seed: int) -> tuple[torch.nn.Module, Batch, Plan]:
    model, batch = model_of(name)
    plan = sampler_of(model, batch).draw(seed)
    assert hosted(plan.residence)
    return model, batch, plan


def on_host(name: str, one: DeviceMesh) -> tuple[autopar.ParallelModule, Batch]:
    model, batch = model_of(name)
    return compiled(model, batch, one, everything(sampler_of(model, batch), "host")), batch


def state_of(parallel: autopar.ParallelModule, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for parameter in parallel.parameters():
        yield local(parameter.detach()).clone()
        for _, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield local(value).clone() if isinstance(value, Tensor) else torch.tensor(value)


# --- the same bits ---------------------------------------------------------------------------------------------------

Loop = Callable[[autopar.ParallelModule, Streamed, Batch], Iterator[Tensor]]


def plain_loop(parallel: autopar.ParallelModule, optimizer: Streamed, batch: Batch) -> Iterator[Tensor]:
    for _ in range(5):
        loss = loss_of(parallel(**batch))
        loss.backward()
        yield loss.detach()
        optimizer.step()
        optimizer.zero_grad()


def scheduled(parallel: autopar.ParallelModule, optimizer: Streamed, batch: Batch) -> Iterator[Tensor]:
    """The rate changes as soon as the step has begun."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(5):
        loss = loss_of(parallel(**batch))
        loss.backward()
        yield loss.detach()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=False)


def clipped(parallel: autopar.ParallelModule, optimizer: Streamed, batch: Batch) -> Iterator[Tensor]:
    for _ in range(5):
        loss = loss_of(parallel(**batch))
        loss.backward()
        yield local(torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.01))
        optimizer.step()
        parallel.zero_grad()


def accumulated(parallel: autopar.ParallelModule, optimizer: Streamed, batch: Batch) -> Iterator[Tensor]:
    """Several backwards to a step, and gradients that nobody clears: the next ones are added to them."""
    for step in range(4):
        for _ in range(3):
            loss = loss_of(parallel(**batch))
            (loss / 3).backward()
            yield loss.detach()
        optimizer.step()
        if step % 2:
            optimizer.zero_grad()
    for parameter in parallel.parameters():
        if parameter.grad is not None:
            yield local(parameter.grad).clone()


def looked_at(parallel: autopar.ParallelModule, optimizer: Streamed, batch: Batch) -> Iterator[Tensor]:
    """Everything that a loop may do behind its step, while updates are under way."""
    parameters = list(parallel.parameters())
    average = [local(parameter.detach()).clone() for parameter in parameters]
    for _ in range(3):
        loss_of(parallel(**batch)).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average, reversed(parameters), strict=True):
                yield mean.view(-1)[:1].lerp(local(parameter).view(-1)[:1], 0.1)
            yield sum(local(parameter.norm()) for parameter in parameters)
        optimizer.step()
        yield from (local(parameter.grad).clone() for parameter in parameters if parameter.grad is not None)
        optimizer.step()
        with torch.no_grad():
            yield loss_of(parallel(**batch))
        optimizer.step()
        buffer = io.BytesIO()
        torch.save({name: local(value) for name, value in parallel.state_dict().items()}, buffer)
        buffer.seek(0)
        yield from torch.load(buffer).values()
        optimizer.step()
        for _, states in sorted(optimizer.state_dict()["state"].items()):
            yield from (local(value).clone() for value in states.values())
        optimizer.step()
        yield from (local(copy.deepcopy(parameter)) for parameter in parameters)
        optimizer.step()
        parallel.load_state_dict({name: 0.5 * local(value) for name, value in parallel.state_dict().items()})
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        loss = loss_of(parallel(**batch)) + sum(local(parameter.square().sum()) for parameter in parameters)
        loss.backward()
        yield loss.detach()
        optimizer.step()
        yield local(optimizer.state[parameters[0]]["exp_avg"]).clone()
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=["loop", "fused", "foreach"])
@pytest.mark.parametrize("loop", [plain_loop, scheduled, clipped, accumulated, looked_at])
def test_training_gives_the_same_bits_as_with_updates_that_are_waited_for(
    one: DeviceMesh, lazily: None, loop: Loop, options: dict[str, Any]
) -> None:
    for name, seed in (("mlp", 0), ("block", 3)):
        model, batch, plan = drawn(name, seed)
        told: list[list[Tensor]] = []
        for overlap in (False, True):
            torch.manual_seed(5)
            parallel = compiled(model, batch, one, plan)
            made = (Slow if overlap else torch.optim.AdamW)(parallel.parameters(), 1e-2, **options)
            optimizer = Streamed(made, parallel, overlap=overlap)
            told.append([*loop(parallel, optimizer, batch), *state_of(parallel, optimizer)])
        waited, overlapped = told
        assert len(waited) == len(overlapped) and all(map(torch.equal, overlapped, waited)), name


ELEMENTWISE = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_optimizers_that_take_one_number_at_a_time_may_be_wrapped(one: DeviceMesh, kind: str) -> None:
    """With their states, or none."""
    make = getattr(torch.optim, kind)
    model, batch, plan = drawn("mlp", 1)
    told: list[list[Tensor]] = []
    for overlap in (False, True):
        parallel = compiled(model, batch, one, plan)
        optimizer = Streamed(make(parallel.parameters(), lr=1e-2), parallel, overlap=overlap)
        told.append([*plain_loop(parallel, optimizer, batch), *state_of(parallel, optimizer)])
    assert len(told[0]) == len(told[1]) and all(map(torch.equal, *told))


def test_a_rate_that_is_a_tensor_counts_as_it_was(one: DeviceMesh, lazily: None) -> None:
    parallel, batch = on_host("mlp", one)
    twin, _ = on_host("mlp", one)
    for module, make, overlap in ((parallel, Slow, True), (twin, torch.optim.AdamW, False)):
        optimizer = Streamed(make(module.parameters(), lr=torch.tensor(1e-2)), module, overlap=overlap)
        loss_of(module(**batch)).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"].fill_(7.0)
    for ours, theirs in zip(parallel.parameters(), twin.parameters(), strict=True):
        assert local(ours.detach()).equal(local(theirs.detach()))


# --- the end ---------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import autopar, torch
from autopar.optim import Streamed
from tests.saving.test_module import compiled, everything, local, loss_of, model_of, sampler_of
from tests.saving.test_updates import Slow

class Tells(Slow):
    def step(self, closure=None):
        super().step(closure)
        print("updated", flush=True)

model, batch = model_of("mlp")
parallel = compiled(model, batch, autopar.init_mesh("cpu", data=1), everything(sampler_of(model, batch), "host"))
optimizer = Streamed(Tells(parallel.parameters(), 1e-2), parallel, overlap=True)
loss_of(parallel(**batch)).backward()
print("begins", flush=True)
optimizer.step()
print("of", len(list(parallel.parameters())), flush=True)
"""


def test_a_program_that_ends_makes_its_updates_first() -> None:
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in unset} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    told = made.stdout.partition("begins")[2].split("\n")
    (count,) = (int(line.split()[1]) for line in told if line.startswith("of "))
    assert told.count("updated") == count > 2, made.stdout + made.stderr
