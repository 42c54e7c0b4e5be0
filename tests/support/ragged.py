"""Models that ask how long each sequence of a batch is, and go on by the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

BATCH, STEPS, WIDTH = 4, 9, 6
LENGTHS = ((3, 7, 1, 5), (8, 2, 2, 4), (3, 7, 1, 5), (3, 1, 7, 5))
Form = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Asking(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        self.form = form

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.form(self.inner, x, lengths)


def longest(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    n = int(lengths.max())
    there = torch.arange(n)[None] < lengths[:, None]
    return (inner(x[:, :n]).square().mean(-1) * there).sum() / there.sum()


def as_tensors(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    there = torch.arange(lengths.max()) < lengths.unsqueeze(1)
    return (inner(x[:, : lengths.max()]).square().mean(-1) * there).sum() + inner(
        x.new_zeros(lengths.min(), WIDTH)
    ).sum()


def of_items(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    n, total = lengths.max().item(), lengths.sum().item()
    h = inner(x) * 2 if n > 7 else inner(x)
    return (h[:, :n].square().sum() + h[:, -n:].sum() + torch.zeros(n, WIDTH).sum()) / total


def each_by_itself(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.stack([inner(x[i, :n]).square().mean() for i, n in enumerate(lengths.tolist())]).mean()


def by_numpy(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    order = lengths.cpu().numpy().argsort()[::-1].tolist()
    return sum(inner(x[i]).square().mean() / (k + 1) for k, i in enumerate(order))


def branches(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    h = inner(x)
    if (lengths >= 8).any():
        h = h * 2
    if lengths.min() < 2 and x[0, 0, 0] > 0:
        h = h + 1
    return h.square().mean()


def split(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    parts = torch.split(x.flatten(0, 1)[: int(lengths.sum())], lengths.tolist())
    return inner(pad_sequence(list(parts), batch_first=True)).square().mean()


def repeated(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    sizes = torch.bincount(lengths).clamp(min=1)
    h = torch.repeat_interleave(inner(x[:, 0]), lengths, 0)
    return h.square().mean() + (functional.one_hot(lengths) / sizes).sum() * h.mean()


def pooled(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """As graph networks have it: rows of nodes, and to which graph each belongs."""
    out = x.new_zeros(int(lengths.max()) + 1, WIDTH)
    return out.index_add(0, lengths, inner(x[:, 0])).square().mean()


def pairs(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """A loss of picked rows with one another."""
    rows = functional.normalize(inner(x[torch.arange(STEPS) < lengths.unsqueeze(1)]), dim=-1)
    return functional.cross_entropy(rows @ rows.T / 0.5, torch.arange(len(rows)))


def columns(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    seen = torch.bincount(lengths, minlength=STEPS) > 0
    return inner(x[:, seen]).square().mean() + inner(x[0, seen].T[:, :1].T).sum()


def each_that_is_there(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    h, loss = inner(x), x.new_zeros(())
    for value in lengths.unique():
        loss = loss + h[lengths == value].mean().square()
    for i in (lengths > 2).nonzero(as_tuple=True)[0]:
        loss = loss + h[i].square().mean()
    values, inverse, counts = torch.unique(lengths, return_inverse=True, return_counts=True)
    return loss + (h[:, 0] * (values[inverse] / counts[inverse]).unsqueeze(1)).sum() * len(values)


def written_to(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """Rows in the place of rows, by a mask that is not the first index."""
    h, seen = inner(x), torch.bincount(lengths, minlength=STEPS) > 0
    out = torch.zeros_like(h)
    out[:, seen] = h[:, seen].softmax(1)
    return out.square().sum()


def as_it_is_packed(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(inner(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(packed, batch_first=True)[0].square().mean()


FORMS: Mapping[str, Form] = {form.__name__: form for form in (
    longest, as_tensors, of_items, each_by_itself, by_numpy, branches, split, repeated, pooled, pairs, columns,
    each_that_is_there, written_to, as_it_is_packed,
)}  # fmt: skip


def batch(lengths: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, STEPS, WIDTH, generator=generator, dtype=torch.float64), torch.tensor(lengths)
