"""Rings, queues and lists that forward writes to at places that it counts, and asks how long they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near
from tests.support.rings import MODELS, Keeps, Ring

CALLS = 9


def kept(model: nn.Module) -> dict[str, Any]:
    names = ("place", "step", "seen", "log", "tables", "pair", "of_step")
    return {name: getattr(model, name) for name in names} | dict(model.named_buffers())


def same(ours: Any, theirs: Any, name: str) -> None:
    match theirs:
        case Tensor():
            near(ours, theirs, 1e-5, name)
        case dict():
            assert [*ours] == [*theirs], name
            for key, part in theirs.items():
                same(ours[key], part, name)
        case list() | tuple():
            assert len(ours) == len(theirs), name
            for one, other in zip(ours, theirs, strict=True):
                same(one, other, name)
        case _:
            assert type(ours) is type(theirs) and ours == pytest.approx(theirs, rel=1e-5), name


@pytest.mark.filterwarnings("ignore:the model is traced and planned for the")
@pytest.mark.parametrize("kind", MODELS)
def test_what_forward_writes_at_places_that_it_counts(kind: type[Keeps], one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = kind()
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    for call in range(getattr(kind, "calls", CALLS)):
        torch.manual_seed(call)
        x = torch.randn(2, 4)
        for model in (plain, parallel):
            model.zero_grad()
            model(x).backward()
        same(parallel.layer.weight.grad.full_tensor(), plain.layer.weight.grad, f"gradient of call {call}")
        same(kept(parallel), kept(plain), f"what call {call} keeps")
    if (programs := getattr(kind, "programs", None)) is not None:
        assert len(parallel._autopar.prepared()) == programs


def test_an_index_past_the_end_is_the_error_of_torch(one: DeviceMesh) -> None:
    class Past(Ring):
        def keep(self, hidden: Tensor) -> float:
            self.ring[self.place] = hidden.detach().mean(0)
            self.place += 1
            return 1.0

    parallel = autopar.compile(Past(), one)
    for _ in range(5):
        parallel(torch.randn(2, 4))
    with pytest.raises(TraceError, match="IndexError: index 5 is out of bounds"):
        parallel(torch.randn(2, 4))


class ByATensor(Keeps):
    """The place is a tensor, so that what is read there is a copy in a program."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def keep(self, hidden: Tensor) -> float:
        self.write(hidden.detach().mean(0))
        self.at.add_(1).remainder_(5)
        return 1.0

    def write(self, row: Tensor) -> None:
        self.ring[self.at] += row
        old = self.ring[self.at].clone()
        self.ring[self.at] = 0.5 * old


class InPlace(ByATensor):
    def write(self, row: Tensor) -> None:
        self.ring[self.at].copy_(row)


class GoesOnWithTheOld(ByATensor):
    def write(self, row: Tensor) -> None:
        old = self.ring[self.at]
        self.ring[self.at] = row
        self.ring += old


def test_what_is_read_at_a_tensor_is_written_back(one: DeviceMesh) -> None:
    test_what_forward_writes_at_places_that_it_counts(ByATensor, one)


@pytest.mark.parametrize(("kind", "told"), [(InPlace, "write x.i. = y"), (GoesOnWithTheOld, "has written to")])
def test_what_is_read_at_a_tensor_is_no_view(kind: type[Keeps], told: str, one: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=told):
        autopar.compile(kind(), one)(torch.randn(2, 4))


def test_a_detached_view_of_what_trains_has_no_gradient(one: DeviceMesh) -> None:
    class Carries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.state = nn.Linear(4, 4), None

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.layer(x) if self.state is None else self.layer(x) + self.state
            self.state = hidden[-1].detach()
            return hidden, hidden.detach()[:, 1:]

    torch.manual_seed(0)
    plain: Any = Carries()
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    for call in range(3):
        x = torch.randn(2, 4)
        (ours, look), (theirs, right) = parallel(x), plain(x)
        assert not parallel.state.requires_grad and not look.requires_grad and ours.requires_grad, call
        same([parallel.state, look, ours], [plain.state, right, theirs], f"call {call}")


@pytest.mark.parametrize("how", ["itself", "in a dict"])
def test_a_parameter_set_in_forward_is_refused(how: str, one: DeviceMesh) -> None:
    class Sets(Keeps):
        def keep(self, hidden: Tensor) -> float:
            self.tied = self.layer.weight if how == "itself" else {"weight": self.layer.weight}
            return 1.0

    with pytest.raises(TraceError, match=r"sets self\.tied to a parameter"):
        autopar.compile(Sets(), one)(torch.randn(2, 4))
