"""Lists that forward appends to, and numbers that it counts, in branches that are taken by values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import TraceError
from autopar.errors import CheckFailed
from tests.processes.compare import whole
from tests.support.assigning import STEPS
from tests.support.branching import Experts, Form, Layer, alike, both_backward, quick_ones, tokens
from tests.support.gathering import FORMS

# The others are of what these have already.
FIRST = (
    "stacks", "adds_up", "returns_where_there_are_none", "appends_either_way", "within_one_another", "goes_on_or_does",
    "entries_either_way", "entries_of_an_argument", "attributes", "counts_and_asks", "divides_by_what_it_counts",
    "numbers_in_place", "skips_within_what_is_known",
)  # fmt: skip


@pytest.mark.parametrize("name", quick_ones(FORMS, FIRST))
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


def made_ahead(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    mask, parts = chosen == 0, [x.mean()]
    mean = (layer.experts[0](x).mean(-1) * mask).sum() / mask.sum()
    if mask.any():
        parts.append(mean)
    return torch.stack(parts).mean()


def test_what_is_made_ahead_and_appended_has_to_be_finite(one: DeviceMesh) -> None:
    plain = Experts(made_ahead).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    both_backward(plain, parallel, ((0, 1), (0,)))
    with pytest.raises(CheckFailed, match="is not finite in this call, which does not take it"):
        parallel(*tokens((1,), 0))


class Skipping(nn.Module):
    """Blocks with batch norms, which are skipped where `bias` says so."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6, momentum=momentum), nn.ReLU())
            for _ in range(2)
        )

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.first(x).transpose(1, 2)
        for block in self.blocks:
            if self.training and h.mean() + bias > 0:
                continue
            h = h + block(h)
        return h.square().mean()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_batches_that_were_not_skipped(one: DeviceMesh, momentum: float | None) -> None:
    plain = Skipping(momentum).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for bias in (9.0, -9.0, 9.0, -9.0):
        x, bias = torch.randn(4, 5, 6, dtype=torch.float64), torch.tensor(bias, dtype=torch.float64)
        for model in (plain, parallel):
            model.zero_grad()
            model(x, bias).backward()
        alike(plain, parallel)
        for (name, mine), (_, theirs) in zip(plain.named_buffers(), parallel.named_buffers(), strict=True):
            torch.testing.assert_close(whole(theirs), mine, rtol=1e-9, atol=1e-11, msg=name)
    assert not torch.equal(plain.blocks[0][1].running_mean, torch.zeros(6).double())


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


def two_names_of_one(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    parts = others = [x]
    if (chosen == 0).any():
        parts.append(layer.experts[0](x))
    return sum(others)


def asks_which(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    found = False
    if (chosen == 0).any():
        found = True
    return x * 2 if found is True else x


def matches(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    found = False
    if (chosen == 0).any():
        found = True
    match found:
        case True:
            return x * 2
        case _:
            return x


def of_what_dims(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    parts = []
    if (chosen == 0).any():
        parts.append(layer.experts[0](x).mean(0))
    return x.mean() + sum(parts)


def in_what_order(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    losses = {}
    if (chosen == 0).any():
        losses["a"] = x.mean()
        losses["b"] = x.sum()
    else:
        losses["b"] = x.sum()
        losses["a"] = x.mean()
    return torch.stack([*losses.values()])


def at_what_key(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    places, losses = {"at": "a"}, {"a": x.mean(), "b": x.sum()}
    if (chosen == 0).any():
        places["at"] = "b"
        losses[places["at"]] = layer.experts[0](x).mean()
    return losses["a"] + losses["b"]


def key_of_text(layer: Layer, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    number = 0
    if (chosen == 0).any():
        number += 1
    return x * {"0": 2.0, "1": 3.0}.get(str(number), 5.0)


MORE = "it appends to 'parts', with which the function does more than"
NOT = {
    takes_the_last: MORE,
    under_another_name: MORE,
    loops_over_it: MORE,
    of_the_model: MORE,
    handed_to_another: MORE,
    looked_at_later: MORE,
    two_names_of_one: MORE,
    asks_which: "the function asks which object 'found' is, which it assigns",
    matches: "the function asks which object 'found' is, which it assigns",
    of_what_dims: "adds up a list .* in which tensors with dims, or of several dtypes, may be or not",
    in_what_order: "in another order than where that is not taken",
    at_what_key: "it writes to losses, which is no tensor that is there as a whole",
    key_of_text: "which way forward goes depends on values",
    sized_by_it: "forward needs a number out of a tensor at once at .*new_zeros",
    counted_turns: "forward needs a number out of a tensor at once",
}


@pytest.mark.parametrize("form", NOT)
def test_what_nobody_follows_is_told(one: DeviceMesh, form: Form) -> None:
    with pytest.raises(TraceError, match=NOT[form]):
        autopar.compile(Experts(form).double(), one)(*tokens((0, 1), 0))
