"""Packed sequences, in whose place there is the padded batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import autopar
from autopar.errors import CheckFailed, TraceError
from tests.processes.compare import same_steps
from tests.support.packed import BATCH, LENGTHS, STEPS, WIDTH, Captions, Longer, Packed, batch

CASES: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"batch_first": True}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {"batch_first": True, "nonlinearity": "relu"}),
    "lstm two layers both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "gru two layers both ways": (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_packed_sequences_have_the_numbers_of_torch(one: DeviceMesh, case: str) -> None:
    kind, options = CASES[case]
    plain = Packed(kind, **options).double()
    parallel = autopar.compile(plain, one)
    same_steps(plain, parallel, batch(), steps=2)
    same_steps(plain, parallel, batch((7, 1, 1, 7, 6, 2, 3, 3), seed=1))


@pytest.mark.parametrize("given", ["sorted", "numbers", "a state"])
def test_lengths_and_states_as_scripts_give_them(one: DeviceMesh, given: str) -> None:
    plain, data = Packed(nn.GRU, is_sorted=given == "sorted"), batch()
    if given == "sorted":
        data = batch(tuple(sorted(LENGTHS, reverse=True)))
    if given == "numbers":
        data["lengths"] = [*LENGTHS]
    if given == "a state":
        data["state"] = torch.randn(1, BATCH, WIDTH)
    same_steps(plain, autopar.compile(plain, one), data, steps=2)


def test_a_loss_of_packed_outputs(one: DeviceMesh) -> None:
    plain = Captions()
    same_steps(plain, autopar.compile(plain, one), batch(), steps=2)


def test_outputs_may_be_longer(one: DeviceMesh) -> None:
    plain, data = Longer(), {"x": torch.randn(3, 5, WIDTH), "lengths": torch.tensor([2, 4, 1])}
    same_steps(plain, autopar.compile(plain, one), data, steps=2)


def test_what_lies_behind_a_sequence_reaches_nobody(one: DeviceMesh) -> None:
    plain, data = Longer(), {"x": torch.randn(3, 5, WIDTH), "lengths": torch.tensor([2, 4, 1])}
    for row, length in enumerate(data["lengths"].tolist()):
        data["x"][row, length:] = float("nan")
    same_steps(plain, autopar.compile(plain, one), data, steps=2)


def test_micro_batches_know_the_longest_sequence_of_all(one: DeviceMesh) -> None:
    plain = Packed(nn.LSTM, bidirectional=True)
    parallel = autopar.compile(plain, one, micro_batches=4)
    same_steps(plain, parallel, batch((7, 3, 5, 1, 2, 2, 6, 4)), steps=2)


@pytest.mark.parametrize(
    ("lengths", "is_sorted", "told"),
    [
        (LENGTHS, True, r"lengths are sorted.*they are not: sort the batch, or pass enforce_sorted=False"),
        ((7, 0, 1, 1, 1, 1, 1, 1), False, "a length that is less than 1"),
        ((8, 7, 1, 1, 1, 1, 1, 1), False, "more than the 7 steps of its batch"),
    ],
)
def test_what_torch_refuses_is_an_error(one: DeviceMesh, lengths: tuple[int, ...], is_sorted: bool, told: str) -> None:
    parallel = autopar.compile(Packed(nn.LSTM, is_sorted), one)
    with pytest.raises(CheckFailed, match=told):
        parallel(**batch(lengths))


def test_lengths_that_are_computed_of_values_have_a_sequence_of_all_steps(one: DeviceMesh) -> None:
    class Computed(Packed):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> Any:
            more = (self.head.weight.detach().max() > 100).long()
            return super().forward(x, lengths + more, y)

    parallel = autopar.compile(Computed(nn.LSTM, False), one)
    with pytest.raises(CheckFailed, match=r"pad_packed_sequence at .* no sequence has so many: pass total_length="):
        parallel(**batch((6, 5, 4, 3, 2, 1, 1, 1)))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_what_is_not_packed_says_so(one: DeviceMesh) -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Packed(nn.LSTM, proj_size=2)
            self.inner.head = nn.Linear(2, 10)

        def forward(self, **data: Any) -> Any:
            return self.inner(**data)

    with pytest.raises(TraceError, match=r"with projections \(proj_size\).* give it the padded batch"):
        autopar.compile(Projected(), one)(**batch())
    with pytest.raises(TraceError, match=r"was given lengths of shape \[4\] for a batch of 8"):
        autopar.compile(Packed(nn.LSTM), one)(**batch() | {"lengths": torch.ones(4, dtype=torch.long)})


def test_what_was_packed_outside_says_to_pack_it_in_forward(one: DeviceMesh) -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(WIDTH, WIDTH)

        def forward(self, packed: Any) -> Any:
            return self.inner(packed)[1][0].sum()

    given = pack_padded_sequence(torch.randn(STEPS, BATCH, WIDTH), torch.tensor(LENGTHS), enforce_sorted=False)
    with pytest.raises(TraceError, match=r"a recurrent layer reads a PackedSequence at .* pack them in forward"):
        autopar.compile(Read(), one)(given)


class Shown(nn.Module):
    """What a script does with the order of what is packed."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner, self.form = nn.GRU(WIDTH, WIDTH, batch_first=True), form

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        weights = torch.arange(1.0, len(x) + 1)
        match self.form:
            case "sorted":
                return (self.inner(packed)[1][0].square().mean(1)[packed.sorted_indices] * weights).sum()
            case "sorted back":
                return (
                    self.inner(packed)[1][0].square().mean(1).index_select(0, packed.unsorted_indices) * weights
                ).sum()
            case "sizes":
                return self.inner(packed)[0].data.square().sum() / packed.batch_sizes.sum()
            case "without":
                return self.inner(PackedSequence(packed.data, packed.batch_sizes))[1].sum()
            case "padded without":
                return pad_packed_sequence(PackedSequence(packed.data, packed.batch_sizes))[0].sum()
            case _:
                other = pack_padded_sequence(x, lengths.flip(0), batch_first=True, enforce_sorted=False)
                return self.inner(PackedSequence(packed.data, *other[1:]))[1].sum()


