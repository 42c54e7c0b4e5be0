"""What is registered on a module behind its first call is seen, however its forward looks for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.compare import near, same_gradients


def _tried(module: Any) -> Any:
    try:
        return module.extra
    except AttributeError:
        return None


LOOKS: dict[str, Callable[[Any], Any]] = {
    "hasattr": lambda module: module.extra if hasattr(module, "extra") else None,
    "getattr": lambda module: getattr(module, "extra", None),
    "in a dict": lambda module: module._parameters.get("extra", module._buffers.get("extra")),
    "by name": lambda module: {**dict(module.named_parameters()), **dict(module.named_buffers())}.get("extra"),
    "tried": _tried,
}
ADDS: dict[str, Callable[[nn.Module], None]] = {
    "parameter": lambda module: module.register_parameter("extra", nn.Parameter(torch.randn(6))),
    "buffer": lambda module: module.register_buffer("extra", torch.randn(6)),
}


class Inner(nn.Module):
    """Without parameters and buffers of its own."""

    def __init__(self, look: str) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        extra = LOOKS[self.look](self)
        return x if extra is None else x * extra


class Outer(nn.Module):
    def __init__(self, look: str) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(6, 6), Inner(look)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.layer(x)).square().mean()


@pytest.mark.parametrize("what", ADDS)
@pytest.mark.parametrize("look", LOOKS)
def test_what_is_registered_later_is_seen(one: DeviceMesh, look: str, what: str) -> None:
    torch.manual_seed(0)
    plain, x = Outer(look), torch.randn(4, 6)
    parallel = autopar.compile(plain, one)
    parallel(x).backward()
    parallel.zero_grad()
    plain = copy.deepcopy(plain)
    for model in (plain, parallel):
        torch.manual_seed(1)
        ADDS[what](model.inner)
    wanted, ours = plain(x), parallel(x)
    near(ours, wanted, 1e-6, look)
    wanted.backward()
    ours.backward()
    same_gradients(plain, parallel)
    assert len([*parallel.parameters()]) == (3 if what == "parameter" else 2)
    parallel.inner._parameters.pop("extra", parallel.inner._buffers.pop("extra", None))
    plain.inner._parameters.pop("extra", plain.inner._buffers.pop("extra", None))
    near(parallel(x), plain(x), 1e-6, "taken away")
