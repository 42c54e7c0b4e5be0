"""What scripts note on parameters: it stays, as optimizers are made by it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import TraceError
from tests.processes.compare import near


class Noted(nn.Module):
    """As state-space models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
        self.steps._optim = {"weight_decay": 0.0, "lr": 1e-3}
        self.layer.bias._no_weight_decay = True
        self.layer.weight._scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.steps * self.layer.weight._scale).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    every = [*model.parameters()]
    made = torch.optim.AdamW([one for one in every if not hasattr(one, "_optim")], lr=0.1, weight_decay=0.1)
    for one in every:
        if hasattr(one, "_optim"):
            made.add_param_group({"params": [one], **one._optim})
    return made


def test_notes_of_before_compile_are_there(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Noted()
    parallel = autopar.compile(with_notes(copy.deepcopy(plain), plain), one)
    ours, wanted = optimizer_of(parallel), optimizer_of(plain)
    assert len(ours.param_groups) == 2
    for _ in range(3):
        x = torch.randn(4, 3)
        for model, optimizer in ((plain, wanted), (parallel, ours)):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        near(parallel.steps, plain.steps, 1e-6, "steps")
    assert parallel.layer.bias._no_weight_decay and parallel.steps._optim == plain.steps._optim
    parallel.layer.weight._scale = plain.layer.weight._scale = 5.0
    near(parallel(x), plain(x), 1e-6, "loss")


def with_notes(model: nn.Module, of: nn.Module) -> nn.Module:
    """`copy.deepcopy` leaves them out."""
    for name, parameter in model.named_parameters():
        vars(parameter).update(vars(of.get_parameter(name)))
    return model


class Asking(nn.Module):
    """Goes on by what is noted on a parameter, a buffer and an argument, if anything is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        times = 2 if hasattr(self.inner.weight, "is_doubled") else 1
        made = self.inner(x) * times + getattr(self.shift, "_more", 0)
        return (made * getattr(x, "weight", 1.0)).square().sum()


def test_what_is_noted_behind_the_first_call_is_seen(one: DeviceMesh) -> None:
    plain, x = Asking(), torch.randn(3, 4)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for step in range(5):
        given = x.clone()
        for model in (plain, parallel):
            match step:
                case 1:
                    model.inner.weight.is_doubled = True
                case 2:
                    model.shift._more = 3
                case _:
                    pass
        if step in (0, 3):
            given.weight = 1 + step / 2
        torch.testing.assert_close(parallel(given), plain(given))
    given.weight = torch.randn(4)
    with pytest.raises(TraceError, match=r"asks for \.weight of its argument \['x'\] at .*, which is no number"):
        parallel(given)


class Counting(nn.Module):
    def __init__(self, deletes: bool) -> None:
        super().__init__()
        self.inner, self.deletes = nn.Linear(4, 4), deletes

    def forward(self, x: Tensor) -> Tensor:
        if self.deletes:
            del x.weight
        else:
            x.weight = getattr(x, "weight", 0) + 1
        return self.inner(x).sum()


@pytest.mark.parametrize("deletes", [False, True])
def test_notes_that_forward_makes_on_an_argument_are_refused(one: DeviceMesh, deletes: bool) -> None:
    (x := torch.randn(3, 4)).weight = 2
    with pytest.raises(TraceError, match=r"forward changes \.weight of its argument \['x'\]"):
        autopar.compile(Counting(deletes), one)(x)
    assert x.weight == 2
