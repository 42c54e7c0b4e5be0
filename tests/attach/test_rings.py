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

CALLS = 9


class Keeps(nn.Module):
    """A ring of rows, a queue of columns, and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("ring", torch.randn(5, 4))
        self.register_buffer("queue", torch.randn(4, 8))
        self.place, self.step, self.seen = 0, 0, 0.0
        self.log: list[Any] = []
        self.tables: dict[str, list[Any]] = {"loss": []}
        self.pair = ([], 1)
        self.of_step: dict[int, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return self.keep(hidden) * hidden.square().mean() + (self.ring.sum() + self.queue.sum()) * hidden.mean()

    def keep(self, hidden: Tensor) -> float:
        raise NotImplementedError


class Ring(Keeps):
    programs = 1

    def keep(self, hidden: Tensor) -> float:
        self.ring[self.place] = hidden.detach().mean(0)
        self.place = (self.place + 1) % 5
        return 1.0


class RingOfParts(Keeps):
    programs = 1

    def keep(self, hidden: Tensor) -> float:
        self.ring[self.step % 5, 1:3] = hidden.detach().mean(0)[:2]
        self.ring[self.step % 5, 0] = self.step
        self.ring[None, self.step % 5, 3] = 0.5
        self.step += 1
        return 1.0


class Columns(Keeps):
    programs = 1

    def keep(self, hidden: Tensor) -> float:
        self.queue[:, self.place : self.place + 2] = hidden.detach().T
        self.place = (self.place + 2) % 8
        return 1.0


class Wraps(Keeps):
    """Past its end it goes on at its beginning: another program for each way to do so."""

    programs = 3

    def keep(self, hidden: Tensor) -> float:
        end = self.place + 3
        if end <= 8:
            self.queue[..., self.place : end] = hidden.detach().mean(0)[:, None]
        else:
            self.queue[..., self.place :] = hidden.detach().mean(0)[:, None]
            self.queue[..., : end - 8] = 1.5
        self.place = end % 8
        return 1.0


class FromItsEnd(Keeps):
    def keep(self, hidden: Tensor) -> float:
        self.ring[-1 - self.place] = hidden.detach().mean(0)
        self.ring[self.place] += 1
        self.place = (self.place + 1) % 5
        return 1.0


class InMadeOnes(Keeps):
    """Rows of a tensor of this call, with a gradient."""

    programs = 1

    def forward(self, x: Tensor) -> Tensor:
        made = torch.zeros(6, 4)
        made[self.place : self.place + 2] = self.layer(x)
        self.place = (self.place + 2) % 6
        return (made * torch.arange(24).view(6, 4)).square().mean()


class EveryThird(Keeps):
    programs, calls = 2, 20

    def keep(self, hidden: Tensor) -> float:
        self.log.append(hidden.mean().item())
        if len(self.log) != 3:
            return 1.0
        self.seen = sum(self.log) / 3
        self.log.clear()
        return 2.0


class OfAnother(Keeps):
    """The same list by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.same = self.log

    def keep(self, hidden: Tensor) -> float:
        self.log.append(hidden.mean().item())
        return 2.0 if len(self.same) == 3 else 1.0


class InATable(Keeps):
    def keep(self, hidden: Tensor) -> float:
        self.tables["loss"].append(hidden.detach().mean(0))
        return 2.0 if len(self.tables["loss"]) == 3 else 1.0


class InAPair(Keeps):
    def keep(self, hidden: Tensor) -> float:
        self.pair[0].append(hidden.mean().item())
        return 2.0 if len(self.pair[0]) == 3 else 1.0


class Sums(Keeps):
    calls = 7

    def keep(self, hidden: Tensor) -> float:
        self.log.append(len(hidden) + self.step)
        self.step += 1
        self.seen = sum(self.log)
        return 1.0 + max(self.log) / 10


class TheLast(Keeps):
    """What it has put there itself says nothing of other calls."""

    programs = 1

    def keep(self, hidden: Tensor) -> float:
        self.log.append(hidden.detach().mean())
        self.seen = self.log[-1]
        return 1.0


class Refills(Keeps):
    programs = 2

    def keep(self, hidden: Tensor) -> float:
        self.log.clear()
        for _ in range(3):
            self.log.append(hidden.detach().mean(0))
        return float(len(self.log))


class Pushes(Keeps):
    """Twice in each call, at a place that is a buffer: what it asks the second time is what it has set."""

    programs = 1

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def keep(self, hidden: Tensor) -> float:
        for row in hidden.detach():
            at = int(self.at)
            self.queue[:, at : at + 2] = row[:, None]
            self.at[0] = (at + 2) % 8
        return 1.0 + self.at.item() / 10


class WarmsUp(Keeps):
    """By a truth and a number in buffers, that it sets and asks again."""

    programs = 3

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("left", torch.tensor(2))
        self.register_buffer("started", torch.tensor(False))

    def keep(self, hidden: Tensor) -> float:
        scale = 1.0
        if self.started.item() is False:
            self.started.fill_(True)
            scale = 5.0
        if self.left > 0:
            self.left -= 1
        return scale if self.left > 0 else 3 * scale


class Moves(Keeps):
    """A full list goes into another one, or to another attribute, and an empty one comes in its place."""

    def keep(self, hidden: Tensor) -> float:
        self.log.append(hidden.detach().mean())
        if len(self.log) == 2:
            self.tables["loss"].append(self.log)
            self.seen = self.log
            self.log = []
        return 1.0


class Least(Keeps):
    programs = 2

    def keep(self, hidden: Tensor) -> float:
        self.of_step[0] = min(self.of_step.get(0, 99.0), self.step * 0.5)
        self.step += 1
        return 1.0 + self.of_step[0]


class FullAtTen(Keeps):
    programs, calls = 2, 22

    def keep(self, hidden: Tensor) -> float:
        self.log.append(hidden.mean().item())
        if len(self.log) >= 10:
            self.seen = sum(self.log) / len(self.log)
            self.log.clear()
        return 1.0


class Averages(Keeps):
    """Of the last six, which are as many from the sixth call on."""

    programs = 7

    def keep(self, hidden: Tensor) -> float:
        self.log.append(hidden.mean().item())
        self.log = self.log[-6:]
        self.seen = sum(self.log) / len(self.log)
        return 1.0


class TwoPlaces(Keeps):
    calls = 7

    def keep(self, hidden: Tensor) -> float:
        self.queue[self.step % 2, self.step % 3] = hidden.detach().mean()
        self.ring[[(self.step + more) % 5 for more in range(2)]] = hidden.detach()
        self.step += 1
        return 1.0


class InInference(Keeps):
    """What is computed there has no gradient, as under no_grad."""

    def keep(self, hidden: Tensor) -> float:
        with torch.inference_mode():
            taught = self.layer(hidden) + hidden.data
        self.ring[0] = taught.mean(0)
        return (hidden - taught).square().mean()


class OfEachStep(Keeps):
    calls = 7

    def keep(self, hidden: Tensor) -> float:
        self.of_step[self.step] = hidden.mean().item()
        self.step += 1
        return 1.0


MODELS = (
    Ring, RingOfParts, Columns, Wraps, FromItsEnd, InMadeOnes, EveryThird, OfAnother, InATable, InAPair, Sums, TheLast,
    Refills, Pushes, WarmsUp, Moves, Least, FullAtTen, Averages, TwoPlaces, InInference, OfEachStep,
)  # fmt: skip


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
