"""Models that read what their own hooks have found, as libraries of features, U-Nets and self-distillation write them;
tables and lists that forward fills itself.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.compare import near, same_gradients

FOUND: dict[str, Tensor] = {}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.relu(self.first(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(16, 2)

    def loss(self, *found: Tensor) -> Tensor:
        return self.head(torch.cat(found, -1)).square().mean()


class InATable(Model):
    """A table that is never emptied."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}
        for name in ("first", "second"):
            self.encoder.get_submodule(name).register_forward_hook(self.keep(name))

    def keep(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, made: Tensor) -> None:
            self.found[name] = made

        return hook

    def forward(self, x: Tensor) -> Tensor:
        self.encoder(x)
        return self.loss(self.found["first"], self.found["second"])


class InAList(Model):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        for layer in (self.encoder.first, self.encoder.second):
            layer.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, given: Any, made: Tensor) -> None:
        self.found.append(made)

    def forward(self, x: Tensor) -> Tensor:
        self.found.clear()
        self.encoder(x)
        return self.loss(*self.found)


class InANewList(InAList):
    def forward(self, x: Tensor) -> Tensor:
        self.found = []
        self.encoder(x)
        return self.loss(*self.found)


class ByDevice(Model):
    """Registers its hook at its first call, behind a flag, and empties the table behind each (BYOL, DINO)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: dict[torch.device, Tensor] = {}
        self.is_registered = False

    def keep(self, module: nn.Module, given: Any, made: Tensor) -> None:
        self.hidden[given[0].device] = made.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_registered:
            self.encoder.second.register_forward_hook(self.keep)
            self.is_registered = True
        self.hidden.clear()
        made = self.encoder(x)
        hidden = self.hidden[x.device]
        self.hidden.clear()
        return self.loss(hidden, made)


class Handles(Model):
    """Keeps handles in a list, and what it found as an attribute (extractors of embeddings)."""

    def __init__(self) -> None:
        super().__init__()
        self.latents: Tensor | None = None
        self.handles: list[Any] = []
        self.is_registered = False

    def keep(self, module: nn.Module, given: Any, made: Tensor) -> None:
        self.latents = made

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_registered:
            self.handles.append(self.encoder.second.register_forward_hook(self.keep))
            self.is_registered = True
        made = self.encoder(x)
        assert self.latents is not None
        return self.loss(self.latents, made)


class Hook:
    """Holds what a layer gave last (fastai)."""

    def __init__(self, module: nn.Module) -> None:
        self.stored: Any = None
        self.handle = module.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, given: Any, made: Tensor) -> None:
        self.stored = made


class Up(nn.Module):
    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self.hook, self.layer = hook, nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.cat([x, self.hook.stored], -1))


class InObjects(Model):
    """A U-Net of hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks = [Hook(self.encoder.first), Hook(self.encoder.second)]
        self.ups = nn.Sequential(Up(self.hooks[1]), Up(self.hooks[0]))

    def forward(self, x: Tensor) -> Tensor:
        made = self.ups(self.encoder(x))
        return self.loss(made, made)


class InAGlobal(Model):
    """A global table, under a name of the module's own, too (MiDaS)."""

    def __init__(self) -> None:
        super().__init__()
        self.found = FOUND
        for name in ("first", "second"):

            def hook(module: nn.Module, given: Any, made: Tensor, name: str = name) -> None:
                FOUND[name] = made

            self.encoder.get_submodule(name).register_forward_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        self.encoder(x)
        return self.loss(self.found["first"], self.found["second"])


