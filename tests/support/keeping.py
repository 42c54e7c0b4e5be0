"""Ways in which hooks keep what layers give; of models with layers `a`, `norm`, `b` and `c`."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FOUND: dict[str, Tensor] = {}
LAST: Tensor | None = None
Take = Callable[[], list[Any]]


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


def in_a_table_of_each_layer(model: Any) -> Take:
    def keep(layer: nn.Module) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def hook(module: nn.Module, given: Any, made: Tensor) -> None:
            found["made"] = made.detach()

        layer.register_forward_hook(hook)
        return found

    tables = [keep(layer) for layer in (model.a, model.norm, model.b)]
    return lambda: [table["made"] for table in tables]


def in_tuples_of_lists(model: Any) -> Take:
    found: tuple[list[Tensor], list[int]] = ([], [])
    model.b.register_forward_hook(lambda module, given, made: found[0].append(made.detach()))
    return lambda: [*found[0]]


def by_module(model: Any) -> Take:
    found: dict[Any, Tensor] = {}
    for layer in (model.a, model.b):
        layer.register_forward_hook(lambda module, given, made: found.update({module: made.detach()}))
    return lambda: [*found.values()]


def in_an_empty_object(model: Any) -> Take:
    found = types.SimpleNamespace()
    model.b.register_forward_hook(lambda module, given, made: setattr(found, "last", made.detach()))
    return lambda: [found.last]


def in_a_module_and_a_table(model: Any) -> Take:
    found: dict[str, Tensor] = {}

    def hook(module: Any, given: Any, made: Tensor) -> None:
        module.made = made.detach()
        found["made"] = module.made

    model.b.register_forward_hook(hook)
    return lambda: [found["made"]]


class Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__

    @property
    def last(self) -> Tensor:
        return self["first"]

    @last.setter
    def last(self, value: Tensor) -> None:
        self["first"] = value


def in_what_finds_its_attributes(model: Any) -> Take:
    found = Attributes()

    def hook(module: nn.Module, given: Any, made: Tensor) -> None:
        found.last = made.detach()

    model.b.register_forward_hook(hook)
    return lambda: [found.last]


def in_an_ordered_table_that_is_emptied(model: Any) -> Take:
    found: OrderedDict[str, Tensor] = OrderedDict(old=torch.zeros(1))

    def hook(module: nn.Module, given: Any, made: Tensor) -> None:
        found.clear()
        found["second"], found["first"] = made.detach(), given[0].detach()

    model.b.register_forward_hook(hook)
    return lambda: [*found.values(), found["first"]]


class Marked(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(f"{key}!", value)


def under_another_key(model: Any) -> Take:
    found = Marked()

    def hook(module: nn.Module, given: Any, made: Tensor) -> None:
        found["made"] = made.detach()

    model.b.register_forward_hook(hook)
    return lambda: [found["made!"]]


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
    return lambda: [*found.values()]  # in the order in which they come


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
    in_a_variable, in_another_module, numbers, in_named_tuples, in_a_table_of_each_layer, of_all_layers,
    in_tuples_of_lists, by_module, in_an_empty_object, in_a_module_and_a_table, in_what_finds_its_attributes,
    in_an_ordered_table_that_is_emptied, under_another_key, other_outputs, other_inputs,
)  # fmt: skip