@pytest.mark.parametrize("form", ["sorted", "sorted back", "sizes"])
def test_the_order_is_there_for_who_asks(one: DeviceMesh, form: str) -> None:
    plain, data = Shown(form), {"x": torch.randn(4, 5, WIDTH), "lengths": torch.tensor([2, 5, 1, 4])}
    same_steps(plain, autopar.compile(plain, one), data, steps=2)


@pytest.mark.parametrize("form", ["without", "padded without", "of another"])
def test_what_is_put_together_of_several_is_refused(one: DeviceMesh, form: str) -> None:
    with pytest.raises(TraceError, match=r"a PackedSequence at .* pass on all of them"):
        autopar.compile(Shown(form), one)(torch.randn(4, 5, WIDTH), torch.tensor([2, 5, 1, 4]))


@pytest.mark.parametrize("is_sorted", [True, False])
def test_outputs_lie_in_memory_as_with_torch(one: DeviceMesh, is_sorted: bool) -> None:
    """So that dropout behind them draws the same."""

    class Tagger(Packed):
        def forward(self, x: Any, lengths: Any, y: Any, state: Any = None) -> torch.Tensor:
            packed = pack_padded_sequence(self.words(x), lengths, True, self.is_sorted)
            made, _ = pad_packed_sequence(self.inner(packed)[0], batch_first=True)
            return self.head(nn.functional.dropout(made, 0.5, self.training)).square().mean()

    plain = Tagger(nn.LSTM, is_sorted, batch_first=True)
    parallel, losses = autopar.compile(plain, one), []
    for model in (plain, parallel):
        torch.manual_seed(5)
        losses.append(model(**batch(tuple(sorted(LENGTHS, reverse=True)))))
    torch.testing.assert_close(losses[1], losses[0])


class Dropped(Captions):
    """Of packed rows, before and behind the layer."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        made, _ = self.inner(PackedSequence(self.dropout(self.words(packed.data)), *packed[1:]))
        return self.head(self.dropout(made.data)).square().mean()


@pytest.mark.parametrize("model", [Packed(nn.GRU, num_layers=2, dropout=0.5), Dropped(0.5)])
def test_dropout_of_what_is_packed_is_told(one: DeviceMesh, model: nn.Module) -> None:
    parallel = autopar.compile(model, one)
    drawn = {parallel(**batch()).item() for _ in range(3)}
    assert len(drawn) == 3
    assert any("is drawn for all rows" in note for note in parallel.plan.notes)


def test_dropout_that_drops_nothing_is_none(one: DeviceMesh) -> None:
    plain = Dropped(0.0)
    same_steps(plain, autopar.compile(plain, one), batch(), steps=2)
