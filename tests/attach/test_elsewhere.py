"""What a model holds, and the script too: one object for both; the rest is the parallel module's own."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.attach.elsewhere import held_elsewhere
from tests.support.meters import Meter


class Told(nn.Module):
    """Reads and writes what it is given, and what is its own."""

    def __init__(self, meter: Meter, settings: Any, log: list[Tensor], memory: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.meter, self.settings, self.log, self.memory = meter, settings, log, memory
        self.first = memory[:2]
        self.own, self.parts, self.tied = Meter(), [self.layer], {"weight": self.layer.weight.data}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x) * self.settings.scale + self.memory + self.first.sum() + self.tied["weight"].mean()
        loss = hidden.square().mean()
        self.meter.update(loss.item(), len(x))
        self.own.update(loss.item(), len(x))
        self.log.append(loss.detach())
        return loss


def _told(compiled: Callable[[nn.Module], Any]) -> tuple[Any, Any, Any, list[float]]:
    """A script that holds all that it gives, and sets it; the model, the parallel one, what it sees and its losses."""
    torch.manual_seed(0)
    meter, settings, log, memory = Meter(), types.SimpleNamespace(scale=2.0), list[Tensor](), torch.randn(4)
    plain = Told(meter, settings, log, memory)
    model = compiled(plain)
    told, losses = meter.update, list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in range(6):
        if call == 2:
            settings.scale = 0.5
        if call == 3:
            memory.mul_(3)
        if call == 4:
            meter.reset()
            log.clear()
        loss = model(torch.randn(3, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        told(1.0)
    return plain, model, (vars(meter), [one.item() for one in log]), losses


@pytest.mark.filterwarnings("ignore:the model is traced and planned for the 4th time")
def test_what_the_script_holds_too_is_the_same_object(one: DeviceMesh) -> None:
    _, _, told, losses = _told(lambda model: model)
    plain, parallel, parallel_told, parallel_losses = _told(lambda model: autopar.compile(model, one))
    assert parallel_losses == pytest.approx(losses)
    assert parallel_told[0] == pytest.approx(told[0])
    assert parallel_told[1] == pytest.approx(told[1])
    assert parallel.settings is plain.settings
    assert parallel.own is not plain.own  # that is the model's alone, which did not run
    assert (plain.own.count, parallel.own.count) == (0, 18)
    assert parallel.parts[0] is parallel.layer


class Holds(nn.Module):
    a: Any
    outer: Any
    memory: Any
    meter: Any

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("rows", torch.randn(3))
        for name, value in held.items():
            setattr(self, name, value)


def _shared(model: nn.Module) -> list[Any]:
    registered = {id(one) for one in (*model.parameters(), *model.buffers())}
    return [one for one in held_elsewhere(model, registered).values() if one != ()]  # of which Python has one


def _looking_at(held: Any) -> Callable[[], Any]:
    return lambda: held


def test_what_the_model_alone_holds_is_not_shared() -> None:
    memory = torch.randn(4)
    model = Holds(a=[1], b={"c": ([2],)}, meter=Meter(), memory=memory, view=memory[1:], call=partial(dict, n=[3]))
    vars(model)["again"] = model.meter
    vars(model)["function"] = _looking_at(model.a)
    del memory  # torch holds it, too, of which there is a view
    assert _shared(model) == []


def test_what_leads_to_a_shared_object_may_be_copied_and_what_it_leads_to_may_not() -> None:
    inner: Any = {"n": [1]}
    model: Any = Holds(outer=[inner], direct=inner["n"])
    shared = _shared(model)
    assert any(one is inner for one in shared)
    assert any(one is inner["n"] for one in shared)
    assert not any(one is model.outer for one in shared)
    made: Any = autopar.compile(model, autopar.init_mesh("cpu"))
    assert made.outer is not model.outer
    assert made.outer[0] is inner
    assert made.direct is inner["n"]


def test_what_looks_at_the_model_looks_at_the_parallel_one(one: DeviceMesh) -> None:
    parts, looks = list[Any](), dict[str, Any]()
    model = Holds(parts=parts, looks=looks)
    parts.append(model.layer)
    looks.update(weight=model.layer.weight.data, row=model.rows[:1], call=model.layer.forward, head=lambda: model.layer)
    assert not any(one is parts or one is looks for one in _shared(model))
    made: Any = autopar.compile(model, one)
    assert made.parts[0] is made.looks["head"]() is made.layer


def test_tensors_of_one_memory_are_shared_together(one: DeviceMesh) -> None:
    memory = torch.randn(4)
    made: Any = autopar.compile(Holds(memory=memory, first=memory[:1]), one)
    memory[0] = 7.0
    assert made.memory is memory
    assert made.first.item() == 7.0
