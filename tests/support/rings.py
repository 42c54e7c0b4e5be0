"""Rings, queues and lists that forward writes to at places that it counts, and asks how long they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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


class CountsWhatItRefills(Keeps):
    """How long a list is is asked before it is emptied, and behind that."""

    calls = 7

    def keep(self, hidden: Tensor) -> float:
        scale = 2.0 if len(self.log) > 2 else 1.0
        if self.step % 3 == 2:
            self.log.clear()
        self.log.append(hidden.mean().item())
        self.seen = len(self.log)
        self.step += 1
        return scale


class OfEachStep(Keeps):
    calls = 7

    def keep(self, hidden: Tensor) -> float:
        self.of_step[self.step] = hidden.mean().item()
        self.step += 1
        return 1.0


MODELS = (
    Ring, RingOfParts, Columns, Wraps, FromItsEnd, InMadeOnes, EveryThird, OfAnother, InATable, InAPair, Sums, TheLast,
    Refills, Pushes, WarmsUp, Moves, Least, FullAtTen, Averages, TwoPlaces, InInference, CountsWhatItRefills,
    OfEachStep,
)  # fmt: skip
