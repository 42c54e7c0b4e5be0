"""Values that conditions choose, and modules or several operators give: each where it is whole, in no call too many."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import TraceError
from autopar._compat import global_forward_hooks
from tests.processes.compare import same_calls
from tests.support.branching import quick_ones


class Gate(nn.Module):
    """A user's own, whose last operator is not its last line, or is."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.layer, self.at_once = nn.Linear(6, 6), at_once

    def forward(self, h: Tensor) -> Tensor:
        if self.at_once:
            return torch.tanh(self.layer(h))
        gated = self.layer(h).sigmoid()
        gated = gated * h
        return gated


class Chooses(nn.Module):
    def __init__(self, form: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form
        self.layer = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.another = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
        self.norm, self.at_once, self.at_last = nn.BatchNorm1d(6), Gate(at_once=True), Gate(at_once=False)

    def twice(self, h: Tensor) -> Tensor:
        more = self.block(h)
        return F.normalize(more + self.at_last(h))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, self.layer(x)).square().mean()


def container(model: Chooses, h: Tensor) -> Tensor:
    return (model.block(h) if h.mean() > 0 else h) + 1


def container_else(model: Chooses, h: Tensor) -> Tensor:
    y = h if h.mean() > 0 else model.block(h)
    return y * y


def two_containers(model: Chooses, h: Tensor) -> Tensor:
    y = model.block(h) if h.mean() > 0 else model.another(h)
    return y + h


def norms(model: Chooses, h: Tensor) -> Tensor:
    return F.gelu(model.norm(h) if h.mean() > 0 else model.block[1](h))


def in_a_list(model: Chooses, h: Tensor) -> Tensor:
    return torch.stack([model.block(one) if one.mean() > 0 else one for one in (h, -h, h * 2)])


def own_module(model: Chooses, h: Tensor) -> Tensor:
    return torch.cat([model.at_last(h) if h.mean() > 0 else model.at_once(h), h])


def own_method(model: Chooses, h: Tensor) -> Tensor:
    return model.norm(h + (model.twice(h) if h.mean() > 0 else h))


def early(model: Chooses, h: Tensor) -> Tensor:
    if h.mean() <= 0:
        return h
    return model.block(h)


def early_own(model: Chooses, h: Tensor) -> Tensor:
    if h.mean() <= 0:
        return h.exp()
    return model.at_last(h)


def of_torchs_functions(model: Chooses, h: Tensor) -> Tensor:
    one = F.normalize(h, dim=-1) if h.mean() > 0 else h
    return one + (2 - h if h.mean() > 0 else F.sigmoid(h)) + (F.layer_norm(h, (6,)) if h.max() > 3 else 1 / h.exp())


def known_at_last(model: Chooses, h: Tensor) -> Tensor:
    return torch.stack([torch.tanh(h * k) if c else h for k, c in enumerate((h.mean() > 0, True, h.max() < 3, False))])


def log_prob(model: Chooses, h: Tensor) -> Tensor:
    return (Normal(h, 1.5).log_prob(h.detach() + 1) if h.mean() > 0 else h) * 2


def in_lines(model: Chooses, h: Tensor) -> Tensor:
    gated = model.block(h)
    gated = gated * 2
    return gated


def named(model: Chooses, h: Tensor) -> Tensor:
    y = in_lines(model, h) if h.mean() > 0 else h
    z = checkpoint(model.another, h, use_reentrant=False) if h.max() < 5 else model.at_last(h)
    return y + z


def named_and_added_up(model: Chooses, h: Tensor) -> Tensor:
    y = sum(model.block(one) for one in (h, -h)) if h.mean() > 0 else sum([model.norm(h), h])
    z = h if h.max() < 5 else sum(map(model.norm, (h, h * 2)))
    return y + z


def named_in_a_loop(model: Chooses, h: Tensor) -> Tensor:
    for layer in (model.block, model.norm, model.another):
        h = layer(h) if h.mean() > 0 or layer(h - 1).max() < 1 else (
            h * 0.5 - 1
        )  # fmt: skip
    return h


def named_by_another(model: Chooses, h: Tensor) -> Tensor:
    y = h

    def more() -> None:
        nonlocal y
        y = model.block(y) if y.mean() > 0 else y * 2

    more(), more()
    return y


def named_together(model: Chooses, h: Tensor) -> Tensor:
    a, (b, c) = (model.block(h), (model.norm(h), h)) if h.mean() > 0 else (h, (h * 2, model.norm(h)))
    y: Tensor = model.block(b) if h.max() < 5 else a
    low, high = h.chunk(2) if h.mean() > 0 else (h[4:], h[:4] * 2)
    one = other = model.another(y + c) if h.mean() < 0 else y
    return one + other + (high - low).sum()


FORMS = {
    one.__name__: one
    for one in (
        container, container_else, two_containers, norms, in_a_list, own_module, own_method, early, early_own,
        of_torchs_functions, known_at_last, log_prob, named, named_and_added_up, named_in_a_loop, named_together,
        named_by_another,
    )
}  # fmt: skip
FIRST = (
    "container",
    "container_else",
    "norms",
    "own_method",
    "early",
    "of_torchs_functions",
    "named",
    "named_and_added_up",
)


def batch(number: int) -> Tensor:
    return torch.randn(8, 6).double() * 3 + (4 if number % 2 else -4)


@pytest.mark.parametrize("name", quick_ones(FORMS, FIRST))
def test_what_is_chosen_is_what_was_computed_as_a_whole(name: str, one: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain = Chooses(FORMS[name]).double()
    same_calls(plain, autopar.compile(copy.deepcopy(plain), one), 4, batch)


def of_code_that_goes_on(model: Chooses, h: Tensor) -> Tensor:
    return h + (in_lines(model, h) if h.mean() > 0 else h)


def computed_again(model: Chooses, h: Tensor) -> Tensor:
    return h + (checkpoint(model.another, h, use_reentrant=False) if h.mean() > 0 else h)


def hooked(model: Chooses, h: Tensor) -> Tensor:
    return h + (model.at_once(h) if h.mean() > 0 else h)


def several_by_one(model: Chooses, h: Tensor) -> Tensor:
    return h + (functools.reduce(operator.add, [h, h.exp(), h * 2]) if h.mean() > 0 else h)


@pytest.mark.parametrize("form", [of_code_that_goes_on, computed_again, hooked, several_by_one])
def test_what_nobody_sees_as_a_whole_is_refused(form: Callable[[Any, Tensor], Tensor], one: DeviceMesh) -> None:
    model = Chooses(form)
    if form is hooked:
        model.at_once.register_forward_hook(lambda module, given, made: made * 2)
    parallel = autopar.compile(model, one)
    with pytest.raises(TraceError, match=r"(?s)nobody can see where that is computed.*give it a name"):
        parallel(batch(0).float())


def test_modules_are_left_as_they_were(one: DeviceMesh) -> None:
    parallel = autopar.compile(Chooses(container).double(), one)
    parallel(batch(0))
    assert not global_forward_hooks
