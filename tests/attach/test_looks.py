"""Tensors of a model that look at the memory of its parameters and buffers, and what users put on those."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("queue", torch.randn(6, 4))
        self.weight, self.first = self.layer.weight.data, self.queue[:2]
        self.others: dict[str, Any] = {
            "row": self.layer.weight.detach()[1],
            "all": [self.layer.bias.data, self.queue.t()],
        }

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.queue[1:] = self.queue[:-1].clone()
        self.queue[0] = h.detach()[0]
        of_queue = self.first.mean(0) + self.others["all"][1].mean(1)
        return (h + of_queue).square().mean() + self.weight.norm() + self.others["row"].sum()


def test_what_looks_at_a_parameter_or_a_buffer_is_what_that_is_now(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    given = Looks()
    torch.manual_seed(0)
    plain = Looks()  # (of a copy no tensor looks at its parameters)
    parallel: Any = autopar.compile(given, one)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, parallel)]
    for call in range(4):
        losses = list[Tensor]()
        for model, optimizer in zip((plain, parallel), optimizers, strict=True):
            torch.manual_seed(call)
            losses.append(model(torch.randn(3, 4)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        near(losses[1], losses[0], 1e-5, f"call {call}")


def of_one_memory(registered: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if registered:
        model.register_buffer("anchor", model[0].weight.data)
    else:
        model[1].weight.data = model[0].weight.data  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize("registered", [True, False])
def test_a_parameter_that_trains_has_its_memory_for_itself(registered: bool, one: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"0\.weight are two tensors in one memory .* tie them"):
        autopar.compile(of_one_memory(registered), one)
    frozen = of_one_memory(registered).requires_grad_(False)
    autopar.compile(frozen, one)(torch.randn(3, 4))


def test_no_tensor_has_the_memory_of_a_parameter_and_more(one: DeviceMesh) -> None:
    model = nn.Linear(4, 4, bias=False)
    both = torch.randn(2, 4, 4)
    model.weight, model.both = nn.Parameter(both[0]), both
    with pytest.raises(ValueError, match=r"self\.both has the memory of weight in it, .* clone\(\)"):
        autopar.compile(model, one)
    model.weight = nn.Parameter(both[0].clone())
    autopar.compile(model, one)(torch.randn(3, 4))


class TwoBuffers(nn.Module):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(4, 4), writes
        self.register_buffer("table", torch.randn(6, 4))
        self.register_buffer("part", self.table[:2])

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.table.mul_(0.9)
        return self.layer(x).mean() + self.part.sum()


def test_of_buffers_in_one_memory_none_is_written_to(one: DeviceMesh) -> None:
    x = torch.randn(3, 4)
    plain = TwoBuffers(writes=False)
    near(autopar.compile(copy.deepcopy(plain), one)(x), plain(x), 1e-5, "read alone")
    with pytest.raises(TraceError, match="forward writes to one of part and table, which were in one memory"):
        autopar.compile(TwoBuffers(writes=True), one)(x)


class Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.weight.scale = 2.0  # type: ignore[attr-defined]
        self.register_buffer("shift", torch.ones(4))
        self.shift.kind = "added"

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x) * getattr(self.layer.weight, "scale", 1.0)
        return (h + self.shift if getattr(self.shift, "kind", "") == "added" else h).square().mean()


def test_what_users_put_on_parameters_and_buffers_stays_there(one: DeviceMesh) -> None:
    plain, x = Noted(), torch.randn(3, 4)
    expected = plain(x)
    parallel: Any = autopar.compile(plain, one)
    assert parallel.layer.weight.scale == 2.0
    near(parallel(x), expected, 1e-5, "loss")
    groups = [getattr(one, "scale", None) for one in parallel.parameters()]
    assert groups == [2.0, None] and parallel.shift.kind == "added"
