"""Ways, places and sizes that forward takes from Python's and numpy's own generators: each has a program of its own."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from tests.attach.test_drawn_in_branches import CALLS, ROWS, WIDTH, Layers, trained_alike
from tests.processes.compare import same_gradients


def of_functions(model: Layers, x: Tensor) -> Tensor:
    return random.choice([torch.tanh, torch.sigmoid, functional.gelu])(x)


def of_modules(model: Layers, x: Tensor) -> Tensor:
    for layer in random.sample(list(model.layers), 2):
        x = layer(x).tanh()
    return random.choices(model.layers, weights=[1, 2, 3])[0](x)


def in_some_order(model: Layers, x: Tensor) -> Tensor:
    order = [*model.layers]
    random.shuffle(order)
    for layer in order:
        x = layer(x).tanh()
    return x


def shuffled_rows(model: Layers, x: Tensor) -> Tensor:
    rows = list(range(len(x)))
    random.shuffle(rows)
    return x + 0.5 * x[rows]


def cropped(model: Layers, x: Tensor) -> Tensor:
    here = random.randint(0, 2)
    return x[:, here : here + 2].repeat(1, 2)


def cut_and_mixed(model: Layers, x: Tensor) -> Tensor:
    first, last = sorted([random.randrange(WIDTH), random.randrange(WIDTH)])
    x = x.clone()
    x[:, first:last] = x.flip(0)[:, first:last]
    return x


def so_many_layers(model: Layers, x: Tensor) -> Tensor:
    for layer in model.layers[: random.randrange(1, 4)]:
        x = layer(x)
    for _ in range(np.random.poisson(1.0)):
        x = model.layers[0](x)
    return x


def of_so_many_numbers(model: Layers, x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.rand(np.random.randint(1, 5))).sum()


def arrays_of_so_many(model: Layers, x: Tensor) -> Tensor:
    count = random.randint(1, 3)
    for layer, place in zip(model.layers[:count], np.random.permutation(count), strict=True):
        x = layer(x) * float(place + 1)
    return x


def of_those_that_are_drawn(model: Layers, x: Tensor) -> Tensor:
    kept = set(random.sample(range(3), random.randint(1, 3)))
    for place, layer in enumerate(model.layers):
        if place in kept:
            x = layer(x)
    return x


def cropped_to_a_size(model: Layers, x: Tensor) -> Tensor:
    size = random.choice([2, 3])
    here = random.randint(0, WIDTH - size)
    return x[:, here : here + size].sum(1, keepdim=True) + x


def scaled_by_one_of_several(model: Layers, x: Tensor) -> Tensor:
    scaled = functional.interpolate(x[None], scale_factor=random.choice([0.5, 1.0, 2.0]))[0]
    return scaled[:, :2].repeat(1, 2)


def by_whole_numbers(model: Layers, x: Tensor) -> Tensor:
    quotient, rest = divmod(random.uniform(-9, 9), 2.5)
    part = float(random.randint(0, 1)) or 2.0
    return x * math.floor(random.random() * 5) + quotient * part - rest * math.ceil(np.random.rand() * 3)


def written_at_a_place(model: Layers, x: Tensor) -> Tensor:
    here, there = random.randrange(3), torch.zeros(len(x), dtype=torch.bool)
    x = x.clone()
    x[:, here], x[-here - 1] = 0.0, x[0] * 2
    there[random.randrange(len(x))] = True
    x[here, here] = 2.0
    return x * there[:, None] + 0.1


def until_it_fits(model: Layers, x: Tensor) -> Tensor:
    drawn = random.gauss(0, 1)
    while abs(drawn) > 0.8:
        drawn = random.gauss(0, 1)
    return x * drawn


def between_two(model: Layers, x: Tensor) -> Tensor:
    if 0.2 < random.random() < 0.6:
        x = x * random.random()
    return x


def either(model: Layers, x: Tensor) -> Tensor:
    if (model.training and random.random() < 0.5) or np.random.rand() < 0.3:
        x = x * 2
    return x


def nothing_ahead(model: Layers, x: Tensor) -> Tensor:
    """As diffusion models condition on what they predicted."""
    before = None
    if random.random() < 0.5:
        with torch.no_grad():
            before = model.layers[1](x)
    return model.layers[2](x + (torch.zeros_like(x) if before is None else before))


def by_arrays(model: Layers, x: Tensor) -> Tensor:
    first, second = np.random.choice(3, 2, replace=False)
    return model.layers[first](x) + model.layers[int(second)](x).tanh()


def of_math(model: Layers, x: Tensor) -> Tensor:
    part = math.sqrt(random.random()) + math.atan2(np.random.rand(), 0.5)
    return x * part - math.log(random.random()) * math.cos(random.random() * 3)


def of_a_generator(model: Layers, x: Tensor) -> Tensor:
    def parts() -> Iterator[float]:
        for _ in range(3):
            yield random.random()

    for part, layer in zip(parts(), model.layers, strict=True):
        x = layer(x) * part
    return x


FORMS = [
    of_so_many_numbers,
    of_functions, of_modules, in_some_order, shuffled_rows, cropped, cut_and_mixed, so_many_layers,
    arrays_of_so_many, of_those_that_are_drawn, cropped_to_a_size, scaled_by_one_of_several, by_whole_numbers,
    written_at_a_place, until_it_fits, between_two, either, nothing_ahead, by_arrays, of_math, of_a_generator,
]  # fmt: skip
OF_ONE = (shuffled_rows, between_two, of_math, of_a_generator, written_at_a_place)  # which leave all open


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.filterwarnings("ignore:the model is traced and planned for the")
def test_the_same_numbers_as_in_the_plain_model_and_behind_it(one: DeviceMesh, form: Callable[..., Tensor]) -> None:
    parallel = trained_alike(one, form, evaluates=-1)
    assert (len(parallel._autopar.prepared()) == 1) == (form in OF_ONE)


def test_a_program_serves_all_calls_that_draw_alike(one: DeviceMesh) -> None:
    parallel = autopar.compile(Layers(of_functions), one)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(3 * CALLS):
            random.seed(number)
            parallel(torch.randn(ROWS, WIDTH))
    assert len(parallel._autopar.prepared()) == 3
    assert any("forward goes on by what it draws outside of torch at " in note for note in parallel.plan.notes)


def test_many_are_told_of(one: DeviceMesh) -> None:
    parallel = autopar.compile(Layers(in_some_order), one)
    with pytest.warns(UserWarning, match="what forward goes on by is another number that Python or numpy draws"):
        for number in range(CALLS):
            random.seed(number)
            parallel(torch.randn(ROWS, WIDTH))


def test_what_is_not_defined_is_told_of_as_python_does(one: DeviceMesh) -> None:
    def of_the_root(model: Layers, x: Tensor) -> Tensor:
        return x * math.sqrt(random.random() - 0.5)

    parallel = autopar.compile(Layers(of_the_root), one)
    random.seed(0)
    parallel(torch.randn(ROWS, WIDTH))  # draws 0.84
    with pytest.raises(autopar.CheckFailed, match=r"gives math\.sqrt a number at .*test_drawn_known\.py:\d+"):
        while True:
            parallel(torch.randn(ROWS, WIDTH))


class Deep(nn.Module):
    """Gradients come to outputs beside the loss, for which the call is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers[: random.randrange(1, 4)]:
            x = layer(x) * random.random()
        return x.square().mean(), x


def test_backward_runs_a_call_again_that_goes_the_way_that_it_went(one: DeviceMesh) -> None:
    plain = Deep().double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for number in range(4):
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
        for model in (plain, parallel):
            model.zero_grad()
            random.seed(number)
            loss, beside = model(x)
            random.seed(100)
            (loss + beside.tanh().sum()).backward()
        same_gradients(parallel, plain)
