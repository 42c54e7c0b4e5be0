"""Gathering weights ahead of their use and waiting late for gradients changes when things move, never what."""

from dataclasses import replace

import pytest

from autopar.emit import emit
from autopar.lower.program import Read
from autopar.lower.schedule import Advance, Facts, Turn, schedule
from autopar.plan.value import is_product
from autopar.search import Request, search
from cost_models.hardware import Hardware
from tests.support.check import difference, mesh_of
from tests.support.families import family
from tests.support.lockstep import run_all
from tests.support.plans import PlanSampler


@pytest.mark.parametrize("name", ["mlp", "block", "gpt2"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetched_plans_are_right(name: str, prefetch: int) -> None:
    sampler = PlanSampler(family(name).wide_graph, mesh_of(2, 2))
    for seed in range(3):
        off, where = difference(replace(sampler.draw(seed), prefetch=prefetch), family(name))
        assert off <= 1e-9, f"seed {seed}: {where} is off by {off:.3g}"


def test_a_weight_is_launched_one_product_ahead_and_waited_for_at_its_use() -> None:
    sampler = PlanSampler(family("mlp").graph, mesh_of(2))
    for seed in range(20):
        plan = sampler.draw(seed)
        weights = {node.name for node in plan.graph.nodes if node.op == "parameter"}
        order = schedule(Facts(plan), "forward", 1)
        for read in {item.transfer for item in order if isinstance(item, Advance) and isinstance(item.transfer, Read)}:
            reader = plan.graph.by_name[read.reader]
            if (
                reader.operands[read.position].name in weights
                and plan.choices[read.reader].reads[read.position][0].kind == "all_gather"
            ):
                between = order[order.index(Advance(read)) : order.index(Turn(read.reader))]
                before = order[: order.index(Turn(read.reader))]
                count = [
                    sum(isinstance(i, Turn) and is_product(plan.choices[i.node]) for i in part)
                    for part in (between, before)
                ]
                assert count[0] == min(1, count[1]), read
    for seed in range(20):
        plan = sampler.draw(seed)
        lines = emit(replace(plan, prefetch=1), {"a": "g"}).forward.code.splitlines()
        eager = emit(plan, {"a": "g"}).forward.code.splitlines()
        assert len(lines) == len(eager)
        gathers = [i for i, line in enumerate(lines) if "all_gather_into_tensor" in line and "weight" in line]
        ahead = [i for i in gathers if f"{lines[i].split()[0]}_wait" not in lines[i + 1]]
        if ahead:
            return
    raise AssertionError("no plan launched a gather ahead of its wait")


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("bucket_bytes", [1, 3000, 1 << 20])
@pytest.mark.parametrize("name", ["mlp", "block"])
def test_gradients_summed_together_are_right_and_move_the_same_bytes(
    name: str, bucket_bytes: int, sizes: tuple[int, ...]
) -> None:
    case, mesh = family(name), mesh_of(*sizes)
    plan = search(case.wide_graph, mesh, Hardware.load("h100-sxm"), Request(policy="data-parallel"))
    values = case.values(case.wide_graph)
    found, wanted = (run_all(replace(plan, bucket_bytes=size), values)[1] for size in (bucket_bytes, 0))
    off, where = difference(replace(plan, bucket_bytes=bucket_bytes), case)
    assert off <= 1e-9, f"{where} is off by {off:.3g}"
    assert found == wanted == plan.comm_bytes
