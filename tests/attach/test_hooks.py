"""Hooks that submodules run in forward are traced with it; what they leave outside of the model is there after each
call, as on one process.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near, same_gradients
from tests.support import keeping


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.relu(self.a(x)))
        hidden = self.b(hidden) + hidden
        return self.c(torch.tanh(hidden)).square().mean()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("recipe", keeping.RECIPES, ids=lambda recipe: recipe.__name__)
def test_hooks_do_what_they_do_on_one_process(
    one: DeviceMesh, recipe: Callable[[Any], keeping.Take], when: str
) -> None:
    keeping.FOUND.clear()
    plain = Net()
    model = copy.deepcopy(plain)
    wanted = recipe(plain)
    if when == "before":
        found = recipe(model)
        parallel = autopar.compile(model, one)
    else:
        parallel = autopar.compile(model, one)
        if recipe is not keeping.in_a_list_of_two:  # which has three programs, of four one is told
            parallel(torch.randn(5, 8))
        found = recipe(parallel)
    for step in range(4):
        x = torch.randn(5, 8)
        pairs: list[tuple[Tensor, list[Any]]] = []
        for one_of, take in ((parallel, found), (plain, wanted)):
            one_of.train(step != 2).zero_grad()
            loss = one_of(x)
            pairs.append((loss, [torch.as_tensor(part).detach().clone() for part in take()]))
            loss.backward()
        (ours, kept), (theirs, right) = pairs
        near(ours, theirs, 1e-6, "loss")
        assert len(kept) == len(right)
        for place, (part, other) in enumerate(zip(kept, right, strict=True)):
            near(part, other.to(part.dtype), 1e-5, f"step {step}, {place}")
        same_gradients(plain, parallel)
    more = {keeping.in_a_list_of_two: 2, keeping.in_an_ordered_table_that_is_emptied: 1}
    assert len(parallel._autopar.prepared()) <= 1 + more.get(recipe, 0) + (when == "after")


def test_a_hook_may_come_and_go(one: DeviceMesh) -> None:
    """Each state has a program, which is found again."""
    plain = Net()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    hooks = [lambda module, given, made: 0.5 * made, lambda module, given, made: made - 1]
    for which in (None, 0, None, 1, 0, 1):
        x = torch.randn(5, 8)
        handles = [one_of.a.register_forward_hook(hooks[which]) for one_of in (plain, parallel) if which is not None]
        near(parallel(x), plain(x), 1e-6, f"with hook {which}")
        for handle in handles:
            handle.remove()
    assert len(parallel._autopar.prepared()) == 3


def test_what_a_hook_reads_is_looked_at(one: DeviceMesh) -> None:
    plain, settings = Net(), {"scale": 0.5}
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for model in (plain, parallel):
        model.a.register_forward_hook(lambda module, given, made: settings["scale"] * made)
    for scale in (0.5, 0.25, 2.0):
        settings["scale"] = scale
        x = torch.randn(5, 8)
        near(parallel(x), plain(x), 1e-6, f"scale {scale}")


class InPlace(nn.Module):
    """What the norm gives is changed by what comes behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.norm(self.first(x)))
        return self.last(hidden.mean((2, 3)))


@pytest.mark.parametrize("is_number", [True, False])
def test_what_is_changed_behind_a_hook_is_as_it_is_in_torch(one: DeviceMesh, is_number: bool) -> None:
    """A hook that computes sees what a layer gives; one that keeps it has what became of that."""
    plain = InPlace()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    both: list[dict[str, Any]] = [{}, {}]
    for model, found in zip((parallel, plain), both, strict=True):
        for name in ("first", "norm", "act"):

            def hook(module: nn.Module, given: Any, made: Tensor, name: str = name, found: Any = found) -> None:
                found[name] = made.detach().mean() if is_number else made.detach()

            model.get_submodule(name).register_forward_hook(hook)
    for _ in range(2):
        x = torch.randn(2, 3, 6, 6)
        parallel(x), plain(x)
        for name, value in both[1].items():
            near(both[0][name], value, 1e-5, name, 1e-6)


def test_a_loss_of_features_reaches_the_weights(one: DeviceMesh) -> None:
    plain = Net()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    both: list[list[Tensor]] = [[], []]
    for model, found in zip((parallel, plain), both, strict=True):
        for layer in (model.a, model.b):
            layer.register_forward_hook(lambda module, given, made, found=found: found.append(made))
    for _ in range(3):
        x = torch.randn(5, 8)
        for model, found in zip((parallel, plain), both, strict=True):
            model.zero_grad()
            (model(x) + sum(one_of.square().mean() for one_of in found)).backward()
            found.clear()
        same_gradients(plain, parallel)


