"""What forward cannot have drawn ahead of each call is refused, with the line: never drawn once for all of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import TraceError
from tests.attach.test_drawn import ROWS, WIDTH, Layer, spans_within


def in_a_branch(layer: Layer, x: Tensor) -> Tensor:
    hidden = layer.first(x)
    if hidden.sum() > 0:
        hidden = hidden * random.random()
    return hidden


def without_a_seed(layer: Layer, x: Tensor) -> Tensor:
    return layer.first(x * np.random.default_rng().random())


def into_an_array(layer: Layer, x: Tensor) -> Tensor:
    noise = np.zeros(WIDTH)
    noise[:2] = np.random.rand(2) * float(x.shape[0])
    return layer.first(x + torch.from_numpy(noise))


def shuffled_by_numpy(layer: Layer, x: Tensor) -> Tensor:
    order = np.arange(WIDTH)
    np.random.shuffle(order)
    return layer.first(x[:, torch.from_numpy(order)])


def put_at_places(layer: Layer, x: Tensor) -> Tensor:
    mask = np.zeros(WIDTH)
    np.add.at(mask, np.random.randint(0, WIDTH, 2), 1.0)
    return layer.first(x * torch.from_numpy(mask))


def in_the_memory_of_a_tensor(layer: Layer, x: Tensor) -> Tensor:
    drawn = np.random.rand(WIDTH)
    torch.from_numpy(drawn).mul_(2)
    return layer.first(x * torch.from_numpy(drawn))


class Scales(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * random.random()


def in_a_backward(layer: Layer, x: Tensor) -> Tensor:
    return layer.first(Scales.apply(x.requires_grad_(False) + layer.first(x)))


def drawn_twice_from_a_state(layer: Layer, x: Tensor) -> Tensor:
    state = random.getstate()
    first = random.random()
    random.setstate(state)
    return layer.first(x * first * random.random())


def behind_what_is_hidden(layer: Layer, x: Tensor) -> Tensor:
    hidden = layer.first(x)
    if hidden.sum() > 0 and random.random() < 0.5:
        hidden = hidden * 2
    return hidden


def kept_as_it_is(layer: Layer, x: Tensor) -> Tensor:
    layer.noise = np.random.rand(3)
    return layer.first(x)


def reads_what_was_set(layer: Layer, x: Tensor) -> Tensor:
    layer.chance = 0.3 if layer.training else 0.0
    hidden = layer.first(x)
    for is_kept in layer.kept():
        if is_kept:
            hidden = hidden * 2
    return hidden


def logs(taken: list[float]) -> float:
    taken.append(1.0)
    return random.random()


def into_a_list(layer: Layer, x: Tensor) -> Tensor:
    taken: list[float] = []
    return layer.first(x * logs(taken) * len(taken))


RATE = [0.5]


def of_a_rate() -> np.ndarray:
    return np.random.rand(WIDTH) * RATE[0]


def of_a_global_that_is_put_back(layer: Layer, x: Tensor) -> Tensor:
    RATE[0] = 0.9
    drawn = of_a_rate()
    RATE[0] = 0.5
    return layer.first(x * torch.from_numpy(drawn))


def with_gradients() -> float:
    return random.random() * torch.is_grad_enabled()


def of_what_is_around(layer: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = with_gradients()
    return layer.first(x * (scale + 1))


def of_both() -> float:
    torch.rand(())
    return random.random()


def of_torchs_too(layer: Layer, x: Tensor) -> Tensor:
    return layer.first(x * of_both())


def small_numbers(layer: Layer, x: Tensor) -> Tensor:
    drawn = np.random.randint(0, 200, 2).astype(np.uint8)
    return layer.first(x * (drawn[0] + drawn[1]))


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (of_a_global_that_is_put_back, r"gives others ahead of forward than where forward calls it"),
        (of_what_is_around, r"test_not_drawn\.py:\d+ .*gives others ahead of forward"),
        (of_torchs_too, r"draws from Python's or numpy's generator and from torch's"),
        (small_numbers, r"takes a number of uint8 out of an array that numpy draws"),
        (shuffled_by_numpy, r"changes what it is given"),
        (put_at_places, r"changes what it is given"),
        (into_a_list, r"changes what it is given"),
        (in_the_memory_of_a_tensor, r"does something to an array that numpy draws at .*test_not_drawn\.py:\d+"),
        (in_a_backward, r"draws .* where no trace sees it \(in a torch\.autograd\.Function"),
        (drawn_twice_from_a_state, r"asks for the state .*test_not_drawn\.py:\d+"),
        (
            behind_what_is_hidden,
            r"draws a random number .*test_not_drawn\.py:\d+ .*where it hangs on values whether it does",
        ),
        (kept_as_it_is, r"keeps in self\.noise an array that numpy draws"),
        (reads_what_was_set, r"reads self\.chance, which forward sets ahead of it"),
        (in_a_branch, r"draws a random number .*test_not_drawn\.py:\d+ .*where it hangs on values whether it does"),
        (without_a_seed, r"draws from a generator that has no seed at .*test_not_drawn\.py:\d+"),
        (into_an_array, r"does something to an array that numpy draws at .*test_not_drawn\.py:\d+"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_drawn_ahead_is_refused_with_the_line(
    one: DeviceMesh, form: Callable[[Any, Tensor], Tensor], why: str
) -> None:
    with pytest.raises(TraceError, match=why):
        autopar.compile(Layer(form), one)(torch.randn(ROWS, WIDTH))


def given_hidden(layer: Layer, x: Tensor) -> Tensor:
    hidden = layer.first(x)
    return hidden * torch.from_numpy(spans_within((len(x), WIDTH), lengths=(hidden > 0).sum(-1)))


def test_it_may_not_be_given_what_is_hidden(one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"hangs on values of tensors"):
        autopar.compile(Layer(given_hidden), one)(torch.randn(ROWS, WIDTH))
