"""A plan executed and looked at: what its collectives moved, what lived, how long its parts took.

In one process, on a fake group of ranks: shapes, calls and bytes are real, values and times mean nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import PlanMismatch
from autopar.ir.mesh import Mesh
from autopar.measure import twin
from autopar.measure.memory import LiveBytes
from autopar.measure.report import Measured
from autopar.measure.twin import measure, traced
from autopar.plan import Plan
from autopar.search import Request, search
from cost_models.hardware import Hardware
from tests.calibrate.test_format import measured as calibrated
from tests.support.families import family
from tests.support.machines import SLOW
from tests.support.plans import PlanSampler
from tests.support.sent import skip_unless_places_arrive

MACHINE = Hardware.load("cpu-gloo")
Ranks = Callable[..., object]


class Small(nn.Module):
    """A lookup, a matrix, a batch norm: parameters, buffers, places."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.norm = nn.Embedding(20, 8), nn.Linear(8, 16), nn.BatchNorm1d(16)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return (self.norm(self.up(self.table(ids))) * y).sum()


def small(device: str = "cpu") -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.device(device):
        return Small(), (torch.zeros(12, dtype=torch.long), torch.zeros(12, 16))


def plan_of(model: nn.Module, args: tuple[Any, ...], ranks: int = 2, **given: Any) -> Plan:
    hardware, optimizer = given.pop("hardware", MACHINE), given.pop("optimizer", "adamw")
    graph, mesh = traced(model, args, {}), Mesh(("data",), (ranks,))
    return search(graph, mesh, hardware, Request(**given), optimizer=optimizer)


def run(fake_mesh: Ranks, plan: Plan, *given: Any, **more: Any) -> Measured:
    fake_mesh(**dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)))
    return measure(plan, *given, steps=1, **more)


@pytest.mark.parametrize(("name", "sizes"), [("mlp", (2,)), ("block", (2, 2)), ("cnn", (2, 2)), ("gpt2", (4,))])
def test_what_moves_is_what_was_planned_to_the_byte(fake_mesh: Ranks, name: str, sizes: tuple[int, ...]) -> None:
    case, mesh = family(name), Mesh(("a", "b")[: len(sizes)], sizes)
    sampler = PlanSampler(case.graph, mesh, MACHINE)
    for plan in (sampler.draw(3), replace(sampler.draw(4), bucket_bytes=1 << 20)):
        fake_mesh(**dict(zip(mesh.names, mesh.sizes, strict=True)))
        skip_unless_places_arrive(name)
        found = run(fake_mesh, plan, case.model, (), case.inputs)
        assert found.is_equal and found.collectives and not any("different numbers" in note for note in found.notes)
        assert {(one.kind, one.axis): one.nbytes[1] for one in found.collectives} == plan.comm_bytes
        assert all(one.calls[0] == one.calls[1] > 0 for one in found.collectives)
        assert all(pair.measured > 0 and pair.predicted for pair in found.phases.values())
        assert found.step.predicted == plan.step_seconds
        if not plan.bucket_bytes:  # the other plan was changed behind its pricing
            assert found.parts.predicted == pytest.approx(plan.step_seconds)


def test_a_collective_that_is_not_in_the_plan_is_seen(fake_mesh: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = small()
    plan = PlanSampler(traced(model, args, {}), Mesh(("data",), (2,)), MACHINE).draw(0)
    sent, step = torch.ones(6), twin.Twin.step

    def with_another(self: Any, *given: Any) -> None:
        step(self, *given)
        (group,) = self.axis_of
        torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(sent, "sum", group))

    monkeypatch.setattr(twin.Twin, "step", with_another)
    found = run(fake_mesh, plan, model, args)
    before = plan.comm_bytes.get(("all_reduce", "data"), 0)
    assert not found.is_equal
    (wrong,) = [one for one in found.collectives if not one.is_equal]
    assert wrong.kind in ("all_reduce", "other collectives") and (before == 0 or wrong.nbytes[1] == before + 24)


def test_a_model_without_values_gets_some_that_can_be_trained_with(fake_mesh: Ranks) -> None:
    model, args = small("meta")
    plan = plan_of(model, args)
    found = run(fake_mesh, plan, model, args)
    assert found.is_equal and "the model was built on the meta device: its values are random" in found.notes
    assert all(parameter.is_meta for parameter in model.parameters())  # the user's stays as it is


