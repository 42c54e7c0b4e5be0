"""Classes of models with a `__call__` of their own, and what looks at modules: objects of forward, weak references."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near, same_gradients


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls, self.last = 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Scaled(Called):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x * 2)


class Counted(Called):
    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return {"out": super().__call__(*args)}


class Converted(Called):
    def __call__(self, x: Any, *, scale: float = 3.0) -> Tensor:
        self.last = super().__call__(torch.as_tensor(x, dtype=torch.float32)) * scale
        return self.last


class Within(nn.Module):
    """A part of the class of which the whole is none."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.calls, self.last = Scaled(), 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


@pytest.mark.parametrize("kind", [Scaled, Counted, Converted, Within])
def test_a_call_of_their_own_runs_once(kind: type[Any], one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = kind()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x: Any = torch.randn(4, 8)
    for _ in range(2):
        outputs = [model(x.numpy() if kind is Converted else x) for model in (plain, parallel)]
        outputs = [one["out"] if isinstance(one, dict) else one for one in outputs]
        near(outputs[1], outputs[0], 1e-6, "output")
        for output in outputs:
            output.square().mean().backward()
    same_gradients(plain, parallel)
    assert parallel.calls == plain.calls
    near(parallel.last, plain.last, 1e-6, "what it keeps")


class Inverse:
    """As torch's distributions make one of a transform, and keep it there."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.of.shift) * self.of.factor


class Inverted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.factor, self.inverse = nn.Parameter(torch.randn(8)), 2.0, None

    def forward(self, x: Tensor) -> Tensor:
        if self.inverse is None:
            self.inverse: Any = Inverse(self)
        return self.inverse(x).square().mean()


class Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.layer, self.parent = nn.Linear(8, 8), weakref.ref(parent)
        self.all = [self.parent]

    def forward(self, x: Tensor) -> Tensor:
        parent: Any = self.all[0]()
        assert parent is self.parent()
        return self.layer(x) * parent.shift * parent.factor


class Parent(Inverted):
    def __init__(self) -> None:
        super().__init__()
        self.child = Child(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x).square().mean()


@pytest.mark.parametrize("kind", [Inverted, Parent])
def test_what_looks_at_modules_looks_at_the_parallel_ones(kind: type[Any], one: DeviceMesh) -> None:
    made: list[Any] = []
    for _ in range(2):  # a deep copy of a weak reference is that itself
        torch.manual_seed(0)
        made.append(kind())
    models = made[0], autopar.compile(made[1], one)
    plain, parallel = models
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for call in range(4):
        x = torch.randn(4, 8)
        for model in models:
            model.factor = 2.0 if call < 2 else 3.0
        losses = [model(x) for model in (plain, parallel)]
        near(losses[1], losses[0], 1e-5, f"call {call}")
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if kind is Inverted:
        assert parallel.inverse.of is parallel
    else:
        assert parallel.child.parent() is parallel.child.all[0]() is parallel


def test_a_cumulative_average_ends_where_momentum_is_a_number_again(one: DeviceMesh) -> None:
    """`torch.optim.swa_utils.update_bn` sets it to None, and back."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    for momentum in (None, 0.1, None, None, 0.3, 0.1):
        x = torch.randn(6, 4)
        for model in (plain, parallel):
            model[1].momentum = momentum
            model(x)
        near(parallel[1].running_mean, plain[1].running_mean, 1e-5, f"behind momentum {momentum}")


def test_parameters_become_arrays_and_lists(one: DeviceMesh) -> None:
    plain = nn.Linear(4, 4)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for model in (plain, parallel):
        model(torch.arange(8.0).view(2, 4)).sum().backward()
    assert np.array_equal(parallel.weight.detach().numpy(), plain.weight.detach().numpy())
    assert parallel.bias.tolist() == plain.bias.tolist()
    assert plain.weight.grad is not None
    assert np.array_equal(np.asarray(parallel.weight.grad), plain.weight.grad.numpy())
    with pytest.raises(RuntimeError, match=r"Can't call numpy\(\) on Tensor that requires grad"):
        parallel.weight.numpy()


class Filtered(Called):
    def parameters(self, recurse: bool = True) -> Any:
        return iter([self.layer.weight])


class Renamed(Called):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((f"own.{name}", one) for name, one in super().named_parameters(*args, **kwargs))


class Alike(Called):
    def parameters(self, recurse: bool = True) -> Any:
        return (one for one in super().parameters(recurse))


def test_methods_that_give_other_parameters_are_refused(one: DeviceMesh) -> None:
    x = torch.randn(4, 8)
    for kind, name in ((Filtered, "parameters"), (Renamed, "named_parameters")):
        with pytest.raises(
            TraceError, match=rf"{kind.__name__}\.{name}\(\) gives others .* call that method otherwise"
        ):
            autopar.compile(kind(), one)(x)
    plain = Alike()
    near(autopar.compile(copy.deepcopy(plain), one)(x), plain(x), 1e-6, "output")


def test_a_change_in_place_that_pieces_cannot_have_is_not_made_to_a_copy(one: DeviceMesh) -> None:
    parallel = autopar.compile(nn.Linear(8, 4), one)
    parallel(torch.randn(2, 8))
    before = parallel.weight.detach().full_tensor().clone()
    with torch.no_grad(), pytest.raises(NotImplementedError, match="t_"):
        parallel.weight.t_()
    near(parallel.weight.full_tensor(), before, 0.0, "weight")


def test_a_part_is_called_before_the_whole(one: DeviceMesh) -> None:
    """And both go into one loss: what the first call shares over ranks is not written to where it is equal."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
            self.register_buffer("scale", torch.rand(8))

        def encode(self, x: Tensor) -> Tensor:
            return self.first(x) * self.scale

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.encode(x)).square().mean()

    plain, x = Scaled(), torch.randn(3, 8)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for model in (plain, parallel):
        (model.encode(x).square().mean() + model(x)).backward()
    same_gradients(plain, parallel)
