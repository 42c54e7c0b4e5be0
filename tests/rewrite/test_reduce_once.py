"""Gradients that micro-batches add up as partial sums, and that are summed over ranks once: behind the last of them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autopar.decide.stages import in_stages
from autopar.errors import PlanMismatch
from autopar.ir.graph import Graph
from autopar.ir.layout import Partial
from autopar.ir.rounds import wide
from autopar.lower import lower
from autopar.lower.program import OPTIMIZER, Launch, Send
from autopar.lower.sums import rows_of
from autopar.lower.verify import verify
from autopar.plan import Plan
from autopar.plan.fit import check_rules
from autopar.plan.store import dumps
from autopar.price.pricer import Pricer
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.rewrite.micro_batches import in_rounds
from cost_models.hardware import Hardware
from cost_models.steps import COLLECTIVES, Compute, received_bytes
from tests.assemble.drawn import drawn
from tests.rewrite.test_stages import places
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.machines import FAST
from tests.support.plans import PlanSampler
from tests.support.rounds import run_rounds
from tests.support.staged import run_stages

SLOW = pytest.mark.slow
NAMES = ["mlp", "block", pytest.param("llama", marks=SLOW), pytest.param("t5", marks=SLOW)]
H100 = Hardware.load("h100-sxm")


def rounds_of(name: str, count: int = 2) -> Graph:
    return in_rounds_of_stages(family(name).wide_graph, count)


def plans(name: str, sizes: tuple[int, ...], count: int) -> list[Plan]:
    """Random ones in which some gradient is summed once."""
    sampler, found = PlanSampler(rounds_of(name), mesh_of(*sizes)), list[Plan]()
    for seed in range(40):
        plan = sampler.draw(seed)
        if any(delivery is not None and delivery.once for delivery in plan.deliveries):
            found.append(plan)
        if len(found) == count:
            return found
    raise AssertionError("hardly any plan has a partial sum")


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_gives_what_one_process_gives(name: str, sizes: tuple[int, ...]) -> None:
    """Each micro-batch by itself, the sums behind them; and as plan of a stage, of the whole model's plan."""
    case, of = family(name), rounds_of(name)
    alone = run_rounds(PlanSampler(in_rounds(case.wide_graph, 2), mesh_of(1)).draw(0), case.values(of), case.seed)
    for plan in plans(name, sizes, 3):
        check_rules(plan)
        verify(lower(plan, None, Pricer.on(plan.mesh, FAST, "adamw", 0, of.rounds)))
        ran = run_rounds(plan, case.values(of), case.seed)
        for key, value in alone.results.items():
            found = ran.results[key]
            assert (value is None) == (found is None), key
            if value is not None and found is not None:
                torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12, msg=str(key))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_summed_once_is_added_up_as_it_is_made(name: str) -> None:
    """Its micro-batches send nothing for it, and the step as much as one of them would have."""
    for plan in plans(name, (2, 2), 3):
        rounds, once = plan.graph.rounds, 0
        for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
            if delivery is None or result.ref is None:
                continue
            parameter = {n.target: n for n in plan.graph.nodes if n.op == "parameter"}.get(result.target)
            if not delivery.once:
                assert not any(isinstance(placement, Partial) for placement in delivery.layout)
                continue
            once += 1
            assert result.kind == "gradient" and parameter is not None and not delivery.changes
            assert delivery.layout == plan.choices[result.ref.name].gives[result.ref.index]
            assert delivery.lies(plan.mesh) == plan.choices[parameter.name].lies != delivery.layout
            assert all(change.local.dtype == wide(plan.graph.type_of(result.ref).dtype) for change in delivery.once)
        assert once and rounds.count == 2
        received = sum(received_bytes(comm) * (1 if comm.once else 2) for comm in plan.comms())
        assert received == sum(plan.comm_bytes.values())