@pytest.mark.parametrize("outputs", ["auto", "loss"])
@pytest.mark.parametrize("stays", [True, False])
def test_a_loss_of_a_feature_has_its_gradient(one: DeviceMesh, outputs: Any, stays: bool) -> None:
    """Also where other outputs are left out, and where the hook is gone by the time of backward."""
    plain = Net()
    parallel = autopar.compile(copy.deepcopy(plain), one, outputs=outputs)
    for model in (parallel, plain):
        found: dict[str, Tensor] = {}
        for step in range(3):

            def hook(module: nn.Module, given: Any, made: Tensor, found: Any = found) -> None:
                found["b"] = made

            handle = model.b.register_forward_hook(hook)
            loss = model(torch.linspace(-1, 1, 40).view(5, 8) + step)
            if not stays or step < 2:
                handle.remove()
            (loss + 5 * found["b"].square().mean()).backward()
    same_gradients(plain, parallel)


@pytest.mark.parametrize("name", ["wide", "narrow", "mean"])
def test_a_loss_may_be_of_any_of_several_features(one: DeviceMesh, name: str) -> None:
    """One is a number with a gradient, as a loss is; new attributes of an object are old ones in the next trace."""
    plain = Net()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for model in (parallel, plain):
        found = types.SimpleNamespace(narrow=None)

        def hook(module: nn.Module, given: Any, made: Tensor, found: Any = found) -> None:
            found.wide, found.narrow, found.mean = made, made[:, :2], made.mean()

        model.b.register_forward_hook(hook)
        for step in range(2):
            model.zero_grad()
            model(torch.linspace(-1, 1, 40).view(5, 8) + step)
            (10 * getattr(found, name).square().mean()).backward()
    same_gradients(plain, parallel)


def average(model: Any) -> None:
    found: dict[str, Any] = {}

    def hook(module: nn.Module, given: Any, made: Tensor) -> None:
        found["mean"] = 0.9 * found.get("mean", 0.0) + made.detach().mean()

    model.b.register_forward_hook(hook)


def counter(model: Any) -> None:
    found = {"calls": 0}

    def hook(module: nn.Module, given: Any, made: Tensor) -> None:
        found["calls"] += 1

    model.b.register_forward_hook(hook)


def total(model: Any) -> None:
    found = {"sum": torch.zeros(8)}

    def hook(module: nn.Module, given: Any, made: Tensor) -> None:
        found["sum"] += made.detach().sum(0)

    model.b.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (average, "computes with what is in found as the last call has left it"),
        (counter, "forward changes found, which"),
        (total, "forward changes found, which"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_builds_on_the_last_call_is_refused(one: DeviceMesh, recipe: Callable[[Any], None], told: str) -> None:
    parallel = autopar.compile(Net(), one)
    recipe(parallel)
    with warnings.catch_warnings(), pytest.raises(TraceError, match=told):
        for _ in range(2):
            parallel(torch.randn(5, 8))


def in_a_set(model: Any) -> None:
    found: set[Tensor] = set()
    model.b.register_forward_hook(lambda module, given, made: found.add(made))


def in_slots(model: Any) -> None:
    class Slots:
        __slots__ = ("made",)

    found = Slots()
    model.b.register_forward_hook(lambda module, given, made: setattr(found, "made", made))


def a_parameter(model: Any) -> None:
    found: dict[str, Tensor] = {}
    model.b.register_forward_hook(lambda module, given, made: found.update(weight=module.weight))


def a_gradient(model: Any) -> None:
    model.b.register_forward_hook(lambda module, given, made: made.retain_grad())


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (in_a_set, "forward changes found, which"),
        (in_slots, "keeps a tensor where a compiled step cannot write to|forward changes what is in an object of"),
        (a_parameter, "keeps a parameter or a buffer in found, .* take it from its module"),
        (a_gradient, "has a tensor retain its gradient at .*test_hooks"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_no_call_could_leave_is_refused(one: DeviceMesh, recipe: Callable[[Any], None], told: str) -> None:
    parallel = autopar.compile(Net(), one)
    recipe(parallel)
    with pytest.raises(TraceError, match=told):
        parallel(torch.randn(5, 8))


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_backward_are_refused(one: DeviceMesh, kind: str) -> None:
    parallel = autopar.compile(Net(), one)
    parallel(torch.randn(5, 8))
    getattr(parallel.a, kind)(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"module a has the hook .*backward.* never call: remove it"):
        parallel(torch.randn(5, 8))


class Distilled(nn.Module):
    """A teacher that is not registered, of which a hook keeps what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.kept = nn.Linear(8, 8), dict[str, Tensor]()
        teacher = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        teacher[1].register_forward_hook(lambda module, args, output: self.kept.__setitem__("made", output))
        object.__setattr__(self, "teacher", teacher)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher(x)
        return nn.functional.mse_loss(self.student(x), self.kept["made"])


def test_a_hook_of_a_part_that_is_not_registered_looks_at_the_copy(one: DeviceMesh) -> None:
    plain = Distilled()
    x = torch.randn(4, 8)
    wanted = plain(x)
    plain.kept.clear()
    near(autopar.compile(plain, one)(x), wanted, 1e-6, "loss")