def test_half_of_a_model_without_values_is_refused(fake_mesh: Ranks) -> None:
    model, args = small()
    model.up = nn.Linear(8, 16, device="meta")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="some of the model is on the meta device and some is not"):
        run(fake_mesh, plan_of(model, args), model, args)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "sgd-momentum", "adagrad", "rmsprop", "none"])
def test_memory_is_that_of_the_optimizer_at_hand(fake_mesh: Ranks, optimizer: str) -> None:
    model, args = small()
    plan = plan_of(model, args, optimizer=optimizer)
    found = run(fake_mesh, plan, model, args)
    assert list(found.phases) == ["forward", "backward"] + ["optimizer"] * (optimizer != "none")
    forward = found.peak_bytes["forward"]  # parameters, states and activations, but no gradients yet
    assert abs(forward.measured - (forward.predicted or 0)) <= 8  # of 5 to 7 thousand bytes


def test_a_model_that_is_not_trained_runs_forward_only(fake_mesh: Ranks) -> None:
    model, args = small()
    for parameter in model.eval().parameters():
        parameter.requires_grad_(False)
    plan = plan_of(model, args)
    found = run(fake_mesh, plan, model, args)
    assert list(found.phases) == ["forward"] and list(found.peak_bytes) == ["forward", "step"]
    assert found.parts.predicted == pytest.approx(plan.step_seconds)


def test_a_model_in_eval_mode_is_trained_as_compile_would(fake_mesh: Ranks) -> None:
    model, args = small()
    model.eval()
    found = run(fake_mesh, plan_of(model, args), model, args)
    assert found.is_equal and list(found.phases) == ["forward", "backward", "optimizer"]


def test_outputs_that_are_no_loss_are_differentiated_too(fake_mesh: Ranks) -> None:
    model, args = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.ones(4, 8),)
    found = run(fake_mesh, plan_of(model, args), model, args)
    assert found.is_equal and found.phases["backward"].measured > 0


# --- which profile priced it -----------------------------------------------------------------------------------------


def test_a_profile_that_is_not_at_hand_leaves_phases_open_and_says_so(fake_mesh: Ranks) -> None:
    model, args = small()
    plan = plan_of(model, args, hardware=SLOW)
    found = run(fake_mesh, plan, model, args)
    assert {pair.predicted for pair in found.phases.values()} == {None} and found.step.predicted == plan.step_seconds
    assert found.peak_bytes["step"].predicted == plan.peak_bytes["hbm"]  # bytes need no profile
    assert f"profile {SLOW.name} is not at hand: give it with --hardware to see all predictions" in found.notes
    found = run(fake_mesh, plan, model, args, hardware=SLOW)
    assert found.parts.predicted == pytest.approx(plan.step_seconds)


def test_another_profile_is_refused(fake_mesh: Ranks) -> None:
    model, args = small()
    with pytest.raises(PlanMismatch, match="the plan was priced on cpu-gloo with figures"):
        run(fake_mesh, plan_of(model, args), model, args, hardware=calibrated())


def test_a_group_of_another_size_is_refused(fake_mesh: Ranks) -> None:
    model, args = small()
    plan = plan_of(model, args)
    fake_mesh(data=4)
    with pytest.raises(ValueError, match="the plan is for 2 ranks, the process group has 4"):
        measure(plan, model, args, steps=1)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def live() -> Iterator[LiveBytes]:
    counted = LiveBytes()
    with counted:
        yield counted


def test_storages_live_once_and_until_the_last_look_at_them(live: LiveBytes) -> None:
    a = torch.ones(256)
    assert live.current == live.peak == 1024
    view = a.view(16, 16).t()
    assert live.current == 1024
    b = a + 1
    assert live.current == 2048
    del a
    assert live.current == 2048  # the view holds it
    del view
    assert live.current == 1024 and live.peak == 2048
    b += 1
    del b
    assert live.current == 0 and live.peak == 2048


def test_what_was_there_before_is_counted_if_it_is_watched() -> None:
    before, counted = torch.ones(100), LiveBytes()
    counted.watch({"x": [before, before[2:]]})
    with counted:
        made = before * 2
    assert counted.peak == 800 and "mul" in counted.peak_after
    del before
    assert counted.current == 400 and made.numel() == 100
