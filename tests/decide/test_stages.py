"""A plan that is cut into stages: each stage's plan is legal, can be written and read, and all together are right."""

from __future__ import annotations

import random

import pytest

from autopar.decide.stages import in_stages
from autopar.errors import NotCut
from autopar.plan import Plan
from autopar.plan.fit import check_rules
from autopar.plan.store import dumps
from autopar.price.pricer import Pricer
from autopar.rewrite.stages import forward_order
from autopar.search.search import Request, search
from tests.support.check import mesh_of, worst_difference
from tests.support.families import family
from tests.support.machines import machine
from tests.support.staged import run_stages

MACHINE = machine(1e11, flops=1e11)


@pytest.mark.parametrize(
    "name",
    ["mlp", "block", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama", "t5", "cnn", "vit"))],
)
def test_a_plan_in_stages_is_right_and_each_of_its_plans_is_legal(name: str) -> None:
    case, drawn = family(name), random.Random(name)
    whole = search(case.wide_graph, mesh_of(2, 2), MACHINE, Request())
    pricer = Pricer.on(whole.mesh, MACHINE, whole.optimizer, whole.bucket_bytes)
    right = tried = 0
    while right < 3:
        ends = sorted(drawn.sample(range(1, len(forward_order(whole.graph))), 1 if name == "mlp" else 2))
        tried += 1
        assert tried < 200, "hardly any cut is legal"
        try:
            found = in_stages(whole, ends, pricer)
        except NotCut:
            continue
        for _, plan in found:
            check_rules(plan)
            assert Plan.loads(dumps(plan), "text") == plan
        ran = run_stages(
            [stage for stage, _ in found], [plan for _, plan in found], case.values(whole.graph), case.seed
        )
        difference, where = worst_difference(ran, case.wide_reference)
        assert difference < 1e-10, (ends, where)
        assert {node.target for _, plan in found for node in plan.graph.trained} == {
            node.target for node in whole.graph.trained
        }
        right += 1
