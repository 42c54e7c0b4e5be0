"""Updates of parameters on the host, one after the other: who waits for which, and what becomes of their errors."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar._compat import TorchDispatchMode
from autopar.attach.late import Late
from autopar.optim import Streamed
from autopar.simulate.steady_state import read_order
from tests.saving.test_module import compiled, everything, local, loss_of, model_of, sampler_of
from tests.saving.test_updates import Batch, on_host
from tests.support.moves import FETCH

FAR = 30.0  # seconds: nothing takes as long but what hangs


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


def gated(parallel: autopar.ParallelModule, batch: Batch) -> tuple[Streamed, Gated]:
    """An optimizer that has begun its step, and the one below it, whose gate is closed."""
    optimizer = Streamed(inner := Gated(parallel.parameters(), 1e-2), parallel, overlap=True)
    inner.is_closed = True
    loss_of(parallel(**batch)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer, inner


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
    assert any(entry.name == "step" and "test_late_updates" in str(entry.path) for entry in told.traceback)
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
