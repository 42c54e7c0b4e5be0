"""What forward asks its arguments, and goes on by the answer: each answer has a program of its own."""

from __future__ import annotations

import copy
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
import autopar.attach.programs
from autopar import TraceError
from tests.processes.compare import both_backward, same_gradients
from tests.support.ragged import FORMS, LENGTHS, STEPS, WIDTH, Asking, Form, batch, longest


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


def of_a_list(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """Numbers as keys, in sets and tables, and in text that is one."""
    rows, counts = defaultdict[int, list[int]](list), Counter(lengths.tolist())
    for place, length in enumerate(lengths.tolist()):
        rows[length].append(place)
    loss = sum(inner(x[rows[length]]).mean().square() for length in sorted(set(lengths.tolist())))
    n = lengths.max().item()
    heads = {"of 7": 2.0, "of 8": 3.0}
    factor = heads.get(f"of {n}", 1.0) * (2 if str(int(lengths.min())) in ("1", "5") else 1)
    return loss * {7: 2, 3: 5}.get(n, 1) * max(counts.values()) * factor * (4 if n in {1, 7} else 1)


def of_truths(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    is_long = (lengths > 7).any().item()
    h = inner(x) * (2 if is_long is True else 1)
    if 2 in lengths or torch.equal(lengths, lengths.flip(0)):
        h = h + 1
    return h.square().mean()


def behind_writes(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    lengths = lengths.clone()
    lengths[lengths > 5] = 5
    lengths[0] = int(lengths[1])
    lengths.add_(1).clamp_(max=6)
    ends = functional.pad(lengths, (1, 0)).cumsum(0).tolist()
    return inner(x.flatten(0, 1)[: ends[-1]]).square().mean() + inner(x[:, : lengths.min()]).sum()


@pytest.mark.parametrize("form", [of_a_list, of_truths, behind_writes])
def test_numbers_are_what_they_are_with_torch(one: DeviceMesh, form: Form) -> None:
    plain = Asking(form)
    parallel = autopar.compile(plain, one)
    for seed, lengths in enumerate(LENGTHS):
        both_backward(plain, parallel, *batch(lengths, seed))
        same_gradients(plain, parallel)


def test_what_is_printed_asks_nothing(one: DeviceMesh, capsys: pytest.CaptureFixture[str]) -> None:
    def prints(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        print(f"{lengths.max().item()} of", lengths.sum().item())
        return inner(x).square().mean() * lengths.max().item()

    parallel = autopar.compile(Asking(prints), one)
    for lengths in LENGTHS:
        parallel(*batch(lengths))
    assert programs(parallel) == 1 and capsys.readouterr().out == "(a value of each call) of (a value of each call)\n"


def test_numbers_of_parameters_are_no_keys(one: DeviceMesh) -> None:
    def keyed(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        h = inner(x)
        return h.sum() * {1: 2.0}.get((h > 0).sum().item(), 1.0)

    with pytest.raises(TraceError, match="needs a number out of a tensor at once"):
        autopar.compile(Asking(keyed), one)(*batch(LENGTHS[0]))


def test_arrays_of_arguments_are_not_written_to(one: DeviceMesh) -> None:
    def written(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        array = lengths.numpy()
        np.minimum(array, 3, out=array)
        return inner(x[:, : int(lengths.max())]).sum()

    with pytest.raises(TraceError, match="numpy"):
        autopar.compile(Asking(written), one)(*batch(LENGTHS[0]))


def test_a_size_that_hangs_on_parameters_is_named(one: DeviceMesh) -> None:
    def sized(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        return inner(x).sum() + torch.zeros(2 * (inner(x) > 0).sum().item(), 2).sum()

    with pytest.raises(TraceError, match=r"needs a number out of a tensor at once at .*test_asked_arguments.py"):
        autopar.compile(Asking(sized), one)(*batch(LENGTHS[0]))


def test_the_answer_that_was_asked_longest_ago_goes_first(one: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopar.attach.programs, "ANSWERS", 2)
    parallel = autopar.compile(Asking(longest), one)
    for length in (3, 4, 3, 5, 3):
        parallel(*batch((length, 1, 1, 1)))
    ((_, kept),) = parallel._autopar.programs.items()
    answers = [value for one in kept for value, *_ in one.asked.answers.values()]
    assert answers == [3, 5]


def by_relu(x: Tensor) -> None:
    functional.relu(x, inplace=True)


def by_a_norm(x: Tensor) -> None:
    functional.batch_norm(
        torch.linspace(-2, 3, 5 * WIDTH, dtype=x.dtype).view(5, WIDTH), x[0, 0], torch.ones_like(x[0, 0]), training=True
    )


def by_torchs_norm(x: Tensor) -> None:
    given = (
        torch.linspace(-2, 3, 5 * WIDTH, dtype=x.dtype).view(5, WIDTH),
        None,
        None,
        x[0, 0],
        torch.ones_like(x[0, 0]),
    )
    torch.batch_norm(*given, True, 0.1, 1e-5, False)


def by_a_view(x: Tensor) -> None:
    x.view(-1)[:3].clamp_(min=0)


@pytest.mark.parametrize("write", [by_relu, by_a_norm, by_torchs_norm, by_a_view])
def test_what_was_written_to_is_not_taken_for_what_came(one: DeviceMesh, write: Callable[[Tensor], None]) -> None:
    def does(inner: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        x = x.clone()
        write(x)
        return inner(x).square().mean() if (x[0, 0] >= 0).all() else inner(x).sum()

    plain = Asking(does)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for lengths in LENGTHS[:2]:
        both_backward(plain, parallel, *batch(lengths))
        same_gradients(plain, parallel)


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
