"""What a step takes where elementwise operators are fused, and what the host launches where they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from autopar.lower import lower
from autopar.lower.program import Launch, Run
from autopar.lower.verify import flat
from autopar.measure.twin import traced
from autopar.plan import Plan
from autopar.plan.explain import DISPATCH, DISPATCHED, FUSED
from autopar.rewrite.micro_batches import in_rounds
from autopar.search import Request, search
from autopar.search.backends import launched, with_backends
from autopar.simulate.kernels import as_kernels
from autopar.simulate.timeline import pricer_of, timeline_of
from cost_models.hardware import Hardware
from cost_models.steps import Comm, Compute
from tests.support.families import FAMILIES, family
from tests.support.plans import PlanSampler

MACHINE = Hardware.load("h100-sxm")
ROWS, WIDTH = 64, 32
VALUE = ROWS * WIDTH * 4  # bytes
FEW = ("mlp", "cnn", "gpt2")


class Chain(nn.Module):
    """Two products, and between them four operators, the last of which reads the second's result, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x).tanh()
        b = a * 2.0
        return self.second(b.exp() + b)


def chained(*, trained: bool) -> Plan:
    model = Chain().requires_grad_(trained)
    return search(traced(model, (), {"x": torch.rand(ROWS, WIDTH)}), Mesh(("data",), (1,)), MACHINE)


def moved(plan: Plan) -> dict[str, float]:
    """Operator of the forward pass -> how many values the kernel that ends with it reads and writes."""
    fused = as_kernels(plan, lambda node: "all")
    return {
        node.op.split(".")[1]: step.nbytes / VALUE
        for node in plan.graph.nodes
        for step in fused.choices[node.name].steps
        if node.phase == "forward" and isinstance(step, Compute) and step.kind == "elementwise"
    }


def test_values_between_operators_of_a_kernel_stay_in_it() -> None:
    assert moved(chained(trained=False)) == {"tanh": 0, "mul": 0, "exp": 0, "add": 2}, "one is read, one is written"


def test_what_backward_reads_is_written() -> None:
    """The results of tanh and exp, and the sum."""
    assert moved(chained(trained=True)) == {"tanh": 0, "mul": 0, "exp": 0, "add": 4}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in FAMILIES]
)
def test_it_takes_less_than_kernels_one_by_one(name: str) -> None:
    graph = family(name).graph
    for mesh in (Mesh(("data",), (1,)), Mesh(("data", "tensor"), (2, 2))):
        plan = search(graph, mesh, MACHINE, Request(simulation=False))
        pricer = pricer_of(plan, MACHINE)
        told = with_backends(plan, pricer).search[FUSED]
        assert isinstance(told, float) and 0 < told < timeline_of(plan, pricer, plan.prefetch).seconds


def test_a_plan_for_gpus_says_it() -> None:
    plan = chained(trained=True)
    told = with_backends(plan, pricer_of(plan, MACHINE))
    assert 'with backend="inductor", which fuses elementwise operators, about 0.0' in told.explain()
    here = Hardware.load("cpu-gloo")
    on_cpu = search(plan.graph, plan.mesh, here)
    assert with_backends(on_cpu, pricer_of(on_cpu, here)) is on_cpu


def test_a_plan_counts_what_the_host_launches() -> None:
    """Two products, four operators and the sum's between them forward, at least as many again backward, two updates."""
    plan = chained(trained=True)
    by_hand = sum(
        step.kernels for choice in plan.choices.values() for step in choice.steps if isinstance(step, Compute)
    )  # fmt: skip
    told = with_backends(plan, pricer_of(plan, MACHINE)).search
    assert told[DISPATCHED] == by_hand + len(plan.parameters) and by_hand > 12
    assert MACHINE.dispatch_s is not None and told[DISPATCH] == told[DISPATCHED] * MACHINE.dispatch_s


@pytest.mark.parametrize("prefetch", [None, 1])
def test_collectives_are_launched_too(prefetch: int | None) -> None:
    """Of a random plan: every step of every operator, every update, every collective."""
    sampler = PlanSampler(family("mlp").graph, Mesh(("a",), (4,)), MACHINE)
    plan = replace(sampler.draw(0), prefetch=prefetch)
    program = [*flat(lower(plan, prefetch, sampler.pricer))]
    steps = [step for one in program if isinstance(one, Run) for step in one.steps]
    kernels = sum(step.kernels for step in steps if isinstance(step, Compute))
    waited = sum(isinstance(step, Comm) for step in steps)
    sent = sum(isinstance(one, Launch) for one in program)
    assert sent > 0 and launched(plan, sampler.pricer) == kernels + waited + sent


def test_micro_batches_are_launched_one_by_one() -> None:
    graph = family("mlp").graph
    once, fourfold = (
        search(one, Mesh(("a",), (1,)), MACHINE, Request(simulation=False)) for one in (graph, in_rounds(graph, 4))
    )
    counts = [launched(plan, pricer_of(plan, MACHINE)) for plan in (once, fourfold)]
    updates = len(once.parameters)
    assert counts[1] - updates >= 4 * (counts[0] - updates)


def test_a_step_that_waits_for_its_host_says_so() -> None:
    plan = chained(trained=True)
    told = with_backends(plan, pricer_of(plan, MACHINE))
    count, seconds = told.search[DISPATCHED], told.search[DISPATCH]
    assert isinstance(seconds, float) and seconds > told.predicted_seconds
    assert (
        f"the host launches {count:,} kernels one by one, about {seconds * 1e3:.3g} ms at 38 us each" in told.explain()
    )
    quick = replace(MACHINE, name="quick", dispatch_s=1e-9)
    other = search(plan.graph, plan.mesh, quick)
    assert "one by one" not in with_backends(other, pricer_of(other, quick)).explain()
    unknown = replace(MACHINE, name="unknown", dispatch_s=None)
    other = search(plan.graph, plan.mesh, unknown)
    assert DISPATCH not in with_backends(other, pricer_of(other, unknown)).search
