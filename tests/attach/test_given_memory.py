"""`memory=`, `optimizer=` and `hardware=` beside a plan that is given; `memory=` on hardware that takes some."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.search.reserved import LEFT, RESERVED
from tests.processes.models import batch, net


def test_a_given_plan_that_needs_more_than_memory_is_refused_at_once(one: DeviceMesh) -> None:
    plan = autopar.compile(net(), one, example_kwargs=batch()).plan
    assert plan is not None
    peak = plan.peak_bytes["hbm"]
    with pytest.raises(ValueError, match=rf"the plan needs .* of each rank's device, and memory={peak - 1} allows"):
        autopar.compile(net(), one, plan=plan, memory=peak - 1)
    enough = autopar.compile(net(), one, plan=plan, memory=peak, example_kwargs=batch())
    assert enough.plan == plan
    assert autopar.compile(net(), one, plan=plan, example_kwargs=batch()).plan == plan, "nobody said how much"


def test_another_optimizer_or_hardware_than_the_plans_is_refused_by_name(one: DeviceMesh) -> None:
    plan = autopar.compile(net(), one, example_kwargs=batch(), optimizer="sgd", hardware="a100-40gb").plan
    assert plan is not None
    with pytest.raises(autopar.PlanMismatch, match="optimizer='adamw' was asked for, and the plan was made for 'sgd'"):
        autopar.compile(net(), one, plan=plan, optimizer="adamw")
    with pytest.raises(autopar.PlanMismatch, match=r"hardware='cpu-gloo' .* the plan was priced on 'a100-40gb'"):
        autopar.compile(net(), one, plan=plan, hardware="cpu-gloo")
    same = autopar.compile(
        net(), one, plan=plan, example_kwargs=batch(), optimizer="sgd", hardware="a100-40gb", memory="1GiB"
    )
    assert same.plan == plan
    assert autopar.compile(net(), one, plan=plan, example_kwargs=batch()).plan == plan, "nobody said for what"


def test_a_plan_for_gpus_leaves_room_and_says_so(one: DeviceMesh) -> None:
    options = {"example_kwargs": batch(), "hardware": "h100-sxm"}
    plan = autopar.compile(net(), one, memory="2GiB", **options).plan  # type: ignore[arg-type]
    assert plan is not None and plan.memory_limit == pytest.approx(2**31 - float(plan.search[LEFT]), abs=1)
    assert plan.peak_bytes["hbm"] < float(plan.search[RESERVED]) < 2**31
    with pytest.raises(
        autopar.Infeasible, match=r"in 100 MiB per rank: 150 MiB are taken before a tensor is held, for .*; give more"
    ):
        autopar.compile(net(), one, memory="100MiB", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"memory '90GiB' is 90\.0 GiB, and a device of h100-sxm has 80\.0 GiB"):
        autopar.compile(net(), one, memory="90GiB", **options)  # type: ignore[arg-type]


def test_on_a_cpu_all_of_it_is_the_plans(one: DeviceMesh) -> None:
    plan = autopar.compile(net(), one, memory="1GiB", example_kwargs=batch()).plan
    assert plan is not None and plan.memory_limit == 2**30 and LEFT not in plan.search


class Cuts(nn.Module):
    """Layers whose values are worth running again; `label` is read, and means nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.label = "before"

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin() if self.label else x
        return x.square().sum()


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_a_step_that_is_traced_again_keeps_its_plan(one: DeviceMesh, given: bool) -> None:
    """Nobody says how much memory there is to whoever brings a plan that was found under a limit."""
    x = torch.rand(512, 32)
    most = autopar.compile(Cuts(), one, example_inputs=(x,)).plan
    assert most is not None
    limit = int(0.8 * most.peak_bytes["hbm"])
    plan = autopar.compile(Cuts(), one, example_inputs=(x,), memory=limit).plan
    assert plan is not None and plan.peak_bytes["hbm"] <= limit < most.peak_bytes["hbm"]
    parallel = autopar.compile(Cuts(), one, **({"plan": plan} if given else {"memory": limit}))
    for label in ("before", "after"):
        parallel.label = label
        with mock.patch("autopar.planner.answer", side_effect=AssertionError) if label == "after" else nullcontext():
            parallel(x).backward()
    first, second = parallel._autopar.prepared()
    assert first.plan.choices == second.plan.choices == plan.choices and len(first.plan.graph.nodes) > len(
        most.graph.nodes
    )


def test_later_programs_of_a_given_plan_have_the_memory_that_it_was_found_in(one: DeviceMesh) -> None:
    x = torch.rand(512, 32)
    most = autopar.compile(Cuts(), one, example_inputs=(x,)).plan
    assert most is not None
    limit = int(0.8 * most.peak_bytes["hbm"])
    plan = autopar.compile(Cuts(), one, example_inputs=(x,), memory=limit).plan
    parallel = autopar.compile(Cuts(), one, plan=plan)
    for count in (512, 500):
        parallel(x[:count]).backward()
    parallel.layers[2].requires_grad_(False)
    parallel(x).backward()
    peaks = [prepared.plan.peak_bytes["hbm"] for prepared in parallel._autopar.prepared()]
    assert len(peaks) == 3 and max(peaks) <= limit


@pytest.mark.parametrize("allow", ["recompute,offload-parameters", "recompute,offload-optimizer"])
def test_parameters_stay_where_they_are_in_later_programs(one: DeviceMesh, allow: str) -> None:
    """What more of them on the host would make room for is not to be had: they lie on the device."""
    batches = [torch.rand(count, 32) for count in (64, 68, 72)]
    most = autopar.compile(Cuts(), one, example_inputs=(batches[0],)).plan
    assert most is not None
    parallel = autopar.compile(Cuts(), one, memory=int(0.75 * most.peak_bytes["hbm"]), allow=allow)
    for x in batches:
        parallel(x).backward()
    assert parallel.plan.residence
    for prepared in parallel._autopar.prepared():
        assert prepared.plan.residence == parallel.plan.residence
