"""Lists, dicts, objects and tensors that several attributes hold: one state for several blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.support.meters import Meter


class State:
    def __init__(self) -> None:
        self.n, self.hidden, self.inner, self.log = 0, torch.zeros(4), Meter(), list[Tensor]()


class Holder:
    def __init__(self, state: State) -> None:
        self.state = state


class Block(nn.Module):
    def __init__(self, held: Any, way: str) -> None:
        super().__init__()
        self.layer, self.held, self.way = nn.Linear(4, 4), held, way

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        held = self.held.state if self.way == "holder" else self.held
        if self.way == "dict":
            held["n"] = held.get("n", 0) + 1
            return hidden * (1 + 0.1 * held["n"])
        if self.way == "list":
            held[0] += 1
            return hidden * (1 + 0.1 * held[0])
        if self.way == "tensor":
            held.mul_(0.5).add_(hidden.detach().mean(0))
            return hidden + held
        if self.way == "part":
            held.update(hidden.square().mean().item(), len(x))
            return hidden + held.mean
        held.n += 1
        hidden = hidden * (1 + 0.1 * held.n) + held.hidden
        held.hidden = hidden.detach().mean(0)
        held.log.append(hidden.detach().sum())
        return hidden


class Shares(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        state = State()
        self.way = way
        self.held: Any = {"dict": {}, "list": [0], "tensor": state.hidden}.get(way, state)
        given = {"part": state.inner, "holder": Holder(state)}.get(way, self.held)
        self.blocks = nn.ModuleList(Block(given, way) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.held, State):
            self.held.log.clear()
        for block in self.blocks:
            x = block(x)
        if self.way == "tensor":
            x = x + self.held
        if isinstance(self.held, State):
            self.held.n += 1
            x = x * (1 + 0.01 * self.held.n) + self.held.inner.mean
        return x.square().mean(), x


WAYS = ("dict", "list", "tensor", "part", "object", "holder")


def _told(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [*map(_told, value)]
    return {name: _told(part) for name, part in vars(value).items()} if hasattr(value, "__dict__") else value


def _same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, (list, dict)):
        assert len(found) == len(wanted)
        for key in wanted if isinstance(wanted, dict) else range(len(wanted)):
            _same(found[key], wanted[key])
    else:
        assert found == (pytest.approx(wanted, rel=1e-4, abs=1e-6) if isinstance(wanted, float) else wanted)


@pytest.mark.parametrize("way", WAYS)
def test_several_attributes_hold_one_state(way: str, one: DeviceMesh) -> None:
    """In odd calls a gradient comes for the output beside the loss, for which the step is planned again."""
    torch.manual_seed(0)
    plain = Shares(way)
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    models = (plain, parallel)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for call in range(6):
        told: list[Any] = []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(call)
            loss, hidden = model(torch.randn(3, 4))
            (loss + hidden.sum() if call % 2 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append([loss.item(), _told(model.held), [_told(block.held) for block in model.blocks]])
        _same(told[1], told[0])
    held = parallel.blocks[0].held
    assert parallel.blocks[1].held is held
    of_all = {"part": lambda: parallel.held.inner, "holder": lambda: parallel.blocks[0].held}
    assert held is of_all.get(way, lambda: parallel.held)()


@pytest.mark.filterwarnings("ignore:the model is traced and planned for the 4th time")
def test_one_of_the_names_may_become_another_object(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Shares("object")
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    for call in range(6):
        losses: list[float] = []
        for model in (plain, parallel):
            if call == 3:
                model.blocks[1].held = State()
            torch.manual_seed(call)
            losses.append(model(torch.randn(3, 4))[0].item())
        assert losses[1] == pytest.approx(losses[0])
    assert (parallel.held.n, parallel.blocks[1].held.n) == (plain.held.n, plain.blocks[1].held.n) == (15, 3)


class Overlaps(nn.Module):
    """Of two lists each has what the other has not; the second time one has an object twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        state = State()
        self.layer, self.one = nn.Linear(4, 4), [state, state] if twice else [state, 1]
        self.other = [State() if twice else state, 2]

    def forward(self, x: Tensor) -> Tensor:
        self.one[0].n += 1
        return self.layer(x).mean() * self.one[0].n * self.other[0].n


@pytest.mark.parametrize("twice", [False, True])
def test_states_that_overlap_are_refused(twice: bool, one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match="forward changes n of an object of class State"):
        autopar.compile(Overlaps(twice), one)(torch.randn(3, 4))
