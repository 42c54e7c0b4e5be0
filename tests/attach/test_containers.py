"""Containers of classes of the user's that give other things than they hold."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.trace.modules import with_tensors
from tests.processes.compare import near, same_gradients


class Doubled(list[float]):
    def __iter__(self) -> Iterator[float]:
        return (2.0 * one for one in list.__iter__(self))


class Raised(set[float]):
    def __iter__(self) -> Iterator[float]:
        return (one + 1.0 for one in set.__iter__(self))


class Halved(dict[str, float]):
    def items(self) -> Any:
        return {key: 0.5 * one for key, one in dict.items(self)}.items()


class Tripled(dict[str, float]):
    def __getitem__(self, key: str) -> float:
        return 3.0 * dict.__getitem__(self, key)


class Negated(list[float]):
    def __getitem__(self, place: Any) -> Any:
        return -list.__getitem__(self, place)


CONTAINERS = [Doubled([1.5, 3.0]), Negated([0.5, 1.5]), Raised([0.5, 3.0]), Halved(a=1.5, b=3.0), Tripled(a=0.7)]


class Weighted(nn.Module):
    def __init__(self, weights: Any) -> None:
        super().__init__()
        self.linear, self.weights = nn.Linear(8, 8), weights

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        told: Iterable[float] = self.weights
        if isinstance(self.weights, dict):
            told = [one for _, one in self.weights.items()]
            told += [self.weights[key] for key in self.weights]
        elif isinstance(self.weights, list):
            told = [*told, self.weights[0]]
        for weight in told:
            y = y * weight
        return y.square().sum()


@pytest.mark.parametrize("weights", CONTAINERS)
def test_forward_sees_what_it_sees_in_pytorch(weights: Any, one: DeviceMesh) -> None:
    torch.manual_seed(3)
    model, x = Weighted(weights), torch.randn(4, 8)
    plain = Weighted(weights)
    plain.load_state_dict(model.state_dict())
    parallel = autopar.compile(model, one)
    for _ in range(2):
        plain.zero_grad(), parallel.zero_grad()
        ours, theirs = parallel(x), plain(x)
        near(ours, theirs, 1e-6, type(weights).__name__)
        ours.backward(), theirs.backward()
        same_gradients(plain, parallel)


def test_a_copy_holds_copies_and_says_how_many() -> None:
    model, one = nn.Linear(2, 2), Doubled([1.0, 2.0])
    model.one, model.again = one, [one, model]
    made: Any = with_tensors(model, {})
    assert made.one is not one and type(made.one) is Doubled and made.again == [made.one, made]
    assert [*list.__iter__(made.one)] == [*list.__iter__(one)] == [1.0, 2.0]


def test_who_says_how_they_are_copied_is_copied_so() -> None:
    class Counted(Doubled):
        def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
            return Counted([*copy.deepcopy([*list.__iter__(self)], memo), 7.0])

    model = nn.Linear(2, 2)
    model.one = Counted([1.0])
    made: Any = with_tensors(model, {})
    assert [*list.__iter__(made.one)] == [1.0, 7.0]
