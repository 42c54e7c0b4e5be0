"""What a step takes where elementwise operators are fused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from autopar.measure.twin import traced
from autopar.plan import Plan
from autopar.plan.explain import FUSED
from autopar.search import Request, search
from autopar.search.fused import with_fused
from autopar.simulate.kernels import as_kernels
from autopar.simulate.timeline import pricer_of, timeline_of
from cost_models.hardware import Hardware
from cost_models.steps import Compute
from tests.support.families import FAMILIES, family

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
        told = with_fused(plan, pricer).search[FUSED]
        assert isinstance(told, float) and 0 < told < timeline_of(plan, pricer, plan.prefetch).seconds


def test_a_plan_for_gpus_says_it() -> None:
    plan = chained(trained=True)
    told = with_fused(plan, pricer_of(plan, MACHINE))
    assert 'with backend="inductor", which fuses elementwise operators, about 0.0' in told.explain()
    here = Hardware.load("cpu-gloo")
    on_cpu = search(plan.graph, plan.mesh, here)
    assert with_fused(on_cpu, pricer_of(on_cpu, here)) is on_cpu
