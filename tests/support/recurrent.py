"""Recurrent networks with a loss: every kind, batch first or not, deep, both ways, with a state passed in and out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS, BATCH, WIDTH, CLASSES = 5, 8, 12, 10
CASES: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
    "lstm batch first": (nn.LSTM, {"batch_first": True}),
    "lstm two layers both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "gru two layers both ways batch first": (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "rnn two layers relu": (nn.RNN, {"num_layers": 2, "nonlinearity": "relu"}),
    "lstm without bias": (nn.LSTM, {"bias": False}),
}


class Recurrent(nn.Module):
    """Words, recurrent layers, a classifier at every step. Returns the loss and the state after the last step."""

    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.inner = kind(WIDTH, WIDTH, **options)
        width = (self.inner.proj_size or WIDTH) * (2 if self.inner.bidirectional else 1)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, y: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        made, state = self.inner(self.words(x), state)
        return functional.cross_entropy(self.head(made).flatten(0, 1), y.flatten()), state


def made(case: str, seed: int = 0) -> Recurrent:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Recurrent(*CASES[case])


def batch_of(model: Recurrent, seed: int = 1) -> dict[str, Any]:
    """Ids, labels and a state, drawn from the seed."""
    generator, inner = torch.Generator().manual_seed(seed), model.inner
    shape = (BATCH, STEPS) if inner.batch_first else (STEPS, BATCH)
    layers = inner.num_layers * (2 if inner.bidirectional else 1)
    states = [torch.randn(layers, BATCH, width, generator=generator) for width in (inner.proj_size or WIDTH, WIDTH)]
    ids, labels = (torch.randint(0, CLASSES, shape, generator=generator) for _ in range(2))
    return {"x": ids, "y": labels, "state": tuple(states) if isinstance(inner, nn.LSTM) else states[0]}
