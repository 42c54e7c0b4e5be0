"""Forwards that ask whether two of their arguments are one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.compare import near, same_gradients


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.own(x) if context is None or context is x else self.cross(context)


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.inner(x, context).square().mean()


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.own(x) + context


@pytest.mark.parametrize("inputs", ["global", "local"])
def test_one_thing_under_two_names_is_refused_where_forward_asks(one: DeviceMesh, inputs: Any) -> None:
    plain = Net(Attention())
    parallel = autopar.compile(copy.deepcopy(plain), one, inputs=inputs)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for given in ((x, y), (x, x), (y, x), (y, y), (x, y)):
        near(parallel(*given), plain(*given), 1e-6, "loss")
    assert len(parallel._autopar.prepared()) == 2


def test_where_it_does_not_ask_it_is_as_two(one: DeviceMesh) -> None:
    plain = Net(Added())
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x = torch.randn(6, 4)
    for given in ((x, x), (x, x.clone())):
        near(parallel(*given), plain(*given), 1e-6, "loss")
    assert len(parallel._autopar.prepared()) == 1  # `model(ids, labels=ids)` has the plan of other labels


class Each(nn.Module):
    """Computes once with each of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)

    def forward(self, given: dict[str, Tensor], more: list[Tensor]) -> Tensor:
        each = {id(one): one for one in (*given.values(), *more)}
        doubled = 2 if given["x"] is more[0] and more[0] in set(more) else 3
        return sum(self.own(one).square().mean() for one in each.values()) * doubled


@pytest.mark.parametrize(
    "options", [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in ({"micro_batches": 2}, {"inputs": "local"}))]
)
def test_tensors_in_containers_are_one_where_they_are(one: DeviceMesh, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Each().double()
    parallel = autopar.compile(copy.deepcopy(plain), one, **options)
    for trains in (False, True):
        for order in ("xyxy", "xxxx", "xyyx", "xyxx"):
            losses, gradients = list[Tensor](), list[Any]()
            for model in (plain, parallel):
                torch.manual_seed(1)
                held = {name: torch.randn(6, 4).double().requires_grad_(trains) for name in "xy"}
                a, b, *rest = (held[name] for name in order)
                model.zero_grad()
                losses.append(model({"x": a, "y": b}, rest))
                losses[-1].backward()
                gradients.append([one.grad for one in held.values()])
            near(losses[1], losses[0], 1e-12, "loss")
            same_gradients(parallel, plain)
            for ours, wanted in zip(*gradients[::-1], strict=True):
                assert (ours is None) == (wanted is None)
                if wanted is not None:
                    near(ours, wanted, 1e-12, "gradient")
