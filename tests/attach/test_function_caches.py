"""Functions that keep what they have given (`functools.lru_cache`): masks and tables that forward asks for."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.compare import near, same_gradients

ROOT = 2.0


@functools.cache
def causal(length: int, *, below: float = float("-inf")) -> Tensor:
    return torch.full((length, length), below).triu(1)


@functools.lru_cache(maxsize=2)
def drawn(length: int) -> Tensor:
    """Once, for good."""
    return torch.randn(length, length)


def scaled_by(factor: float) -> Callable[[int], Tensor]:
    @functools.cache
    def table(length: int) -> Tensor:
        return torch.arange(length).sin() * factor * ROOT

    return table


class Attention(nn.Module):
    def __init__(self, bias: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).chunk(3, -1)
        return ((q @ k.mT + self.bias(x.shape[1])).softmax(-1) @ v).square().mean()


class OfMethod(Attention):
    @functools.lru_cache  # noqa: B019
    def own(self, length: int) -> Tensor:
        return causal(length) * self.scale

    def __init__(self) -> None:
        super().__init__(self.own)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).chunk(3, -1)
        return ((q @ k.mT + self.own(x.shape[1]).nan_to_num(0.0, 0.0, -3.0)).softmax(-1) @ v).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a mask": lambda: Attention(causal),
    "drawn": lambda: Attention(drawn),
    "a closure": lambda: Attention(scaled_by(0.7)),
    "a method": OfMethod,
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_kept_is_what_the_model_itself_would_have_left(one: DeviceMesh, name: str) -> None:
    causal.cache_clear(), drawn.cache_clear()
    plain = MODELS[name]()
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    for length in (4, 6, 4):
        x = torch.randn(2, length, 8)
        found = parallel(x)  # the first that asks
        near(found, plain(x), 1e-6, "loss")
        for model in (plain, parallel):
            model.zero_grad()
        found.backward(), plain(x).backward()
        same_gradients(plain, parallel)
    parallel.eval(), plain.eval()
    with torch.no_grad():
        near(parallel(x), plain(x), 1e-6, "evaluated")
    assert type(causal(4)) is type(drawn(4)) is Tensor
    assert len(parallel._autopar.prepared()) == 3  # no call makes a program anew


def test_two_models_ask_for_one_mask(one: DeviceMesh) -> None:
    causal.cache_clear()
    student, teacher = Attention(causal), Attention(causal)
    x = torch.randn(2, 5, 8)
    found = [autopar.compile(copy.deepcopy(model), one)(x) for model in (student, teacher)]
    for one_found, model in zip(found, (student, teacher), strict=True):
        near(one_found, model(x), 1e-6, "loss")


class Traced(nn.Module):
    """Keeps what hangs on values, which nobody can compute ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept = functools.cache(lambda held: held * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(self.linear(x)).square().mean()


def test_nothing_of_a_trace_stays(one: DeviceMesh) -> None:
    plain = Traced()
    parallel = autopar.compile(plain, one)
    x = torch.randn(4, 8)
    near(parallel(x), plain(x), 1e-6, "loss")
    assert plain.kept.cache_info().currsize == 1
