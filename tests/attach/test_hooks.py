"""Hooks that submodules run in forward are traced with it; what they leave outside of the model is there after each
call, as on one process.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near, same_gradients

FOUND: dict[str, Tensor] = {}
LAST: Tensor | None = None
Take = Callable[[], list[Any]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.relu(self.a(x)))
        hidden = self.b(hidden) + hidden
        return self.c(torch.tanh(hidden)).square().mean()


def in_a_global_table(model: Any) -> Take:
    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, made: Tensor) -> None:
            FOUND[name] = made.detach()

        return hook

    for name in ("a", "b"):
        getattr(model, name).register_forward_hook(hook_of(name))
    return lambda: [FOUND["a"], FOUND["b"]]


def in_a_global(model: Any) -> Take:
    def hook(module: nn.Module, given: Any, made: Tensor) -> None:
        global LAST
        LAST = made.detach()

    model.b.register_forward_hook(hook)
    return lambda: [LAST]


def in_a_list_that_is_cleared(model: Any) -> Take:
    found: list[Tensor] = []
    model.b.register_forward_hook(lambda module, given, made: found.append(made))

    def take() -> list[Any]:
        taken = [*found]
        found.clear()
        return taken

    return take


def in_a_list_that_grows(model: Any) -> Take:
    found: list[Any] = []
    model.b.register_forward_hook(lambda module, given, made: found.append((given[0].detach(), made.detach(), "b")))
    return lambda: [part for one in found for part in one[:2]]


def in_a_list_of_two(model: Any) -> Take:
    found: list[Tensor] = []

    def hook(module: nn.Module, given: Any, made: Tensor) -> None:
        if len(found) < 2:
            found.append(made.detach())

    model.b.register_forward_hook(hook)
    return lambda: [*found]


def in_the_last_two(model: Any) -> Take:
    found: deque[Tensor] = deque(maxlen=2)
    model.b.register_forward_hook(lambda module, given, made: found.append(made.detach()))
    return lambda: [*found]


def in_a_place_of_a_list(model: Any) -> Take:
    found: list[Any] = [None, None]

    def hook(module: nn.Module, given: Any, made: Tensor) -> None:
        found[1] = made.detach()

    model.b.register_forward_hook(hook)
    return lambda: [found[1]]


def in_tables_of_lists(model: Any) -> Take:
    found: dict[str, list[Tensor]] = defaultdict(list)
    for name in ("a", "b"):

        def hook(module: nn.Module, given: Any, made: Tensor, name: str = name) -> None:
            found[name].append(made.detach())

        getattr(model, name).register_forward_hook(hook)

    def take() -> list[Any]:
        taken = [one for listed in found.values() for one in listed]
        found.clear()
        return taken

    return take


def in_an_object(model: Any) -> Take:
    class Keeper:
        def __init__(self, module: nn.Module) -> None:
            self.first: Tensor | None = None
            self.handle = module.register_forward_hook(self.keep)

        def keep(self, module: nn.Module, given: Any, made: Tensor) -> None:
            self.first, self.second = made, given[0].detach()

    keeper = Keeper(model.a)
    return lambda: [keeper.first, keeper.second]


def in_an_object_that_is_called(model: Any) -> Take:
    class Keeper:
        def __init__(self) -> None:
            self.found: OrderedDict[type, Tensor] = OrderedDict()

        def __call__(self, module: nn.Module, given: Any, made: Tensor) -> None:
            self.found[type(module)] = made.detach()

    keeper = Keeper()
    for module in (model.a, model.norm):
        module.register_forward_hook(keeper)
    return lambda: [*keeper.found.values()]


def in_what_a_hook_is_given(model: Any) -> Take:
    found: dict[str, Tensor] = {}

    def keep(table: dict[str, Tensor], name: str, module: nn.Module, given: Any, made: Tensor) -> None:
        table[name] = made.detach()

    for name in ("a", "b"):
        getattr(model, name).register_forward_hook(functools.partial(keep, found, name))
    return lambda: [*found.values()]


def in_a_variable(model: Any) -> Take:
    last: Tensor | None = None

    def hook(module: nn.Module, given: Any, made: Tensor) -> None:
        nonlocal last
        last = made.detach()

    model.b.register_forward_hook(hook)
    return lambda: [last]


def in_another_module(model: Any) -> Take:
    class Around(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            inner.b.register_forward_hook(self.keep)

        def keep(self, module: nn.Module, given: Any, made: Tensor) -> None:
            self.found = made.detach()

    around = Around(model)
    return lambda: [around.found]


def numbers(model: Any) -> Take:
    found: dict[str, Any] = {}

    def hook(module: nn.Module, given: Any, made: Tensor) -> None:
        found.update(spread=made.std().item(), rows=len(made), shape=tuple(made.shape))

    model.b.register_forward_hook(hook)
    return lambda: [found["spread"], found["rows"], *found["shape"]]


class Pair(NamedTuple):
    made: Tensor
    rows: int


def in_named_tuples(model: Any) -> Take:
    found: dict[str, Pair] = {}
    model.register_buffer("unsaved", torch.ones(8), persistent=False)
    model.b.register_forward_hook(lambda module, given, made: found.update(b=Pair(made + model.unsaved, len(made))))
    return lambda: [*found["b"]]


def of_all_layers(model: Any) -> Take:
    found: dict[str, Tensor] = {}
    for name, part in model.named_modules():
        if name:
            part.register_forward_hook(lambda module, given, made, name=name: found.update({name: made.detach()}))
    return lambda: [found[name] for name in sorted(found)]


def other_outputs(model: Any) -> Take:
    model.a.register_forward_hook(lambda module, given, made: 0.5 * made)
    model.b.register_forward_hook(lambda module, args, kwargs, made: made + 1, with_kwargs=True)
    return list


def other_inputs(model: Any) -> Take:
    model.a.register_forward_pre_hook(lambda module, given: (2 * given[0],))
    model.b.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] - 1,), kwargs), with_kwargs=True)
    return list


RECIPES = (
    in_a_global_table, in_a_global, in_a_list_that_is_cleared, in_a_list_that_grows, in_a_list_of_two, in_the_last_two,
    in_a_place_of_a_list, in_tables_of_lists, in_an_object, in_an_object_that_is_called, in_what_a_hook_is_given,
    in_a_variable, in_another_module, numbers, in_named_tuples, of_all_layers, other_outputs, other_inputs,
)  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_hooks_do_what_they_do_on_one_process(one: DeviceMesh, recipe: Callable[[Any], Take], when: str) -> None:
    FOUND.clear()
    plain = Net()
    model = copy.deepcopy(plain)
    wanted = recipe(plain)
    if when == "before":
        found = recipe(model)
        parallel = autopar.compile(model, one)
    else:
        parallel = autopar.compile(model, one)
        if recipe is not in_a_list_of_two:  # which has three programs, of four one is told
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
    assert len(parallel._autopar.prepared()) <= (3 if recipe is in_a_list_of_two else 1) + (when == "after")


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
        (average, "computes with what it has left in found at the last call"),
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


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_backward_are_refused(one: DeviceMesh, kind: str) -> None:
    parallel = autopar.compile(Net(), one)
    parallel(torch.randn(5, 8))
    getattr(parallel.a, kind)(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"module a has the hook .*backward.* never call: remove it"):
        parallel(torch.randn(5, 8))
