"""What forward asks its arguments, and goes on by the answer: each answer has a program of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import autopar
from autopar import TraceError
from tests.processes.compare import both_backward, same_gradients

BATCH, STEPS, WIDTH = 4, 9, 6
LENGTHS = ((3, 7, 1, 5), (8, 2, 2, 4), (3, 7, 1, 5), (3, 1, 7, 5))
Form = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Asking(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.inner, self.form = nn.Linear(WIDTH, WIDTH).double(), form

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


def programs(parallel: Any) -> int:
    return len(parallel._autopar.prepared())


@pytest.mark.parametrize("name", FORMS)
def test_whatever_the_answers_are_it_is_as_on_one_process(one: DeviceMesh, name: str) -> None:
    plain = Asking(FORMS[name])
    parallel = autopar.compile(plain, one)
    for seed, lengths in enumerate(LENGTHS):
        both_backward(plain, parallel, *batch(lengths, seed))
        same_gradients(plain, parallel)
    with torch.no_grad():
        torch.testing.assert_close(parallel(*batch(LENGTHS[1])), plain(*batch(LENGTHS[1])))


def test_an_answer_has_one_program(one: DeviceMesh) -> None:
    parallel = autopar.compile(Asking(longest), one)
    for lengths, count in (((3, 7, 1, 5), 1), ((7, 1, 1, 1), 1), ((6, 6, 6, 6), 2), ((1, 2, 3, 7), 2)):
        parallel(*batch(lengths)).backward()
        assert programs(parallel) == count
    assert any("forward asks what is in its arguments at " in note for note in parallel.plan.notes)


def test_what_may_be_left_open_has_one_program(one: DeviceMesh) -> None:
    def left_open(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        there = torch.arange(STEPS) < lengths.unsqueeze(1)
        return inner(x[there]).square().sum() / lengths.sum().item() + inner(x)[there].mean() / there.sum()

    plain = Asking(left_open)
    parallel = autopar.compile(plain, one)
    for seed, lengths in enumerate(LENGTHS):
        both_backward(plain, parallel, *batch(lengths, seed))
    assert programs(parallel) == 1


def test_many_answers_are_told_of(one: DeviceMesh) -> None:
    parallel = autopar.compile(Asking(longest), one)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in range(2, 8):
            parallel(*batch((1, length, 1, 1)))
    (text,) = {str(one.message) for one in told if "is traced and planned" in str(one.message)}
    assert "for the 4th time" in text and "what forward asks its arguments at " in text and "and was 4" in text
    assert "pad to a few lengths" in text


def test_who_writes_to_an_argument_is_asked_for_what_is_there_then(one: DeviceMesh) -> None:
    def changed(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        lengths = lengths.clone()
        lengths[0] = int(lengths[1])
        return inner(x[:, : int(lengths[0])]).square().mean()

    plain = Asking(changed)
    with pytest.raises(TraceError, match=r"needs a number out of a tensor at once at .*test_asked_arguments.py:\d+"):
        autopar.compile(plain, one)(*batch(LENGTHS[0]))


def by_relu(x: Tensor) -> None:
    functional.relu(x, inplace=True)


def by_a_norm(x: Tensor) -> None:
    functional.batch_norm(torch.randn(5, WIDTH, dtype=x.dtype), x[0, 0], torch.ones_like(x[0, 0]), training=True)


def by_a_view(x: Tensor) -> None:
    x.view(-1)[:3].clamp_(min=0)


@pytest.mark.parametrize("write", [by_relu, by_a_norm, by_a_view])
def test_what_was_written_to_is_not_taken_for_what_came(one: DeviceMesh, write: Callable[[Tensor], None]) -> None:
    def does(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        x = x.clone()
        write(x)
        return inner(x).square().mean() if (x[0, 0] >= 0).all() else inner(x).sum()

    with pytest.raises(TraceError, match="which way forward goes depends on values"):
        autopar.compile(Asking(does), one)(*batch(LENGTHS[0]))


def test_gradients_of_gradients_have_the_same_answers(one: DeviceMesh) -> None:
    plain = Asking(longest)
    parallel = autopar.compile(plain, one)
    for lengths in LENGTHS[:2]:
        found = list[Tensor]()
        for model in (plain, parallel):
            x, given = batch(lengths)
            x.requires_grad_()
            (gradient,) = torch.autograd.grad(model(x, given), x, create_graph=True)
            model.zero_grad()
            gradient.square().sum().backward()
            found.append(gradient.detach())
        torch.testing.assert_close(found[1], found[0])
        same_gradients(plain, parallel)


def test_in_micro_batches_the_whole_batch_is_asked(one: DeviceMesh) -> None:
    plain = Asking(longest)
    parallel = autopar.compile(plain, one, micro_batches=2)
    for seed, lengths in enumerate(LENGTHS):
        both_backward(plain, parallel, *batch(lengths, seed))
        same_gradients(plain, parallel)
