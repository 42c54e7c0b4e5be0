"""What forward draws from Python's and numpy's own generators is drawn anew in each call, as without autopar."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import TraceError
from tests.processes.compare import near, same_gradients

CALLS, ROWS, WIDTH = 5, 4, 6


class Layer(nn.Module):
    def __init__(self, form: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.form, self.chance, self.depth = form, 0.5, 3

    def kept(self) -> list[bool]:
        return [random.random() > self.chance for _ in range(self.depth)]

    def _pick(self, count: int) -> np.ndarray:
        rows = np.zeros(count, dtype=np.int32)
        for place in range(count):
            rows[place] = np.random.permutation(WIDTH)[0]
        return rows

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x).square().mean()


def spans(shape: tuple[int, int], chance: float, least: int = 1) -> np.ndarray:
    """As SpecAugment masks spans: loops over rows, of which each has as many as are drawn."""
    mask = np.zeros(shape, dtype=bool)
    for row in mask:
        count = max(int(chance * shape[1] + np.random.rand()), least)
        row[np.random.choice(shape[1], count, replace=False)] = True
    return mask


def scaled(layer: Layer, x: Tensor) -> Tensor:
    return layer.first(x * random.random() + uniform(-1, 1))


def mixed(layer: Layer, x: Tensor) -> Tensor:
    part, order = np.random.beta(0.4, 0.4), np.random.permutation(len(x))
    part = max(part, 1 - part)
    return layer.first(part * x + (1 - part) * x[order])


def masked(layer: Layer, x: Tensor) -> Tensor:
    hidden = layer.first(x)
    hidden[torch.from_numpy(spans((len(x), WIDTH), chance=0.3))] = 0.0
    return layer.second(hidden)


def skips(layer: Layer, x: Tensor) -> Tensor:
    hidden = layer.first(x)
    for _ in range(3):
        if layer.training and random.uniform(0, 1) < layer.chance:
            continue
        hidden = hidden + layer.second(hidden).tanh()
    return hidden


def in_a_method(layer: Layer, x: Tensor) -> Tensor:
    hidden = layer.first(x)
    for is_kept in layer.kept():
        if is_kept:
            hidden = hidden + layer.second(hidden).tanh()
    return hidden


def seeds_itself(layer: Layer, x: Tensor) -> Tensor:
    np.random.seed(3)
    order = np.stack([layer._pick(4)[:2] for _ in range(2)], axis=0)
    return layer.first(x)[:, torch.tensor(order, dtype=torch.long)]


def of_arrays(layer: Layer, x: Tensor) -> Tensor:
    noise = np.random.normal(0, 0.1, size=tuple(x.shape)).astype(np.float32)
    noise = np.clip(noise * 2 + 1, 0.9, 1.1)
    return layer.first(x * torch.from_numpy(noise) + torch.as_tensor(np.random.randn(WIDTH), dtype=x.dtype))


def one_normal_number(layer: Layer, x: Tensor) -> Tensor:
    scale = torch.from_numpy(np.ones(WIDTH) * random.random())
    return layer.first(x * np.random.randn() + np.sqrt(1 - np.random.beta(1.0, 1.0))) * scale


def of_an_array_that_is_written_to_later(layer: Layer, x: Tensor) -> Tensor:
    order = np.arange(float(WIDTH))
    drawn = np.random.permutation(order)
    order[:] = 0
    return layer.first(x * torch.from_numpy(drawn))


FORMS = {
    form.__name__: form
    for form in (
        scaled, mixed, masked, skips, in_a_method, seeds_itself, of_arrays, one_normal_number,
        of_an_array_that_is_written_to_later,
    )
}  # fmt: skip


def _seed() -> None:
    random.seed(1)
    np.random.seed(1)


def _trained(model: nn.Module, batches: list[Tensor]) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
    found = []
    for x in batches:
        model.zero_grad()
        loss = model(x)
        loss.backward()
        gradients = {name: None if one.grad is None else one.grad.clone() for name, one in model.named_parameters()}
        found.append((loss.detach(), gradients))
    return found


@pytest.mark.parametrize("name", FORMS)
def test_the_same_numbers_as_in_the_plain_model(one: DeviceMesh, name: str) -> None:
    plain = Layer(FORMS[name]).double()
    parallel, batches = autopar.compile(copy.deepcopy(plain), one), [*torch.randn(CALLS, ROWS, WIDTH).double()]
    _seed()
    wanted, after = _trained(plain, batches), (random.random(), np.random.rand())
    _seed()
    found, now = _trained(parallel, batches), (random.random(), np.random.rand())
    assert now == after, "generators go on as behind the plain model"
    assert name == "seeds_itself" or len({float(loss) for loss, _ in wanted}) == CALLS
    for (loss, gradients), (other, others) in zip(wanted, found, strict=True):
        near(other, loss, 1e-12, "loss", 1e-12)
        for key, gradient in gradients.items():
            assert (gradient is None) == (others[key] is None), key
            if gradient is not None:
                near(others[key], gradient, 1e-10, key, 1e-12)


def test_one_program_serves_all_draws_and_a_trace_draws_nothing(
    one: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel, x = autopar.compile(Layer(mixed), one), torch.randn(ROWS, WIDTH)
    _seed()
    first = parallel(x).detach()
    monkeypatch.setattr("autopar.attach.programs.capture", None)
    others = [parallel(x).detach() for _ in range(3)]
    _seed()
    again = [parallel(x).detach() for _ in range(4)]
    assert torch.equal(torch.stack([first, *others]), torch.stack(again))


def test_backward_runs_a_call_again_with_what_it_drew(one: DeviceMesh) -> None:
    class Pair(Layer):
        def forward(self, x: Tensor) -> Any:
            hidden = self.first(x * random.random())
            return hidden.square().mean(), self.second(hidden)

    plain = Pair(scaled).double()
    parallel, x = autopar.compile(copy.deepcopy(plain), one), torch.randn(ROWS, WIDTH).double()
    for model in (plain, parallel):
        _seed()
        loss, hidden = model(x)
        random.random()
        (loss + hidden.square().sum()).backward()  # of an output beside the loss, which was not expected
    same_gradients(plain, parallel)


def test_evaluation_draws_nothing_that_it_does_not_ask_for(one: DeviceMesh) -> None:
    plain = Layer(skips).double().eval()
    parallel, x = autopar.compile(copy.deepcopy(plain), one), torch.randn(ROWS, WIDTH).double()
    _seed()
    with torch.no_grad():
        near(parallel(x), plain(x), 1e-12, "loss", 1e-12)
    now = random.random()
    _seed()
    assert now == random.random()


def spans_within(shape: tuple[int, int], lengths: Tensor | None = None) -> np.ndarray:
    """As SpecAugment masks within padded sequences."""
    mask, scale = np.zeros(shape, dtype=bool), np.random.rand(1).item()
    for row, length in zip(mask, lengths.tolist() if lengths is not None else [shape[1]] * shape[0], strict=True):
        row[np.random.choice(length, int(0.5 * length + scale), replace=False)] = True
    return mask


class Padded(Layer):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.first(x)
        lengths = padding.clone()
        lengths[:, 0] = 1
        hidden[torch.from_numpy(spans_within((len(x), WIDTH), lengths=lengths.sum(-1)))] = 0.0
        return self.second(hidden).square().mean()


def test_a_function_that_draws_may_be_given_what_is_made_of_arguments(one: DeviceMesh) -> None:
    plain = Padded(masked).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for seed in range(CALLS):
        x, padding = torch.randn(ROWS, WIDTH).double(), torch.randint(0, 2, (ROWS, WIDTH))
        for model in (plain, parallel):
            _seed()
            np.random.seed(seed)
            model.zero_grad()
            model(x, padding).backward()
        same_gradients(plain, parallel)
    assert sum(map(len, parallel._autopar.programs.values())) == 1


def of_a_module(layer: Layer) -> np.ndarray:
    return np.random.rand(int(layer.depth)) * layer.chance


class Varying(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).square().mean() * torch.from_numpy(of_a_module(self)).mean()


def test_a_function_that_draws_sees_the_module_as_it_is(one: DeviceMesh) -> None:
    plain = Varying(masked).double()
    parallel, x = autopar.compile(copy.deepcopy(plain), one), torch.randn(ROWS, WIDTH).double()
    for depth, chance in ((3, 0.5), (3, 0.7), (5, 0.7)):
        _seed()
        plain.depth, plain.chance = parallel.depth, parallel.chance = depth, chance
        wanted = plain(x)
        _seed()
        near(parallel(x), wanted, 1e-12, "loss", 1e-12)


def of_a_length_that_nobody_sees() -> np.ndarray:
    return np.random.rand(len(Path(__file__).name) + len(os.environ.get("LONGER_DRAWS", "")))


class Longer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).mean() + torch.from_numpy(of_a_length_that_nobody_sees()).mean()


def test_draws_of_another_shape_are_told_or_another_program(one: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Longer(masked).double()
    parallel, x = autopar.compile(copy.deepcopy(plain), one), torch.randn(ROWS, WIDTH).double()
    for text in ("", "longer"):
        monkeypatch.setenv("LONGER_DRAWS", text)
        _seed()
        wanted = plain(x)
        _seed()
        near(parallel(x), wanted, 1e-12, "loss", 1e-12)


def as_many(lengths: Tensor) -> list[float]:
    return [random.random() for _ in range(int(lengths.max()))]


class AsMany(Layer):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        return self.first(x * as_many(lengths)[0]).mean()


def test_another_number_of_draws_is_refused(one: DeviceMesh) -> None:
    parallel, x = autopar.compile(AsMany(masked), one), torch.randn(ROWS, WIDTH)
    parallel(x, torch.tensor([2, 3]))
    with pytest.raises(TraceError, match="gives 4 numbers in this call, and gave 3 when it was traced"):
        parallel(x, torch.tensor([2, 4]))


FILE: list[Path] = []


def as_long_as_the_file_says() -> np.ndarray:
    return np.random.rand(int(FILE[-1].read_text()))


class FromFile(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).mean() + torch.from_numpy(as_long_as_the_file_says()).mean()


def test_draws_of_a_shape_that_nobody_foresees_are_refused(one: DeviceMesh, tmp_path: Path) -> None:
    FILE[:] = [tmp_path / "length"]
    FILE[0].write_text("3")
    parallel, x = autopar.compile(FromFile(masked), one), torch.randn(ROWS, WIDTH)
    parallel(x)
    FILE[0].write_text("4")
    with pytest.raises(TraceError, match=r"draws at .*test_drawn\.py:\d+ .* is float64\[4\] .* was float64\[3\]"):
        parallel(x)
