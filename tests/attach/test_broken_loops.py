"""Loops that end by values: solvers with a tolerance, early exits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import TraceError
from autopar.trace import branches
from tests.support.branching import quick_ones
from tests.support.stepping import penalise_alike, train_alike

ROWS, WIDTH, CALLS = 6, 4, 6
Form = Callable[["Layers", Tensor], Tensor]


class Layers(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.layers, self.head, self.form = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
            nn.Linear(4, 1),
            form,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x)


def fixed_point(model: Layers, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(6):
        new = torch.tanh(model.layers[0](z) + x)
        if (new - z).norm() < 1:
            break
        z = new
    return z.square().mean()


def with_its_last_value(model: Layers, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for turn in range(5):  # noqa: B007
        new = torch.tanh(model.layers[0](z) + x)
        if (new - z).abs().max() < 0.5:
            z = new * 2
            break
        z = new
    return z.square().mean() * (turn + 1)


def sinkhorn(model: Layers, x: Tensor) -> Tensor:
    kernel = model.layers[0](x).exp()
    rows = torch.ones(ROWS, dtype=x.dtype)
    for _ in range(8):
        columns = 1 / (kernel.t() @ rows)
        new = 1 / (kernel @ columns)
        error = (new - rows).abs().max()
        rows = new
        if error.item() < 0.05:
            break
    return (rows[:, None] * kernel * columns).square().sum()


def early_exit(model: Layers, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x).tanh()
        if model.head(x).mean().sigmoid() > 0.5:
            break
    return model.head(x).square().mean()


def of_all_exits(model: Layers, x: Tensor) -> Tensor:
    losses = []
    for number, layer in enumerate(model.layers):
        x = layer(x).tanh()
        loss = model.head(x).square().mean() * (number + 1)
        losses.append(loss)
        if loss < 0.2:
            break
    return torch.stack(losses).sum()


def of_each_row(model: Layers, x: Tensor) -> Tensor:
    total = x.new_zeros(())
    for row in x.unbind():
        for layer in model.layers[:2]:
            row = layer(row).tanh()
            if row.sum() > 0:
                break
        total = total + row.square().sum()
    return total


def by_two_conditions(model: Layers, x: Tensor) -> Tensor:
    best = model.layers[0](x).square().mean()
    for number, layer in enumerate(model.layers):
        loss = layer(x).square().mean()
        if loss > best * 1.5:
            break
        if number > 0 and loss < best:
            best = loss
            break
        best = best + loss
        if number == 2:
            break
    return best


def within_a_branch(model: Layers, x: Tensor) -> Tensor:
    h = model.layers[0](x)
    if h.mean() > 0:
        for layer in model.layers[1:]:
            h = layer(h).tanh()
            if h.mean() < 0:
                break
    return h.square().mean()


def in_a_method(model: Layers, x: Tensor) -> Tensor:
    return model.head(refined(model.layers[1], x)).square().mean()


def refined(layer: nn.Module, x: Tensor) -> Tensor:
    for _ in range(3):
        step = layer(x).tanh()
        x = x + step
        if step.norm() < 2:
            break
    return x


def returns_in_it(model: Layers, x: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        x = layer(x).tanh()
        out = model.head(x)
        if out.mean() > 0.2:
            return out.square().mean() * (number + 1)
    return out.square().mean()


def returns_names(model: Layers, x: Tensor) -> Tensor:
    for layer in model.layers:
        y = layer(x)
        if y.mean() > 0.2:
            loss = y.square().sum()
            return loss
        if y.mean() < -0.3:
            return y.sin().sum()
        x = x + y
    loss = x.sum()
    return loss


def returns_in_two(model: Layers, x: Tensor) -> Tensor:
    for layer in model.layers:
        for scale in (1.0, -1.0):
            value = model.head(x * scale).mean()
            if value > 0.3:
                return value * 2
        x = layer(x)
    return x.mean()


def has_an_else(model: Layers, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
        if x.mean() > 0:
            break
    else:
        x = x * 2
    return x.square().sum()


def until_it_is_small(model: Layers, x: Tensor) -> Tensor:
    z, turns = model.layers[0](x), 0
    while z.norm() > 2 and turns < 5:
        z = model.layers[1](z) * 0.5
        turns += 1
    return z.square().mean() * (turns + 1)


def halting(model: Layers, x: Tensor) -> Tensor:
    """Adaptive computation time: A. Graves, arXiv:1603.08983."""
    halted, out, turns = x.new_zeros(len(x)), torch.zeros_like(x), 0
    while turns < 5 and (halted < 1).any():
        x = model.layers[0](x).tanh()
        chance = torch.sigmoid(model.head(x)[:, 0])
        goes_on = (halted + chance < 1).to(x.dtype)
        halted = halted + chance * goes_on
        out = out + x * (chance * goes_on)[:, None]
        turns += 1
    return out.square().mean()


def for_ever_but(model: Layers, x: Tensor) -> Tensor:
    z, turns = torch.zeros_like(x), 0
    while True:
        new = torch.tanh(model.layers[0](z) + x)
        turns += 1
        if (new - z).norm() < 1:
            break
        z = new
        if turns >= 6:
            break
    return z.square().mean() * turns


def either_of_two(model: Layers, x: Tensor) -> Tensor:
    turns = 0
    while True:
        x = model.layers[turns % 2](x).tanh()
        turns += 1
        if x.mean() > 0.1 or turns > 4:
            break
    return x.square().mean() * turns


def while_with_an_else(model: Layers, x: Tensor) -> Tensor:
    z, turns = torch.zeros_like(x), 0
    while turns < 4:
        z = torch.tanh(model.layers[0](z) + x)
        turns += 1
        if z.mean() > 0.1:
            break
    else:
        z = z * 2
    return z.square().mean()


FORMS = [
    fixed_point, with_its_last_value, sinkhorn, early_exit, of_all_exits, of_each_row, by_two_conditions,
    within_a_branch, in_a_method, returns_in_it, returns_names, returns_in_two,
    has_an_else,
    until_it_is_small,
    halting,
    for_ever_but,
    either_of_two,
    while_with_an_else,
]  # fmt: skip


# The others are of what these have already.
FIRST = (
    "fixed_point", "early_exit", "of_all_exits", "of_each_row", "within_a_branch", "returns_in_it", "has_an_else",
    "halting", "for_ever_but",
)  # fmt: skip


@pytest.mark.parametrize("name", quick_ones([form.__name__ for form in FORMS], FIRST))
def test_they_end_where_they_do_on_one_process(one: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    plain = Layers(next(form for form in FORMS if form.__name__ == name)).double()
    batches = [torch.randn(ROWS, WIDTH, dtype=torch.float64) * (0.3 + number / 3) for number in range(CALLS)]
    assert len({*train_alike(plain, autopar.compile(copy.deepcopy(plain), one), batches)}) == CALLS


def test_what_a_loop_has_not_got_to_has_no_gradient(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Layers(early_exit).double()
    parallel, idle = autopar.compile(copy.deepcopy(plain), one), set[int]()
    for _ in range(4 * CALLS):
        penalise_alike(plain, parallel, [torch.randn(ROWS, WIDTH, dtype=torch.float64)])
        idle.add(sum(layer.weight.grad is None for layer in plain.layers))
    assert len(idle) > 1


def returns_in_a_while(model: Layers, x: Tensor) -> Tensor:
    while x.ndim:
        x = model.layers[0](x)
        if x.mean() > 0:
            return x.sum()
    return x


def nothing_else_ends_it(model: Layers, x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = model.layers[0](x) * 0.1
    return x.sum()


def else_of_a_condition(model: Layers, x: Tensor) -> Tensor:
    turns = 0
    while x.norm() > 1 and turns < 4:
        x = model.layers[0](x) * 0.5
        turns += 1
    else:
        x = model.layers[1](x)
    return x.sum()


def goes_on_for_ever(model: Layers, x: Tensor) -> Tensor:
    for _ in itertools.count():
        x = model.layers[0](x).tanh() * 0.5
        if x.norm() < 0.1:
            break
    return x.square().sum()


def not_assigned_ahead(model: Layers, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
        if x.mean() > 0:
            break
        behind = x * 2
    return behind.square().sum()


@pytest.mark.parametrize(
    "form", [returns_in_a_while, nothing_else_ends_it, else_of_a_condition, goes_on_for_ever, not_assigned_ahead]
)
def test_what_is_refused(one: DeviceMesh, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "MOST_TURNS", 8)
    with pytest.raises(TraceError, match=f"which way forward goes depends on values.*{form.__name__}|{__file__}"):
        autopar.compile(Layers(form).double(), one)(torch.randn(ROWS, WIDTH, dtype=torch.float64))