@pytest.mark.parametrize("bucket_bytes", [0, 3000, 1 << 20])
def test_rows_are_summed_where_they_lie(bucket_bytes: int) -> None:
    together = False
    for plan in plans("block", (2, 2), 10):
        plan = replace(plan, bucket_bytes=bucket_bytes)
        rows = rows_of(plan)
        places = [place for row in rows for place in row.places]
        assert sorted(places) == [at for at, one in enumerate(plan.deliveries) if one is not None and one.once]
        together |= any(len(row.places) > 1 for row in rows)
        for row in rows:
            sizes = [one.once[0].local.nbytes for at in row.places if (one := plan.deliveries[at]) is not None]
            assert row.nbytes == sum(sizes) and (len(sizes) == 1 or sum(sizes[:-1]) < bucket_bytes)
        for prefetch in (None, 1):
            program = lower(plan, prefetch, Pricer.on(plan.mesh, FAST, "adamw", bucket_bytes, plan.graph.rounds))
            verify(program)
            sends = [one for one in program.instructions[OPTIMIZER] if isinstance(one, Launch)]
            assert all(getattr(one.step, "once", False) for one in sends)
            scattered = {Send(row.places) for row in rows if row.scatters}
            sends = [one for one in sends if isinstance(one.of, Send) and one.of not in scattered]
            assert {one.of for one in sends} == {Send(row.places) for row in rows if not row.scatters}
            assert all(one.in_place for one in sends)
            assert {id(b) for one in sends for v in one.makes for b in program.values[v]} <= set(
                map(id, program.resident)
            )
            before = {one for phase in ("forward", "backward") for one in program.instructions[phase]}
            assert not any(isinstance(one, Launch) and getattr(one.step, "once", False) for one in before)
    assert together == (bucket_bytes > 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_is_priced_once(name: str) -> None:
    """As the closed form of the collective has it, whatever the number of micro-batches."""
    for plan in plans(name, (2,), 2):
        for count in (2, 5):
            rounds = replace(plan.graph.rounds, count=count)
            pricer = Pricer.on(plan.mesh, H100, "adamw", 0, rounds)
            link = pricer.resharder.links[plan.mesh.names[0]]
            held = {node.target: node.name for node in plan.graph.nodes if node.op == "parameter"}
            for result, delivery in zip(plan.graph.results, plan.deliveries, strict=True):
                if delivery is None or not delivery.once or result.ref is None:
                    continue
                type = plan.graph.type_of(result.ref)
                (change,) = delivery.once
                choice = plan.choices[held[result.target]]
                (price,) = pricer.deliver(type, [delivery.layout], [choice.gives[0]], [choice.lies])[0]
                form = COLLECTIVES[change.kind]
                copies = pricer.seconds([step for step in pricer.gathered_once([change]) if isinstance(step, Compute)])
                assert price - copies == pytest.approx(
                    form.seconds(2, change.local.nbytes, link.latency_s, link.bytes_per_s)
                )


@pytest.mark.parametrize("name", NAMES)
def test_any_picks_cost_what_the_problem_says_and_hold_no_more(name: str) -> None:
    of = rounds_of(name)
    for sizes, hardware, bucket_bytes in (((2,), FAST, 0), ((2, 2), H100, 3000), ((2, 2), FAST, 1 << 20)):
        pricer = Pricer.on(mesh_of(*sizes), hardware, "adamw", bucket_bytes, of.rounds)
        found = drawn(of, pricer, ("recompute",))
        for seed in range(3):
            wrong = found.wrong(found.tidy(random.Random(seed)))
            assert not wrong, (sizes, seed, wrong[:3])


@pytest.mark.parametrize("name", ["mlp", "block", pytest.param("t5", marks=SLOW)])
def test_stages_sum_their_own(name: str) -> None:
    """What crosses a cut is whole in each micro-batch; so is what one process gives of them."""
    case, count, of = family(name), 0, rounds_of(name)
    alone = run_rounds(PlanSampler(in_rounds(case.wide_graph, 2), mesh_of(1)).draw(0), case.values(of), case.seed)
    for plan in plans(name, (2, 2), 3):
        ends = places(name)[len(places(name)) // 2]
        cut = in_stages(plan, [ends], Pricer.on(plan.mesh, FAST, "adamw", 0, plan.graph.rounds))
        for stage, one in cut:
            check_rules(one)
            assert Plan.loads(dumps(one), "text") == one
            for result, delivery in zip(one.graph.results, one.deliveries, strict=True):
                if delivery is not None and (result.kind != "gradient" or result.target in stage.gives_back):
                    assert not delivery.once
                count += delivery is not None and bool(delivery.once)
        total: dict[tuple[str, str], Tensor] = {}
        for number in range(2):
            own = {
                name: value.chunk(2, of.rounds.cut[name])[number].clone() if name in of.rounds.cut else value
                for name, value in case.values(of).items()
            }
            ran = run_stages([stage for stage, _ in cut], [one for _, one in cut], own, case.seed)
            for key, value in ran.results.items():
                if value is not None:
                    total[key] = total[key] + value if key in total else value
        trained = {("gradient", node.target) for node in plan.graph.trained}
        assert total.keys() >= trained
        for key in trained:
            torch.testing.assert_close(total[key], alone.results[key], rtol=1e-10, atol=1e-12, msg=str(key))
    assert count


def test_what_crosses_a_cut_is_summed_in_each_micro_batch() -> None:
    """The stage before waits for it. The first draw in which a partial sum goes back over some cut."""
    sampler, found = PlanSampler(rounds_of("block"), mesh_of(2)), 0
    for seed in range(10, 30):
        plan = sampler.draw(seed)
        for stage, one in in_stages(plan, [4], Pricer.on(plan.mesh, FAST, "adamw", 0, plan.graph.rounds)):
            for result, delivery in zip(one.graph.results, one.deliveries, strict=True):
                if delivery is not None and result.kind == "gradient" and result.target in stage.gives_back:
                    assert not delivery.once
                    found += [change.kind for change in delivery.changes] == ["all_reduce"]
        if found:
            return
    raise AssertionError("no draw has a partial sum there")


def test_a_plan_file_says_what_is_summed_once(tmp_path: Path) -> None:
    (plan,) = plans("mlp", (2,), 1)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.graph.rounds.reduces_once and again.graph.digest == plan.graph.digest
    each = replace(plan.graph, rounds=replace(plan.graph.rounds, reduces_once=False))
    assert each.digest != plan.graph.digest
    with pytest.raises(PlanMismatch, match=r"and is no (gradient|parameter) that may be"):
        Plan.loads(dumps(replace(plan, graph=each)), "text")
