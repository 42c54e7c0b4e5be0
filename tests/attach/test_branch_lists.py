"""Lists that forward appends to, and numbers that it counts, in branches that are taken by values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import TraceError
from autopar.errors import CheckFailed
from tests.support.branching import Experts, Form, Layer, both_backward, tokens
from tests.support.gathering import FORMS, STEPS


@pytest.mark.parametrize("name", FORMS)
def test_they_are_as_on_one_process(one: DeviceMesh, name: str) -> None:
    plain = Experts(FORMS[name]).double()
    both_backward(plain, autopar.compile(copy.deepcopy(plain), one), STEPS)


def of_some(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    parts = []
    if (chosen == 0).any():
        parts.append(layer.experts[0](x).mean())
    return torch.stack(parts).mean()


def test_putting_nothing_together_is_an_error_as_in_torch(one: DeviceMesh) -> None:
    plain = Experts(of_some).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    both_backward(plain, parallel, ((0, 1), (0,)))
    with pytest.raises(RuntimeError, match="non-empty"):
        plain(*tokens((1,), 0))
    with pytest.raises(CheckFailed, match=r"puts a list together at .* that is empty in this call"):
        parallel(*tokens((1,), 0))


def takes_the_last(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    parts = [x]
    if (chosen == 0).any():
        parts.append(layer.experts[0](x))
    return parts[-1]


def under_another_name(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    parts = [x]
    others = parts
    if (chosen == 0).any():
        parts.append(layer.experts[0](x))
    return sum(others)


def loops_over_it(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    parts = [x]
    if (chosen == 0).any():
        parts.append(layer.experts[0](x))
    for one in parts:
        x = x + one
    return x


def of_the_model(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    parts = layer.__dict__.setdefault("parts", [])
    if (chosen == 0).any():
        parts.append(layer.experts[0](x))
    return sum(parts)


def _added(parts: list[Tensor]) -> Tensor:
    return sum(parts)  # type: ignore[return-value]


def handed_to_another(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    parts = [x]
    if (chosen == 0).any():
        parts.append(layer.experts[0](x))
    return _added(parts)


def looked_at_later(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    parts = [x]
    if (chosen == 0).any():
        parts.append(layer.experts[0](x))
    return (lambda: sum(parts))()


def sized_by_it(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    parts = []
    if (chosen == 0).any():
        parts.append(layer.experts[0](x))
    return x + x.new_zeros(len(parts)).sum()


def counted_turns(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    number = 1
    if (chosen == 0).any():
        number += 1
    for _ in range(number):
        x = layer.experts[0](x)
    return x


MORE = "it appends to 'parts', with which the function does more than"
NOT = {
    takes_the_last: MORE,
    under_another_name: MORE,
    loops_over_it: MORE,
    of_the_model: MORE,
    handed_to_another: MORE,
    looked_at_later: MORE,
    sized_by_it: "a number out of a tensor is given to new_zeros|depends on values",
    counted_turns: "forward needs a number out of a tensor at once",
}


@pytest.mark.parametrize("form", NOT)
def test_what_nobody_follows_is_told(one: DeviceMesh, form: Form) -> None:
    with pytest.raises(TraceError, match=NOT[form]):
        autopar.compile(Experts(form).double(), one)(*tokens((0, 1), 0))
