"""Models that keep numbers and tensors in objects, counters of their own, and tensors that they write to in place."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Meter:
    """As most examples for torch have it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val: float = 0
        self.sum: float = 0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n

    @property
    def mean(self) -> float:
        return self.sum / max(1, self.count)


@dataclass(frozen=True)
class Schedule:
    step: int = 0
    scale: float = 1.0


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Ticks:
    n = 0

    def tick(self) -> int:
        self.n += 1
        return self.n


class Keeps(nn.Module):
    """`held`: names of what it keeps; `programs`: how many the calls need."""

    held: tuple[str, ...] = ()
    programs = 1

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class Metered(Keeps):
    held, programs = ("losses", "each"), 2  # a number of Python's at first, then one of a call

    def __init__(self) -> None:
        super().__init__()
        self.losses = Meter()
        self.each: dict[str, Any] = {"square": Meter(), "all": [Meter(), Meter()]}

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layer(x).square().mean()
        self.losses.update(loss.item(), len(x))
        self.each["square"].update(loss.item() ** 2)
        for one in self.each["all"]:
            one.update((x > 0).float().mean().item())
        return loss / (1 + self.losses.count)


class Resets(Keeps):
    held, programs = ("meter",), 3

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layer(x).square().mean()
        self.meter.update(loss.item())
        if self.meter.count == 3:
            self.meter.reset()
        return loss


class Scheduled(Keeps):
    held = ("schedule",)

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layer(x).square().mean() * self.schedule.scale
        self.schedule = replace(self.schedule, step=self.schedule.step + 1, scale=0.9 * self.schedule.scale)
        return loss


class Counts(Keeps):
    held, programs = ("calls", "sums", "plain"), 2  # of tables that are empty, and of filled ones

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sums, self.plain = Counter[str](), defaultdict[str, float](float), dict[str, int]()

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layer(x).square().mean()
        self.calls["forward"] += 1
        self.calls.update(["rows"] * len(x))
        self.sums["loss"] += loss.item()
        self.plain["n"] = self.plain.get("n", 0) + 1
        return loss / self.plain["n"]


class OfSlots(Keeps):
    held = ("slots",)

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()

    def forward(self, x: Tensor) -> Tensor:
        self.slots.n += 1
        return self.layer(x).square().mean() * self.slots.n


class OfItsClass(Keeps):
    held, programs = ("ticks",), 2  # of the class, and from then on of the object

    def __init__(self) -> None:
        super().__init__()
        self.ticks = Ticks()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean() / self.ticks.tick()


class Phase(Enum):
    WARMING = 1
    TRAINING = 2


class Controller:
    def __init__(self) -> None:
        self.phase, self.is_begun, self.told = Phase.WARMING, False, "nothing"


class Controlled(Keeps):
    """Flags, text and phases: a program for each state."""

    held, programs = ("controller", "cache", "kind"), 6

    def __init__(self) -> None:
        super().__init__()
        self.controller, self.cache, self.kind, self.calls = Controller(), None, "", 0

    def forward(self, x: Tensor) -> Tensor:
        h, controller = self.layer(x), self.controller
        self.calls += 1
        if not controller.is_begun:
            controller.is_begun, h = True, 2 * h
        if controller.phase is Phase.TRAINING:
            h = h / 3
        if self.calls == 3:
            controller.phase, controller.told = Phase.TRAINING, "training"
        self.cache = h.detach().mean() if self.calls == 5 else None  # which it was before
        self.kind = "odd" if self.calls == 7 else ""
        loss = h.square().mean()
        self.spread = loss.item() if isinstance(loss.item(), float) else None
        return loss


class Moments:
    def __init__(self) -> None:
        self.n, self.mean, self.last = 0, torch.zeros(4), torch.zeros(3, 4)


class Normalises(Keeps):
    held = ("moments",)

    def __init__(self) -> None:
        super().__init__()
        self.moments = Moments()

    def forward(self, x: Tensor) -> Tensor:
        h, moments = self.layer(x), self.moments
        moments.n += 1
        moments.mean = 0.9 * moments.mean + 0.1 * h.detach().mean(0)
        moments.last[1] = h.detach()[0]
        return (h - moments.mean + moments.last.sum(0)).square().mean()


class InPlace(Keeps):
    held = ("mean", "rows", "ring", "several", "seen", "place")

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.rows, self.ring = torch.zeros(4), torch.zeros(6), torch.zeros(5, 4)
        self.several, self.seen, self.place = [torch.zeros(4), torch.ones(4)], torch.tensor(0), 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.mean.data.copy_(0.9 * self.mean + 0.1 * h.detach().mean(0))
        self.rows[:-1] = self.rows[1:].clone()
        self.rows[-1] = h.detach().square().mean()
        with torch.no_grad():
            self.ring[self.place % 5] = h.mean(0)
            self.several[0].mul_(0.9).add_(h.mean(0))
        self.seen += len(x)
        self.place += 1
        return (h - self.mean + self.ring.mean(0) * self.rows.mean() + self.several[0] / self.seen).square().mean()


MODELS: tuple[type[Keeps], ...] = (
    Metered, Resets, Scheduled, Counts, OfSlots, OfItsClass, Controlled, Normalises, InPlace,
)  # fmt: skip


def told(value: Any) -> Any:
    """What is in it, in lists and dicts that can be compared."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: told(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [told(part) for part in value]
    if isinstance(value, Slots):
        return value.n
    if isinstance(value, Enum):
        return value.name
    return told(vars(value)) if hasattr(value, "__dict__") else value


def kept(model: Any) -> dict[str, Any]:
    return {name: told(getattr(model, name)) for name in model.held}


def same(ours: Any, theirs: Any) -> None:
    match theirs:
        case dict():
            assert [*ours] == [*theirs]
            for key, part in theirs.items():
                same(ours[key], part)
        case list():
            assert len(ours) == len(theirs)
            for one, other in zip(ours, theirs, strict=True):
                same(one, other)
        case _:
            expected = pytest.approx(theirs, rel=1e-5) if isinstance(theirs, float) else theirs
            assert type(ours) is type(theirs) and ours == expected
