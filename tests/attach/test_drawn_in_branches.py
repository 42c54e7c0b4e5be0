"""What forward draws where it hangs on earlier draws whether it does, or behind a seed that it sets itself."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from tests.processes.compare import same_gradients
from tests.support.stepping import penalise_alike, train_alike

CALLS, ROWS, WIDTH = 8, 6, 4


class Layers(nn.Module):
    def __init__(self, form: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.form(self, x)).square().mean()


def mix(x: Tensor) -> tuple[Tensor, Tensor, float]:
    part, order = np.random.beta(0.4, 0.4), torch.from_numpy(np.random.permutation(len(x)))
    return part * x + (1 - part) * x[order], order, part


def mixed_at_times(model: Layers, x: Tensor) -> Tensor:
    if model.training and random.random() < 0.5:
        x, _, _ = mix(x)
    return x


def one_or_the_other(model: Layers, x: Tensor) -> Tensor:
    if random.random() < 0.5:
        x = x * np.random.rand()
    else:
        x = x + np.random.randn() * random.random()
        x = x * np.random.rand()
    return x


def one_in_another(model: Layers, x: Tensor) -> Tensor:
    if random.random() < 0.7:
        part = np.random.rand()
        if part < 0.5:
            x = x * (part + np.random.rand())
        else:
            x = x - np.random.rand()
            x = x * random.random()
    return x


def at_each_layer(model: Layers, x: Tensor) -> Tensor:
    for layer in model.layers:
        if random.random() < 0.4:
            continue
        x = layer(x) + np.random.rand()
    return x


def at_one_of_them(model: Layers, x: Tensor) -> Tensor:
    here = random.randint(0, 2)
    for place, layer in enumerate(model.layers):
        if place == here:
            x, _, _ = mix(x)
        x = layer(x)
    return x


def in_a_chain(model: Layers, x: Tensor) -> Tensor:
    drawn = random.random()
    if drawn < 0.3:
        x = x * np.random.rand()
    elif drawn < 0.6:
        x = x + random.uniform(-1, 1)
    else:
        x = x - random.expovariate(1.0)
    return x


def in_a_condition(model: Layers, x: Tensor) -> Tensor:
    if model.training and random.random() < 0.8 and np.random.rand() < 0.8:
        x = x * 2 * random.random()
    return x


def as_one_of_two_values(model: Layers, x: Tensor) -> Tensor:
    return x + random.gauss(0, 1) if random.random() < 0.5 else x


def as_a_number_behind_it(model: Layers, x: Tensor) -> Tensor:
    part = 1.0
    if random.random() < 0.5:
        part = np.random.beta(1.0, 1.0)
    return x * part


def ended_early(model: Layers, x: Tensor) -> Tensor:
    if random.random() < 0.5:
        return x * random.random()
    return x + np.random.rand()


def several_numbers(model: Layers, x: Tensor) -> Tensor:
    if random.random() < 0.5:
        scale, shift = random.sample(range(10), 2)
        x = x * scale + shift
    return x


def seeds_pythons(model: Layers, x: Tensor) -> Tensor:
    random.seed(len(x))
    first = random.random()
    random.seed(5)
    return x * first * random.random()


def seeds_behind_a_draw(model: Layers, x: Tensor) -> Tensor:
    part = float(np.random.beta(0.4, 0.4))
    np.random.seed(5)
    return x * part * torch.from_numpy(np.random.rand(WIDTH))


def only_seeds(model: Layers, x: Tensor) -> Tensor:
    np.random.seed(5)
    random.seed(6)
    return x


FORMS = [
    mixed_at_times, one_or_the_other, one_in_another, at_each_layer, at_one_of_them, in_a_chain, in_a_condition,
    as_one_of_two_values, as_a_number_behind_it, ended_early, several_numbers, seeds_pythons, seeds_behind_a_draw,
    only_seeds,
]  # fmt: skip


def trained_alike(one: DeviceMesh, form: Callable[..., Tensor], evaluates: int) -> Any:
    """The parallel model, behind calls with other seeds that give what the plain one does, and leave the generators so.
    `evaluates`: which of the calls is in eval mode.
    """
    torch.manual_seed(0)
    plain = Layers(form).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for number in range(CALLS):
        x, found = torch.randn(ROWS, WIDTH, dtype=torch.float64), []
        for model in (plain, parallel):
            model.train(number != evaluates).zero_grad()
            random.seed(number), np.random.seed(number)
            loss = model(x)
            loss.backward()
            found.append((loss.detach(), (random.random(), float(np.random.rand()))))
        torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-12, atol=0.0)
        assert found[1][1] == found[0][1]
        same_gradients(parallel, plain)
    return parallel


def behind_what_is_hidden(model: Layers, x: Tensor) -> Tensor:
    hidden = model.layers[0](x)
    if hidden.mean() > 0:
        hidden = hidden * 2
    return hidden * random.random()


def by_a_helper_behind_rows(model: Layers, x: Tensor) -> Tensor:
    out, rows = torch.zeros_like(x), x[:, 0] > 0
    if rows.any():
        out[rows] = model.layers[1](x[rows])
    return out * chance_of(2.0) + model.layers[0](x)


def chance_of(most: float) -> float:
    return random.uniform(1.0, most) if random.random() < 0.5 else 0.5


@pytest.mark.parametrize("form", [behind_what_is_hidden, by_a_helper_behind_rows], ids=lambda form: form.__name__)
def test_a_draw_behind_a_branch_by_values_is_seen(one: DeviceMesh, form: Callable[..., Tensor]) -> None:
    trained_alike(one, form, evaluates=5)


def residual(model: Layers, x: Tensor) -> Tensor:
    for layer in model.layers:
        if random.random() < 0.5:
            continue
        x = x + layer(functional.layer_norm(x, x.shape[-1:])).tanh()
    return x


def test_layers_that_are_skipped_by_chance_in_micro_batches(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Layers(residual).double()
    parallel = autopar.compile(copy.deepcopy(plain), one, micro_batches=2)
    train_alike(plain, parallel, [torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in range(CALLS)])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_same_numbers_as_in_the_plain_model_and_behind_it(one: DeviceMesh, form: Callable[..., Tensor]) -> None:
    trained_alike(one, form, evaluates=5)


def test_the_first_call_of_a_kind_behind_a_call_that_has_set_the_seed(one: DeviceMesh) -> None:
    """The generators stand then where forward leaves them, as if it drew nothing."""
    torch.manual_seed(0)
    plain = Layers(seeds_behind_a_draw).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    found = []
    for model in (plain, parallel):
        np.random.seed(1)
        model(torch.ones(ROWS, WIDTH, dtype=torch.float64))
        losses = []
        for number in range(3):
            losses.append((float(model(torch.ones(ROWS - 1, WIDTH, dtype=torch.float64)).detach()), np.random.rand()))
            np.random.seed(100 + number)
        found.append(losses)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0.0)
    assert found[0][0][0] != found[0][1][0]


def test_what_torch_draws_and_nobody_reads_is_drawn_without_gradients_too(one: DeviceMesh) -> None:
    def skipped(model: Layers, x: Tensor) -> Tensor:
        drawn = torch.rand([])
        return x * 0 if model.training and drawn < 0.5 else x

    plain = Layers(skipped)
    parallel, behind = autopar.compile(copy.deepcopy(plain), one), []
    for model in (plain, parallel):
        torch.manual_seed(1)
        with torch.no_grad():
            model.eval()(torch.randn(ROWS, WIDTH))
        behind.append(torch.rand(3))
    assert torch.equal(behind[0], behind[1])


def by_a_draw(model: Layers, x: Tensor) -> Tensor:
    return model.layers[1](x).tanh() + x if random.random() < 0.5 else x.sin()


def by_what_is_hidden(model: Layers, x: Tensor) -> Tensor:
    hidden = model.layers[1](x)
    if hidden[0, 0] > 0:
        hidden = hidden + model.layers[2](hidden).tanh()
    return hidden.sin()


def in_both(model: Layers, x: Tensor) -> Tensor:
    hidden = model.layers[1](x).sin()
    if random.random() < 0.6:
        hidden = hidden * 2
        if hidden[0, 0] > 0:
            hidden = hidden * model.layers[2](hidden)
    return hidden.sin()


@pytest.mark.parametrize("form", [by_a_draw, by_what_is_hidden, in_both], ids=lambda form: form.__name__)
def test_a_layer_of_a_branch_that_is_not_taken_has_no_second_gradient_either(
    one: DeviceMesh, form: Callable[..., Tensor]
) -> None:
    torch.manual_seed(0)
    plain = Layers(form).double()
    parallel, idle = autopar.compile(copy.deepcopy(plain), one), set[bool]()
    for number in range(CALLS):
        penalise_alike(plain, parallel, [torch.randn(ROWS, WIDTH, dtype=torch.float64)], number)
        idle |= {parameter.grad is None for parameter in plain.parameters()}
    assert idle == {False, True}
