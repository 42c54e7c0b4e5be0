"""What a program was traced with may change between calls: another program runs then, with the numbers of torch."""

import argparse
import copy
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers import GPT2Config

import autopar
from tests.processes.compare import near, same_gradients

SCALE = 2.0


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.0)
        self.beta, self.settings, self.listed = 0.5, types.SimpleNamespace(k=2.0), [1.0, 2.0]
        self.array, self.loose = np.full(8, 0.5, dtype=np.float32), torch.full((8,), 0.5)
        self.register_buffer("held", torch.full((8,), 0.5))

    def hidden(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        made = self.drop(self.hidden(x)) * self.beta * self.settings.k * self.listed[1] * SCALE
        return (made * torch.from_numpy(self.array) * self.loose * self.held * torch.ones(8)).square().mean()


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def _set(module: Any, name: str, value: Any) -> None:
    setattr(module, name, value)


def _scaled(module: nn.Module) -> None:
    with torch.no_grad():
        module.a.weight.mul_(2)


def _seeded(module: nn.Module) -> None:
    torch.manual_seed(3)
    module.a = nn.Linear(8, 8)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda m: _set(m, "beta", 0.7),
    "a configuration": lambda m: _set(m.settings, "k", 3.0),
    "an entry of a list": lambda m: m.listed.__setitem__(1, 5.0),
    "an entry of an array": lambda m: m.array.__setitem__(1, 5.0),
    "a tensor in place": lambda m: m.loose.mul_(3),
    "another tensor": lambda m: _set(m, "loose", torch.full((8,), 0.7)),
    "a buffer in place": lambda m: m.held.mul_(3),
    "another buffer": lambda m: _set(m, "held", torch.full((8,), 0.7)),
    "a parameter in place": _scaled,
    "another parameter": lambda m: _set(m.a, "weight", nn.Parameter(torch.eye(8) * 2)),
    "a tied parameter": lambda m: _set(m.a, "weight", m.b.weight),
    "another module": _seeded,
    "a module around one": lambda m: _set(m, "a", nn.Sequential(m.a, nn.Tanh())),
    "dropout of everything": lambda m: _set(m.drop, "p", 1.0),
    "a parametrization": lambda m: parametrize.register_parametrization(m.a, "weight", Symmetric()),
    "a frozen parameter": lambda m: m.a.weight.requires_grad_(False),
    "evaluation of a part": lambda m: m.drop.eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_calls_means_what_it_means_in_torch(one: DeviceMesh, change: Callable[[Any], object]) -> None:
    plain, x = Base(), torch.randn(4, 8)
    parallel = autopar.compile(plain, one)
    _compare(plain, parallel, x)
    change(plain), change(parallel)
    _compare(plain, parallel, x)


def _compare(plain: nn.Module, parallel: nn.Module, *inputs: Any) -> None:
    plain.zero_grad(), parallel.zero_grad()
    wanted, ours = plain(*inputs), parallel(*inputs)
    near(ours.detach(), wanted.detach(), 1e-5, "loss")
    wanted.backward(), ours.backward()
    same_gradients(plain, parallel)


def test_a_global_number_and_the_default_dtype_are_read_again(one: DeviceMesh) -> None:
    global SCALE
    plain, x = Base(), torch.randn(4, 8)
    parallel = autopar.compile(plain, one)
    _compare(plain, parallel, x)
    try:
        SCALE = 3.0
        _compare(plain, parallel, x)
        torch.set_default_dtype(torch.float64)
        _compare(plain, parallel, x)
    finally:
        SCALE = 2.0
        torch.set_default_dtype(torch.float32)


def test_a_variable_of_an_enclosing_function_is_read_again(one: DeviceMesh) -> None:
    scale = 2.0

    class Closed(Base):
        def forward(self, x: Tensor) -> Tensor:
            return (self.hidden(x) * scale).square().mean()

    plain, x = Closed(), torch.randn(4, 8)
    parallel = autopar.compile(plain, one)
    _compare(plain, parallel, x)
    scale = 5.0
    _compare(plain, parallel, x)


def test_a_parameter_that_is_thawed_trains(one: DeviceMesh) -> None:
    plain, x = Base(), torch.randn(4, 8)
    plain.a.requires_grad_(False)
    parallel = autopar.compile(plain, one)
    _compare(plain, parallel, x)
    assert parallel.a.weight.grad is None
    plain.a.requires_grad_(True), parallel.a.requires_grad_(True)
    _compare(plain, parallel, x)
    assert parallel.a.weight.grad is not None


def test_what_is_as_it_was_before_has_its_program_still(one: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel, x = autopar.compile(Base(), one), torch.randn(4, 8)
    for beta in (0.5, 0.7):
        parallel.beta = beta
        parallel(x)
    monkeypatch.setattr("autopar.attach.programs.capture", None)
    for beta in (0.5, 0.7, 0.5):
        parallel.beta = beta
        parallel(x)


def test_hooks_of_the_whole_module_run_and_those_of_parameters_go_with_them(one: DeviceMesh) -> None:
    plain, x, seen = Base(), torch.randn(4, 8), list[str]()
    plain.a.weight.register_hook(lambda gradient: gradient * 2)
    parallel = autopar.compile(plain, one)
    handle = parallel.b.weight.register_hook(lambda gradient: gradient * 0)
    plain_handle = plain.b.weight.register_hook(lambda gradient: gradient * 0)
    parallel.b.bias.register_post_accumulate_grad_hook(lambda _: seen.append("made"))
    parallel.register_forward_hook(lambda *_: seen.append("called"))
    _compare(plain, parallel, x)
    assert seen == ["called", "made"]
    handle.remove(), plain_handle.remove()
    _compare(plain, parallel, x)


def test_another_forward_runs_in_the_place_of_a_submodules_but_not_of_the_plan(one: DeviceMesh) -> None:
    plain, x = Base(), torch.randn(4, 8)
    parallel = autopar.compile(plain, one)
    _compare(plain, parallel, x)
    for model in (plain, parallel):
        layer = model.a
        layer.forward = types.MethodType(lambda self, v: functional.linear(v, self.weight) * 2, layer)
    plain.a.bias.grad = parallel.a.bias.grad = None
    _compare(plain, parallel, x)
    with pytest.raises(RuntimeError, match="another forward on a parallel module"):
        parallel.forward = plain.forward


class Loss(Base):
    def forward(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Any:
        made = self.hidden(x)
        return functional.cross_entropy(made, y) * weight, made


def test_gradients_through_every_output_arrive(one: DeviceMesh) -> None:
    """Beside a loss nobody reads the others as a rule; where somebody does, no term is lost, from the first step on."""
    plain, x, y, other = Loss(), torch.randn(4, 8), torch.randint(0, 8, (4,)), torch.randn(4, 8)
    parallel = autopar.compile(plain, one)
    for _ in range(3):
        plain.zero_grad(), parallel.zero_grad()
        for model in (plain, parallel):
            loss, made = model(x, y)
            (loss + (made - other).square().mean()).backward()
        same_gradients(plain, parallel)
    plain.zero_grad(), parallel.zero_grad()
    plain(x, y)[0].backward(), parallel(x, y)[0].backward()
    same_gradients(plain, parallel)


def test_other_shapes_and_numbers_are_calls_like_others(one: DeviceMesh) -> None:
    plain, x, y = Loss(), torch.randn(12, 8), torch.randint(0, 8, (12,))
    parallel = autopar.compile(plain, one)
    for rows, weight in ((12, 1.0), (5, 1.0), (12, 0.5), (12, 0.25), (7, 0.125), (12, 1.0)):
        plain.zero_grad(), parallel.zero_grad()
        wanted, ours = plain(x[:rows], y[:rows], weight)[0], parallel(x[:rows], y[:rows], weight)[0]
        near(ours.detach(), wanted.detach(), 1e-5, "loss")
        wanted.backward(), ours.backward()
        same_gradients(plain, parallel)
    programs = sum(map(len, parallel._autopar.programs.values()))
    for weight in (0.3, 0.2, 0.1):
        parallel(x, y, weight)
    assert sum(map(len, parallel._autopar.programs.values())) == programs, "a number that varies is a tensor"


def test_a_change_between_forward_and_backward_is_refused(one: DeviceMesh) -> None:
    parallel = autopar.compile(Base(), one)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    parallel(torch.randn(4, 8)).backward()
    loss = parallel(torch.randn(4, 8))
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        loss.backward()


class Keeping(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.a(x).square().mean()
        return self.hidden(x).square().mean()


def test_a_loss_that_forward_keeps_as_an_attribute_is_there_with_its_gradient(one: DeviceMesh) -> None:
    plain, x = Keeping(), torch.randn(4, 8)
    parallel = autopar.compile(plain, one)
    for _ in range(2):
        plain.zero_grad(), parallel.zero_grad()
        for model in (plain, parallel):
            loss = model(x)
            (loss + 0.1 * model.aux).backward()
        near(parallel.aux.detach(), plain.aux.detach(), 1e-5, "aux")
        same_gradients(plain, parallel)


def test_a_value_that_changes_at_every_step_is_right_and_told_of(one: DeviceMesh) -> None:
    plain = Base()
    parallel = autopar.compile(plain, one)
    x = torch.randn(4, 8)
    with pytest.warns(UserWarning, match="planned for the 4th time .*beta was 0.2 and is 0.3.* argument of forward"):
        for step in range(5):
            plain.beta = parallel.beta = 0.1 * step + 0.0
            near(parallel(x), plain(x), 1e-6, f"loss of step {step}")


class Configured(Base):
    """Reads numbers of its configuration, one by another name, and one of what the configuration holds."""

    def __init__(self) -> None:
        super().__init__()
        self.config = GPT2Config(n_layer=1, n_embd=8)
        self.config.part = GPT2Config(n_inner=3)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.config.hidden_size * self.config.initializer_range + self.config.part.n_inner
        return (self.hidden(x) * scale).square().mean()


def test_of_a_configuration_what_forward_reads_counts(one: DeviceMesh) -> None:
    plain = Configured()
    parallel = autopar.compile(plain, one)
    x = torch.randn(4, 8)
    parallel(x)
    parallel.config.dtype, parallel.config.part.n_layer, parallel.config.n_head = torch.float16, 9, 4
    near(parallel(x), plain(x), 1e-6, "loss")
    assert len(parallel._autopar.prepared()) == 1
    for number, change in enumerate(("n_embd", "part")):
        for model in (plain, parallel):
            if change == "part":
                model.config.part.n_inner = 5
            else:
                model.config.n_embd = 3
        near(parallel(x), plain(x), 1e-6, change)
        assert len(parallel._autopar.prepared()) == number + 2


class Settings:
    rate, table, sizes = 1.0, {"k": 1.0}, [1]

    def __init__(self) -> None:
        self.own = 1.0


class Shared:
    rate, table = 1.0, {"k": 1.0}


SPACE, LOOSE = argparse.Namespace(rate=1.0), types.SimpleNamespace(rate=1.0)


class Kept(nn.Module):
    """Numbers kept wherever scripts keep them."""

    scale, table = 1.0, {"k": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.more = nn.Linear(4, 1), nn.Sequential()
        self.settings, self.chosen, self.listed, self.paired = Settings(), Shared, [Settings()], (Settings(),)

    def forward(self, x: Tensor) -> Tensor:
        settings, first, second = self.settings, self.listed[0], self.paired[0]
        factors = (
            self.scale, self.table["k"], settings.rate, settings.table["k"], len(settings.sizes), settings.own,
            self.chosen.rate, Shared.table["k"], first.own, second.own, SPACE.rate, LOOSE.rate,
        )  # fmt: skip
        return self.more(self.inner(x)).sum() * math.prod(factors)


OF_ONE: dict[str, Callable[[Any], object]] = {
    "of the class of the model, set on it": lambda m: _set(m, "scale", 3.0),
    "of the class of settings, set on them": lambda m: _set(m.settings, "rate", 2.0),
    "of settings": lambda m: _set(m.settings, "own", 2.0),
    "of settings in a list": lambda m: _set(m.listed[0], "own", 2.0),
    "of settings in a tuple": lambda m: _set(m.paired[0], "own", 2.0),
    "a part that is added": lambda m: m.more.append(nn.Tanh()),
}
OF_ALL: dict[str, Callable[[], object]] = {
    "in a table of the class of the model": lambda: Kept.table.__setitem__("k", 2.0),
    "in a table of the class of settings": lambda: Settings.table.__setitem__("k", 2.0),
    "in a list of the class of settings": lambda: Settings.sizes.append(1),
    "of a class that is held": lambda: _set(Shared, "rate", 2.0),
    "in a table of a global class": lambda: Shared.table.__setitem__("k", 2.0),
    "of a global namespace": lambda: _set(SPACE, "rate", 2.0),
    "of another global namespace": lambda: _set(LOOSE, "rate", 2.0),
}


@pytest.mark.parametrize("name", [*OF_ONE, *OF_ALL])
def test_settings_are_seen_wherever_they_are_kept(one: DeviceMesh, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, keys in ((Kept, ["table"]), (Settings, ["table", "sizes"]), (Shared, ["rate", "table"])):
        for key in keys:
            monkeypatch.setattr(owner, key, copy.copy(getattr(owner, key)))
    monkeypatch.setattr(SPACE, "rate", 1.0), monkeypatch.setattr(LOOSE, "rate", 1.0)
    plain = Kept()
    parallel, x = autopar.compile(plain, one), torch.randn(2, 4)
    near(parallel(x), plain(x), 1e-6, "the loss before")
    if name in OF_ALL:
        OF_ALL[name]()
    else:
        OF_ONE[name](plain), OF_ONE[name](parallel)
    for _ in range(2):
        near(parallel(x), plain(x), 1e-6, name)
    assert len(parallel._autopar.prepared()) == 2
