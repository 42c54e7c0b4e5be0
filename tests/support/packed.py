"""Models of sequences of several lengths, which are packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

STEPS, BATCH, WIDTH, CLASSES = 7, 8, 6, 10
LENGTHS = (3, 7, 1, 5, 7, 2, 4, 6)


class Packed(nn.Module):
    """A loss at every step, and of the last states. `options`: of the layer."""

    def __init__(self, kind: type[nn.RNNBase], is_sorted: bool = False, **options: Any) -> None:
        super().__init__()
        self.words, self.inner, self.is_sorted = nn.Embedding(CLASSES, WIDTH), kind(WIDTH, WIDTH, **options), is_sorted
        self.head = nn.Linear(WIDTH * (2 if self.inner.bidirectional else 1), CLASSES)

    def forward(self, x: Tensor, lengths: Any, y: Tensor, state: Any = None) -> Tensor:
        first, steps = self.inner.batch_first, self.words(x)
        packed = pack_padded_sequence(steps if first else steps.transpose(0, 1), lengths, first, self.is_sorted)
        made, ends = self.inner(packed, state)
        made, there = pad_packed_sequence(made, batch_first=True, padding_value=0.5)
        loss = functional.cross_entropy(self.head(made).flatten(0, 1), y.flatten()) + there.float().mean()
        return loss + sum(end.square().mean() for end in (ends if isinstance(ends, tuple) else (ends,)))


class Captions(nn.Module):
    """A loss of packed outputs and packed words, as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(CLASSES, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        packed, words = (pack_padded_sequence(one, lengths, True, False) for one in (self.words(x), y))
        packed = PackedSequence(packed.data.tanh(), *packed[1:])
        return functional.cross_entropy(self.head(self.inner(packed)[0].data), words.data)


class Longer(nn.Module):
    """Outputs of more steps than the longest sequence has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        made, _ = pad_packed_sequence(self.inner(packed)[0], batch_first=True, total_length=x.shape[1] + 2)
        return made.sin().sum()


def batch(lengths: Any = LENGTHS, seed: int = 0) -> dict[str, Any]:
    """What `Packed` and `Captions` read."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, CLASSES, (len(lengths), STEPS), generator=generator) for _ in range(2))
    return {"x": x, "lengths": torch.tensor(lengths), "y": y}
