"""Updates of parameters on the host beside the next forward: the bits of those that are waited for, whoever looks."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar._compat import TorchDispatchMode
from autopar.attach.late import Late
from autopar.attach.updates import Updates
from autopar.optim import Streamed
from autopar.plan import Plan
from autopar.simulate.steady_state import read_order
from tests.saving.test_module import compiled, everything, local, loss_of, model_of, sampler_of
from tests.support.moves import FETCH
from tests.support.residence import hosted

ROOT = Path(__file__).parent.parent.parent
FAR = 30.0  # seconds: nothing takes as long but what hangs
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


class Gated(torch.optim.AdamW):
    """Once closed, updates one parameter for each time that somebody opens the gate."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gate, self.updated, self.is_closed = threading.Semaphore(0), list[int](), False

    def step(self, closure: Any = None) -> Any:
        if self.is_closed:
            assert self.gate.acquire(timeout=FAR)
            self.updated.append(1)
        return super().step(closure)


class Failing(torch.optim.AdamW):
    """Fails at its third update from when it is told to."""

    left = 10**9

    def step(self, closure: Any = None) -> Any:
        type(self).left -= 1
        if type(self).left < 0:
            raise ArithmeticError("the third one")
        return super().step(closure)


class Counting(torch.optim.AdamW):
    """Keeps something in its groups, which are no parameter's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def drawn(name: str, seed: int) -> tuple[torch.nn.Module, Batch, Plan]:
    model, batch = model_of(name)
    plan = sampler_of(model, batch).draw(seed)
    assert hosted(plan.residence)
    return model, batch, plan


def on_host(name: str, one: DeviceMesh) -> tuple[autopar.ParallelModule, Batch]:
    model, batch = model_of(name)
    return compiled(model, batch, one, everything(sampler_of(model, batch), "host")), batch


def gated(parallel: autopar.ParallelModule, batch: Batch) -> tuple[Streamed, Gated]:
    """An optimizer that has begun its step, and the one below it, whose gate is closed."""
    optimizer = Streamed(inner := Gated(parallel.parameters(), 1e-2), parallel, overlap=True)
    inner.is_closed = True
    loss_of(parallel(**batch)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer, inner


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


# --- one after the other ---------------------------------------------------------------------------------------------


class Opens(TorchDispatchMode):
    """Lets one more parameter be updated whenever the program fetches one."""

    def __init__(self, gate: threading.Semaphore) -> None:
        super().__init__()
        self.gate, self.fetched = gate, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is FETCH and isinstance(args[0], Late):
            self.fetched += 1
            self.gate.release()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("prefetch", [None, 1])
def test_the_forward_waits_for_each_parameter_alone(one: DeviceMesh, prefetch: int | None) -> None:
    """If a fetch waited for more than its own update, nobody would open the gate for that one."""
    model, batch = model_of("block")
    plan = replace(everything(sampler_of(model, batch), "host"), prefetch=prefetch)
    parallel = compiled(model, batch, one, plan)
    _, inner = gated(parallel, batch)
    with Opens(inner.gate) as opens:
        loss = loss_of(parallel(**batch))
    assert opens.fetched == len(inner.updated) == len(read_order(plan))
    loss.backward()


def test_nothing_waits_for_shapes(one: DeviceMesh) -> None:
    parallel, batch = on_host("mlp", one)
    optimizer, inner = gated(parallel, batch)
    for parameter in parallel.parameters():
        assert parameter.shape.numel() and parameter.requires_grad and parameter.device.type == "cpu"
        assert isinstance(parameter.detach().to_local(), Late) and parameter.grad is None
    assert not inner.updated
    inner.gate.release(len(list(parallel.parameters())))
    optimizer.state_dict()
    for parameter in parallel.parameters():
        assert type(parameter.detach().to_local()) is Tensor


def test_gradients_go_as_their_parameters_are_updated(one: DeviceMesh) -> None:
    """Those that were cleared: the next forward has their memory."""
    parallel, batch = on_host("mlp", one)
    optimizer, inner = gated(parallel, batch)
    pending = parallel._autopar.updates._pending
    assert all(update.tensors[1] is None for update in pending)
    inner.gate.release(len(pending))
    optimizer.state_dict()


# --- errors ----------------------------------------------------------------------------------------------------------


def failed(one: DeviceMesh) -> tuple[autopar.ParallelModule, Batch, Streamed, list[Tensor]]:
    """A module whose updates fail at the third parameter, and what its parameters were."""
    parallel, batch = on_host("mlp", one)
    Failing.left = 10**9
    optimizer = Streamed(Failing(parallel.parameters(), 1e-2), parallel, overlap=True)
    loss_of(parallel(**batch)).backward()
    optimizer.step()
    optimizer.state_dict()
    before = [local(parallel.get_parameter(name).detach()).clone() for name in read_order(parallel.plan)]
    Failing.left = 2
    optimizer.step()
    return parallel, batch, optimizer, before


@pytest.mark.parametrize("where", ["forward", "step", "state_dict", "parameter", "backward"])
def test_an_error_of_the_thread_reaches_who_comes_next(one: DeviceMesh, where: str) -> None:
    """As it was raised, once; parameters behind it are as they were, and training can go on."""
    parallel, batch, optimizer, before = failed(one)
    names = read_order(parallel.plan)
    with pytest.raises(ArithmeticError, match="the third one") as told:
        match where:
            case "forward":
                parallel(**batch)
            case "step":
                optimizer.step()
            case "state_dict":
                parallel.state_dict()
            case "parameter":
                parallel.get_parameter(names[-1]).sum()
            case "backward":
                parallel._autopar.main.runner.updates.finish()
    assert any(entry.name == "step" and "test_updates" in str(entry.path) for entry in told.traceback)
    now = [local(parallel.get_parameter(name).detach()) for name in names]
    assert [torch.equal(*pair) for pair in zip(now, before, strict=True)] == [n >= 2 for n in range(len(names))]
    Failing.left = 10**9
    optimizer.step()
    optimizer.zero_grad()
    loss_of(parallel(**batch)).backward()
    for name, was in zip(names, before, strict=True):
        assert not local(parallel.get_parameter(name).detach()).equal(was), name


@pytest.mark.parametrize("is_new", [False, True])
def test_an_optimizer_that_keeps_count_in_its_groups_is_refused(one: DeviceMesh, is_new: bool) -> None:
    parallel, batch = on_host("mlp", one)
    optimizer = Streamed(Counting(parallel.parameters(), 1e-2), parallel, overlap=True)
    optimizer.param_groups[0]["count"] = 0
    if is_new:
        del optimizer.param_groups[0]["count"]
    loss_of(parallel(**batch)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"Counting changes 'count' of its param_groups .* use overlap=False"):
        parallel(**batch)


class Normed(torch.optim.SGD):
    """Scales each gradient by its norm."""

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.data.sub_(1e-3 * parameter.grad / parameter.grad.norm())


@pytest.mark.parametrize("make", [torch.optim.Adafactor, Normed], ids=["Adafactor", "Normed"])
def test_an_optimizer_that_looks_at_whole_parameters_is_refused(one: DeviceMesh, make: Any) -> None:
    parallel, _ = on_host("mlp", one)
    with pytest.raises(ValueError, match=r"does not update a piece of a parameter as it .* use overlap=False"):
        Streamed(make(parallel.parameters(), 1e-3), parallel, overlap=True)


def test_compiled_code_is_refused(one: DeviceMesh) -> None:
    parallel, _ = on_host("mlp", one)
    parallel._autopar.backend = "inductor"
    with pytest.raises(ValueError, match=r"overlap=True needs code .* backend 'inductor' .* backend='eager'"):
        Streamed(torch.optim.AdamW(parallel.parameters()), parallel, overlap=True)


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
