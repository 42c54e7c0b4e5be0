"""`memory=` and calls without gradients: first ones, larger ones, and what is shown as the plan meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.attach.module import ParallelModule
from autopar.planner import states_of
from cost_models.hardware import Hardware

WIDTH, LIMIT = 64, 3 << 20


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def evaluated(parallel: ParallelModule, rows: int) -> float:
    with torch.no_grad():
        return parallel(torch.rand(rows, WIDTH)).item()


def peak_of(parallel: ParallelModule) -> int:
    return parallel.plan.peak_bytes["hbm"]


@pytest.mark.parametrize("is_first", [True, False])
def test_an_evaluation_that_does_not_fit_is_refused_whatever_came_before(one: DeviceMesh, is_first: bool) -> None:
    parallel = autopar.compile(Deep(), one, memory=LIMIT)
    if not is_first:
        parallel(torch.rand(256, WIDTH)).backward()
    told = r"no plan fits in .* runs in forward.* without gradients: 260 KiB of 3.00 MiB are states of the optimizer"
    with pytest.raises(autopar.Infeasible, match=told) as refused:
        evaluated(parallel, 8192)
    assert ("Parameters lie by now as a step of training with this batch" in str(refused.value)) == is_first
    parallel(torch.rand(256, WIDTH)).backward()


def test_a_first_evaluation_may_be_larger_than_what_training_could_take(one: DeviceMesh) -> None:
    """Its values are let go of as it runs; trained, the same batch would have to hold them."""
    model, x = Deep(), torch.rand(2048, WIDTH)
    with pytest.raises(autopar.Infeasible):
        autopar.compile(model, one, memory=LIMIT, allow="none", example_inputs=(x,))
    parallel = autopar.compile(model, one, memory=LIMIT, allow="none")
    with torch.no_grad():
        torch.testing.assert_close(parallel(x), model(x))
    assert parallel.plan.graph.rounds.count > 1, "how a step of so many rows would fit"
    small = torch.rand(256, WIDTH)
    parallel(small).backward()
    model(small).backward()
    assert parallel.plan.graph.rounds.count == 1 and peak_of(parallel) <= LIMIT, "the step that is trained with"
    for ours, wanted in zip(parallel.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), wanted.grad)
    with pytest.raises(autopar.Infeasible, match="run the step in micro-batches"):
        parallel(x)


def test_what_no_micro_batches_make_fit_is_told_as_what_it_is(one: DeviceMesh) -> None:
    class Statistics(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    parallel = autopar.compile(Statistics(), one, memory=LIMIT, allow="none")
    with pytest.raises(
        autopar.Infeasible, match="has no gradients and was planned as a step of training with its batch"
    ):
        evaluated(parallel, 2048)


def test_an_evaluation_is_not_told_to_leave_outputs_out(one: DeviceMesh) -> None:
    """Its outputs are what it is called for."""

    class Both(Deep):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            wide = x.repeat(1, 64)
            return super().forward(x), wide

    parallel = autopar.compile(Both(), one, memory=LIMIT)
    parallel(torch.rand(64, WIDTH))[0].backward()
    for rows in (2048, 8192):
        with pytest.raises(autopar.Infeasible) as refused, torch.no_grad():
            parallel(torch.rand(rows, WIDTH))
        assert "outputs=" not in str(refused.value) and "make the batch smaller" in str(refused.value)


def test_without_a_limit_no_evaluation_is_refused(one: DeviceMesh) -> None:
    parallel = autopar.compile(Deep(), one)
    parallel(torch.rand(256, WIDTH)).backward()
    assert evaluated(parallel, 16384) > 0


def test_states_are_two_floats_a_value_of_adamw_and_none_of_sgd(one: DeviceMesh) -> None:
    x = torch.rand(256, WIDTH)
    for optimizer, each in (("adamw", 8), ("sgd", 0)):
        plan = autopar.compile(Deep(), one, optimizer=optimizer, example_inputs=(x,)).plan
        assert plan is not None
        count = sum(parameter.numel() for parameter in Deep().parameters())
        assert 0 <= states_of(plan, Hardware.load("cpu-gloo")) - each * count <= 16 * 4 * bool(each), (
            "and counts of steps"
        )


def test_the_plan_that_is_shown_is_of_the_largest_step_of_training(one: DeviceMesh) -> None:
    model = Deep()
    model.layers[:7].requires_grad_(False)
    parallel = autopar.compile(model, one)
    parallel(torch.rand(64, WIDTH)).backward()
    frozen = peak_of(parallel)
    parallel.requires_grad_(True)
    parallel(torch.rand(256, WIDTH)).backward()
    thawed = parallel.plan
    assert thawed is not None and thawed.peak_bytes["hbm"] > frozen
    assert sum(result.kind == "gradient" for result in thawed.graph.results) == 16
    parallel(torch.rand(100, WIDTH)).backward()
    evaluated(parallel, 16384)
    assert parallel.plan is thawed, "neither the last batch's nor an evaluation's"
