"""Where hooks keep tensors and a compiled step cannot write to: refused with a sentence, never left without values."""

from __future__ import annotations

import copy
import queue
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near

KEPT = types.ModuleType("kept_by_name")
Keep = Callable[[nn.Module, Tensor], Any]


class Store:
    last: Tensor | None = None


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def on_a_function() -> Keep:
    def keep(module: nn.Module, made: Tensor) -> None:
        keep.last = made  # type: ignore[attr-defined]

    return keep


def by_weak_keys() -> Keep:
    table: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()
    return table.__setitem__


def in_a_queue() -> Keep:
    kept: queue.Queue[Tensor] = queue.Queue()
    return lambda module, made: kept.put(made)


def on_a_class() -> Keep:
    name = "last"
    return lambda module, made: setattr(Store, name, made)


def in_a_module_of_python() -> Keep:
    return lambda module, made: setattr(KEPT, "last", made)


def among_globals() -> Keep:
    def keep(module: nn.Module, made: Tensor) -> None:
        globals()["LAST"] = made

    return keep


@pytest.mark.parametrize(
    "way", [on_a_function, by_weak_keys, in_a_queue, on_a_class, in_a_module_of_python, among_globals]
)
def test_what_nobody_sees_is_refused(one: DeviceMesh, way: Callable[[], Keep]) -> None:
    model, keep = net(), way()

    def hook(module: nn.Module, given: Any, made: Tensor) -> None:
        keep(module, made.detach())

    model[1].register_forward_hook(hook)
    parallel = autopar.compile(model, one)
    try:
        with pytest.raises(TraceError, match="keeps a tensor where a compiled step cannot write to"):
            parallel(torch.randn(4, 8))
    finally:
        Store.last = None
        globals().pop("LAST", None)
        vars(KEPT).pop("last", None)


def test_an_attribute_of_a_parameter_is_refused(one: DeviceMesh) -> None:
    model = net()
    model[2].register_forward_hook(lambda module, given, made: setattr(module.weight, "acts", given[0].detach()))
    parallel = autopar.compile(model, one)
    with pytest.raises(TraceError, match=r"keeps a tensor as 2\.weight\.acts"):
        parallel(torch.randn(4, 8))


def trains_alike(one: DeviceMesh, hang: Callable[[nn.Sequential], Callable[[], Any]], model: nn.Sequential) -> None:
    """Three steps, beside plain torch, of what `hang`'s hooks leave."""
    plain = copy.deepcopy(model)
    parallel = autopar.compile(model, one)
    takes = [(parallel, hang(parallel)), (plain, hang(plain))]  # type: ignore[arg-type]
    for step in range(3):
        x, kept = torch.randn(4, 8), list[Tensor]()
        for one_of, take in takes:
            take()
            one_of(x).square().mean().backward()
            kept.append(take())
        near(kept[0], kept[1], 1e-6, f"step {step}")


def test_objects_of_code_without_a_file_have_their_values(one: DeviceMesh) -> None:
    """As of a module that is loaded by hand: its class names a module that `sys.modules` does not have."""
    made: dict[str, Any] = {"__name__": "loaded_by_hand"}
    exec("class Trace:\n    def __init__(self): self.output = None", made)
    assert "loaded_by_hand" not in sys.modules

    def hang(model: nn.Sequential) -> Callable[[], Any]:
        trace = made["Trace"]()
        model[1].register_forward_hook(lambda module, given, made: setattr(trace, "output", made.detach()))
        return lambda: trace.output

    trains_alike(one, hang, net())


def test_a_sum_that_the_loop_sets_to_zero(one: DeviceMesh) -> None:
    def hang(model: nn.Sequential) -> Callable[[], Any]:
        total: dict[str, Any] = {}

        def hook(module: nn.Module, given: Any, made: Tensor) -> None:
            total["reg"] = total["reg"] + made.abs().mean()

        for part in model[:2]:
            part.register_forward_hook(hook)

        def take() -> Any:
            last, total["reg"] = total.get("reg"), 0.0
            return last

        return take

    trains_alike(one, hang, net())


def test_a_deep_copy_of_what_a_layer_gives(one: DeviceMesh) -> None:
    def hang(model: nn.Sequential) -> Callable[[], Any]:
        found: list[Tensor] = []
        model[1].register_forward_hook(lambda module, given, made: found.append(copy.deepcopy(made.detach())))
        return lambda: found.pop() if found else None

    trains_alike(one, hang, net())


def test_a_part_of_the_model_may_be_the_hook_of_another(one: DeviceMesh) -> None:
    class Steer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.randn(8))

        def forward(self, module: nn.Module, given: Any, made: Tensor) -> Tensor:
            return made + self.by

    class Steered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.steer = net(), Steer()
            self.net[0].register_forward_hook(self.steer)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).square().mean()

    plain = Steered()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    x = torch.randn(4, 8)
    for model in (parallel, plain):
        model(x).backward()
    near(parallel.steer.by.grad, plain.steer.by.grad, 1e-6, "gradient of the part that is a hook")


def test_an_average_of_numbers_that_goes_on_is_refused(one: DeviceMesh) -> None:
    """It begins with 0, as a sum does that the loop begins anew; the second call finds what the first one left."""
    average = {"size": 0.0}

    def hook(module: nn.Module, given: Any, made: Tensor) -> None:
        average["size"] = 0.9 * average["size"] + 0.1 * made.abs().mean().item()

    model = net()
    model[1].register_forward_hook(hook)
    parallel = autopar.compile(model, one)
    parallel(torch.randn(4, 8))
    assert average["size"] > 0
    with pytest.raises(TraceError, match="computes with what is in average as the last call has left it"):
        parallel(torch.randn(4, 8))
