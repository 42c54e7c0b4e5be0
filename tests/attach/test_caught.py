"""Exceptions that forward raises and catches, or that a script catches."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import TraceError
from tests.processes.compare import both_backward, same_gradients


class Early(Exception):
    def __init__(self, value: Tensor | None = None) -> None:
        super().__init__("early")
        self.value = value


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, ends: bool = False) -> Tensor:
        x = torch.tanh(self.linear(x))
        if ends:
            raise Early(x)
        return x


class Net(nn.Module):
    def __init__(self, form: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.form, self.count = Block(), Block(), form, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x).square().mean()


def early_exit(model: Net, x: Tensor) -> Tensor:
    try:
        return model.second(model.second(model.first(x), ends=True))
    except Early as error:
        assert error.value is not None
        return model.first(error.value) * 2


def features_of_a_hook(model: Net, x: Tensor) -> Tensor:
    def stop(module: nn.Module, given: object, made: Tensor) -> None:
        raise Early(made)

    handle = model.first.linear.register_forward_hook(stop)
    try:
        model.second(model.first(x))
    except Early as error:
        assert error.value is not None
        return error.value * 2
    finally:
        handle.remove()
    return x


def another_signature(model: Net, x: Tensor) -> Tensor:
    try:
        x = model.first(x, mask=None)
    except TypeError:
        x = model.first(x)
    return model.second(x)


@pytest.mark.parametrize("form", [early_exit, features_of_a_hook, another_signature])
def test_they_leave_modules_and_are_caught(one: DeviceMesh, form: Callable[[Net, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    plain = Net(form).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for rows in (3, 4):
        x = torch.randn(rows, 6).double()
        plain.zero_grad(), parallel.zero_grad()
        both_backward(plain, parallel, x, within=1e-12)
        same_gradients(plain, parallel)


class Skip(RuntimeError):
    pass


class Absent(AttributeError, ValueError):
    pass


@pytest.mark.parametrize(
    "kind", [Skip, Absent, NotImplementedError, AttributeError, FileNotFoundError, torch.OutOfMemoryError]
)
def test_scripts_catch_classes_of_any_kind(one: DeviceMesh, kind: type[Exception]) -> None:
    def raises(model: Net, x: Tensor) -> Tensor:
        raise kind("no such batch")

    with pytest.raises(kind, match=r"raise kind.*no such batch") as caught:
        autopar.compile(Net(raises), one)(torch.randn(3, 6))
    assert isinstance(caught.value, TraceError)


def with_a_tensor(model: Net, x: Tensor) -> Tensor:
    return model.first(x, ends=True)


def behind_a_count(model: Net, x: Tensor) -> Tensor:
    model.count += 1
    raise Early


def behind_a_buffer(model: Net, x: Tensor) -> Tensor:
    model.seen += 1
    raise ValueError("too few")


def behind_an_argument(model: Net, x: Tensor) -> Tensor:
    x += 1
    raise KeyError("few")


@pytest.mark.parametrize(
    ("form", "kind", "told"),
    [
        (with_a_tensor, Early, "the tensor in it"),
        (behind_a_count, Early, r"what .* ahead of it \(count\)"),
        (behind_a_buffer, ValueError, r"what .* ahead of it \(seen\)"),
        (behind_an_argument, KeyError, r"what .* ahead of it \(argument \['x'\]\)"),
    ],
)
def test_what_a_script_would_not_have_is_told(
    one: DeviceMesh, form: Callable[[Net, Tensor], Tensor], kind: type[Exception], told: str
) -> None:
    model = Net(form)
    model.register_buffer("seen", torch.zeros(()))
    parallel = autopar.compile(model, one)
    with pytest.raises(
        TraceError, match=rf"at .*test_caught.py.*: {kind.__name__}: .* would not have {told}: raise it ahead"
    ) as caught:
        parallel(torch.randn(3, 6))
    assert not isinstance(caught.value, kind) and parallel.count == parallel.seen == 0
