"""Models whose forward counts in attributes, as scripts for annealing, warm-up and logging have it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Counts(nn.Module):
    """Nothing else hangs on it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.step, self.scale = 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.loss(x)

    def loss(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


class OfItsClass(Counts):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.loss(x)


class Anneals(Counts):
    """A weight of the loss that grows up to a limit, and a temperature that falls."""

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        beta = min(1.0, self.step / 3)
        self.scale = max(0.7, self.scale * 0.9)
        hidden = torch.softmax(self.a(x) / self.scale, -1)
        return self.loss(x) + beta * hidden.square().sum(-1).log().mean()


class Branches(Counts):
    """Every other call does something else, and the first ones too."""

    def forward(self, x: Tensor) -> Tensor:
        loss = self.loss(x)
        if self.step < 2 or self.step % 2 == 0:
            loss = loss + self.a(x).abs().mean()
        self.step = self.step + 1
        return loss


class Computes(Counts):
    """Whatever Python computes of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        count = self.step
        parts = (
            count // 2,
            -count % 5,
            abs(count - 3),
            round(count / 3),
            math.floor(count / 2),
            math.ceil(count / 3),
        )
        self.scale = sum(parts) + 2.0**-count - (count + 1) ** 2 / 10
        rest = torch.tensor(self.scale) + torch.tensor([1.0, count]).sum()
        return self.loss(x) * self.scale + (self.a(x) > count / 20).float().mean() + rest * self.b.bias.sum()


class Averages(Counts):
    """A running average of numbers out of tensors, which begins with the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.average: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        loss = self.loss(x)
        now = loss.item()
        self.average = now if self.average is None else 0.9 * self.average + 0.1 * now
        return loss / (1 + self.average)


class InTraining(Counts):
    """Counts in training alone, and reads it in evaluation too; keeps a history elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.step += 1
            self.history.append(self.step * 0.5)
        return self.loss(x) * (1 + self.step / 10)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return torch.relu(self.inner(x))


class InParts(Counts):
    """Parts that count, one of them twice in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(self.second(self.first(x)))
        return self.loss(hidden) + self.first.seen / 100 * hidden.mean()


class Returns(Counts):
    """Gives what it has counted."""

    def forward(self, x: Tensor) -> tuple[Tensor, int, dict[str, float]]:
        self.step += 1
        return self.loss(x), self.step, {"progress": self.step / 4}


class HasState(Counts):
    """A state of the rows, which is there from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = torch.zeros(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.state is None:
            self.state = torch.zeros(len(x), 8)
        hidden = torch.tanh(self.a(x) + 0.5 * self.state)
        self.state = hidden.detach()
        return self.b(hidden).square().mean()


class MakesState(HasState):
    """It is made in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.state = None


class Decays(Counts):
    """A tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.rand(8)

    def forward(self, x: Tensor) -> Tensor:
        self.weights = self.weights * 0.9 + 0.01 * x.detach().mean(0)
        return self.loss(x * self.weights)


class Masks(Counts):
    """A mask that is kept for as long as batches are as long."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or self.mask.size(0) != len(x):
            self.mask = torch.tril(torch.full((len(x), len(x)), 0.25))
        return self.loss(self.mask @ x)


class Schedules(Counts):
    """Functions of Python's and of numpy."""

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        cosine = 0.5 * (1 + math.cos(math.pi * self.step / 10))
        self.scale = float_of(np.exp(-self.step / 5)) + math.log(self.step, 3) + math.pow(0.9, self.step)
        gate = float(self.step) / 10 + int(self.step / 2) * 0.1
        noise = gate * torch.full((8,), self.scale).lerp(x, self.step / 20)
        gate = nn.functional.softmax(self.a(x) / math.sqrt(1 + self.step), -1).clamp_min(cosine / 10)
        return self.loss(x + 0.1 * noise) * cosine + gate.log().mean() * divmod(self.step, 3)[1]


def float_of(value: Any) -> Any:
    """Of numpy's class Python's: a number of each call is neither here."""
    return value * 1.0


class Scales(Counts):
    """A running average whose decay grows, as averages of weights have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.rand(8))
        self.register_buffer("rough", torch.rand(8).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        self.step += 1
        decay = min(0.9, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            self.mean.mul_(decay).add_(hidden.mean(0), alpha=1 - decay)
            self.rough.sub_(hidden.mean(0).bfloat16(), alpha=decay / 10)
        spread = torch.addcmul(hidden, hidden, x, value=decay).addcdiv(x, 2 + hidden.abs(), value=-decay)
        return self.loss(torch.sub(hidden, self.mean + self.rough, alpha=decay)) + spread.square().mean()


class Steps(Counts):
    """Hundreds of steps in a call, as loops over time have them; numbers of some of them meet tensors."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(600):
            self.step += 1
        for _ in range(20):
            self.scale = self.scale * 0.99
        return self.loss(x) * self.scale * (1 if self.step % 7 else 2)


class Hidden(Counts):
    """States of a recurrent layer, a tuple of two, and how many steps they are of."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.hidden: tuple[Tensor, Tensor] | None = None
        self.seen = {"steps": 0, "rows": 0}

    def forward(self, x: Tensor) -> Tensor:
        made, (hidden, cell) = self.lstm(x[:, None], self.hidden)
        self.hidden = hidden.detach(), cell.detach()
        self.seen["steps"] += 1
        self.seen["rows"] += len(x)
        return self.loss(made[:, 0]) / self.seen["steps"]


class Memories(Counts):
    """A list that is written to in place, and one of the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = [torch.zeros(5, 8), torch.zeros(5, 8)]
        self.window: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x) + self.memory[0] - 0.5 * self.memory[1])
        self.memory[1] = self.memory[0]
        self.memory[0] = hidden.detach()
        self.window = [*self.window, hidden.mean(0).detach()][-2:]
        return self.loss(hidden + sum(self.window))


MODELS = [
    Counts,
    OfItsClass,
    Anneals,
    Branches,
    Computes,
    Averages,
    InTraining,
    InParts,
    Returns,
    Schedules,
    Scales,
    Steps,
]
WITH_TENSORS = [HasState, MakesState, Decays, Hidden, Memories]


def counted(model: nn.Module) -> dict[str, object]:
    """All numbers, lists, tuples, dicts and plain tensors that it and its parts hold."""
    kinds = (int, float, list, tuple, Tensor)
    return {
        f"{path}.{name}": value
        for path, part in model.named_modules()
        for name, value in vars(part).items()
        if (isinstance(value, kinds) or name == "seen") and not isinstance(value, bool) and not name.startswith("_")
    }
