"""Streamed steps an optimizer for some of its parameters after the other: what it keeps in its groups, and copies."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import optim
from autopar.optim import Streamed
from tests.processes.compare import loss_of
from tests.saving.test_updates import compiled, drawn, local


class Counted(torch.optim.Optimizer):
    """Adam's correction with its count of steps in the group, as third parties have it."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    p.sub_(state["mean"] / (1 - 0.9 ** group["count"]), alpha=group["lr"])


class Summed(Counted):
    """Its rate comes of all gradients of a group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 1e-3 * sum(p.grad.square().sum().item() for p in group["params"] if p.grad is not None)
        super().step()


def _trained(parallel: Any, optimizer: torch.optim.Optimizer, batch: Any, steps: int) -> list[torch.Tensor]:
    for _ in range(steps):
        loss_of(parallel(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [local(parameter.detach()) for parameter in parallel.parameters()]


@pytest.mark.parametrize(("name", "seed"), [("mlp", 1), ("block", 3)])
def test_a_step_is_counted_once(one: DeviceMesh, name: str, seed: int) -> None:
    model, batch, plan = drawn(name, seed)
    assert {"host", "stream"} & {*plan.residence.values()}, "nothing is updated apart"
    told: list[list[torch.Tensor]] = []
    for wrapped in (False, True):
        parallel = compiled(model, batch, one, plan)
        made = Counted(parallel.parameters())
        told.append(_trained(parallel, Streamed(made, parallel) if wrapped else made, batch, 3))
        assert [group["count"] for group in made.param_groups] == [3]
    assert all(map(torch.equal, *told))


def test_a_rate_of_all_gradients_is_refused(one: DeviceMesh) -> None:
    model, batch, plan = drawn("mlp", 1)
    parallel = compiled(model, batch, one, plan)
    optimizer = Streamed(Summed(parallel.parameters()), parallel)
    loss_of(parallel(**batch)).backward()
    with pytest.raises(RuntimeError, match="Summed makes 'lr' of its param_groups out of all parameters of a group"):
        optimizer.step()


def test_a_copy_of_module_and_optimizer_goes_on_by_itself(one: DeviceMesh) -> None:
    model, batch, plan = drawn("mlp", 1)
    parallel: nn.Module = compiled(model, batch, one, plan)
    optimizer = Streamed(torch.optim.AdamW(parallel.parameters(), 1e-2), parallel)
    _trained(parallel, optimizer, batch, 2)
    other, others = copy.deepcopy((parallel, optimizer))
    wanted = _trained(parallel, optimizer, batch, 2)
    assert all(map(torch.equal, _trained(other, others, batch, 2), wanted))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"amsgrad": True}])
def test_beside_gpus_the_host_updates_by_fused_kernels_with_all_processors(
    one: DeviceMesh, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], overlap: bool
) -> None:
    """Where nobody said how; the plain way differs in rounding. A mesh of CPUs stands for one of GPUs here."""
    model, batch, plan = drawn("mlp", 1)
    assert "host" in plan.residence.values()
    fused = list[tuple[bool, int]]()
    adam: Any = sys.modules[torch.optim.Adam.__module__]
    kernel = adam.adam

    def seen(*args: Any, **kwargs: Any) -> Any:
        fused.append((bool(kwargs["fused"]), torch.get_num_threads()))
        return kernel(*args, **kwargs)

    monkeypatch.setattr(adam, "adam", seen)
    monkeypatch.setattr(optim, "host_threads", lambda elements: 1 if elements < 30 else before + 2)
    before, told = torch.get_num_threads(), list[list[torch.Tensor]]()
    for beside in (False, True):
        monkeypatch.setattr(Streamed, "_beside_gpus", property(lambda _, beside=beside: beside))
        parallel = compiled(model, batch, one, plan)
        made = Streamed(torch.optim.AdamW(parallel.parameters(), 1e-2, **options), parallel, overlap=overlap)
        told.append(_trained(parallel, made, batch, 3))
        assert made.param_groups[0]["fused"] is None and torch.get_num_threads() == before
        assert any(way for way, _ in fused) == (beside and "foreach" not in options)
        assert {threads for _, threads in fused} == ({before, before + 2} if beside else {before})
    for ours, theirs in zip(*told, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam])
def test_beside_gpus_optimizers_whose_kernels_dtensors_lack_update_as_ever(
    one: DeviceMesh, monkeypatch: pytest.MonkeyPatch, make: Any, overlap: bool
) -> None:
    model, batch, plan = drawn("mlp", 1)
    told = list[list[torch.Tensor]]()
    for beside in (False, True):
        monkeypatch.setattr(Streamed, "_beside_gpus", property(lambda _, beside=beside: beside))
        parallel = compiled(model, batch, one, plan)
        made = Streamed(make(parallel.parameters(), 1e-2), parallel, overlap=overlap)
        told.append(_trained(parallel, made, batch, 3))
    for ours, theirs in zip(*told, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