class Features:
    """Of each device a table, which is a new one behind each call (timm)."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self.outputs: dict[torch.device, dict[str, Tensor]] = defaultdict(OrderedDict)
        for name in names:
            model.get_submodule(name).register_forward_hook(functools.partial(self.keep, name))

    def keep(self, name: str, *args: Any) -> None:
        self.outputs[args[-1].device][name] = args[-1]

    def take(self, device: torch.device) -> list[Tensor]:
        taken, self.outputs[device] = self.outputs[device], OrderedDict()
        return [*taken.values()]


class OfALibrary(Model):
    def __init__(self) -> None:
        super().__init__()
        self.features = Features(self.encoder, ("first", "second"))

    def forward(self, x: Tensor) -> Tensor:
        self.encoder(x)
        return self.loss(*self.features.take(x.device))


class Penalties(Model):
    def __init__(self) -> None:
        super().__init__()
        self.penalties: list[Tensor] = []
        for layer in (self.encoder.first, self.encoder.second):
            layer.register_forward_hook(lambda module, given, made: self.penalties.append(made.square().mean()))

    def forward(self, x: Tensor) -> Tensor:
        loss = self.encoder(x).mean() + sum(self.penalties)
        self.penalties.clear()
        return loss


class Masks(Model):
    """A table of what is made once for each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[Any, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape not in self.masks:
            self.masks[x.shape] = torch.ones(x.shape).tril()
        return self.encoder(x * self.masks[x.shape]).square().mean()


class Logs(Model):
    """Writes what it finds into a list and a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.found: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        loss = hidden.square().mean()
        self.losses.append(loss.item())
        self.found.update(hidden=hidden.detach(), rows=len(x))
        return loss


class Shared(nn.Module):
    """One layer under two names, which reads an attribute and keeps what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.again = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.layer(x).tanh()).square().mean()


class Scaled(nn.Linear):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.made = super().forward(x) * self.scale
        return self.made


def test_attributes_of_a_module_under_two_names_are_seen(one: DeviceMesh) -> None:
    plain = Shared()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for scale in (1.0, 2.0, 0.5, 2.0):
        plain.layer.scale = parallel.layer.scale = scale
        x = torch.randn(4, 8)
        near(parallel(x), plain(x), 1e-6, f"scale {scale}")
        near(parallel.again.made, plain.again.made, 1e-5, f"made at scale {scale}")


class Returning(Model):
    """Gives back the table that its hook fills through a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.found = found = {}
        self.encoder.first.register_forward_hook(lambda module, given, made: found.update(first=made))

    def forward(self, x: Tensor) -> Any:
        return self.encoder(x), self.found


def test_a_table_may_be_given_back(one: DeviceMesh) -> None:
    plain, model = Returning(), Returning()  # (a copy by `copy.deepcopy` has a table that its hook does not fill)
    model.load_state_dict(plain.state_dict())
    parallel = autopar.compile(model, one)
    for _ in range(3):
        x = torch.randn(4, 8)
        wanted = plain.encoder.first(x)
        near(parallel(x)[1]["first"], wanted, 1e-5, "given")
        near(parallel.found["first"], wanted, 1e-5, "kept")


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize(
    "kind",
    [InATable, InAList, InANewList, ByDevice, Handles, InObjects, InAGlobal, OfALibrary, Penalties, Masks, Logs],
)
def test_a_model_reads_what_its_hooks_have_found(one: DeviceMesh, kind: Callable[[], Any], has_run: bool) -> None:
    FOUND.clear()
    plain, model = kind(), kind()
    model.load_state_dict(plain.state_dict())
    if has_run:
        model(torch.randn(5, 8)).backward()
    parallel = autopar.compile(model, one)
    for step in range(6):
        x = torch.randn(5 if step < 4 else 7, 8)
        losses: list[Tensor] = []
        for one_of in (parallel, plain):
            one_of.train(step != 2).zero_grad()
            losses.append(one_of(x))
            losses[-1].backward()
        near(losses[0], losses[1], 1e-6, f"step {step}")
        same_gradients(plain, parallel)
        with torch.no_grad():
            near(parallel(x), plain(x), 1e-6, f"step {step}, evaluated")
    assert len(parallel._autopar.prepared()) <= (8 if kind in (InAList, Masks) else 4)
    if kind is Logs:
        assert parallel.losses[-6:] == pytest.approx(plain.losses[-6:], 1e-6)
        near(parallel.found["hidden"], plain.found["hidden"], 1e-5, "hidden")
        assert parallel.found["rows"] == 7
