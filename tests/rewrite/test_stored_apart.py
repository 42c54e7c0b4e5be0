"""Parameters that are stored, with their states, in more pieces than micro-batches read them in (ZeRO-1)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.errors import PlanMismatch
from autopar.ir.graph import TensorType
from autopar.ir.layout import REPLICATE, Shard, local_type, show
from autopar.lower import lower
from autopar.lower.memory import peaks
from autopar.lower.program import Kind
from autopar.plan import Plan
from autopar.plan.fit import check_rules
from autopar.plan.reading import layouts_told
from autopar.plan.store import dumps
from autopar.price.pricer import Pricer
from autopar.price.stored import gathers
from autopar.propose.stored import layouts_stored
from cost_models.hardware import Hardware
from tests.assemble.drawn import drawn
from tests.rewrite.test_reduce_once import rounds_of
from tests.support.check import mesh_of
from tests.support.machines import FAST
from tests.support.plans import PlanSampler

H100 = Hardware.load("h100-sxm")


def plans(name: str, sizes: tuple[int, ...], count: int) -> list[Plan]:
    """Random ones in which some parameter is stored apart."""
    sampler, found = PlanSampler(rounds_of(name), mesh_of(*sizes)), list[Plan]()
    for seed in range(40):
        plan = sampler.draw(seed)
        if any(choice.stored for choice in plan.choices.values()):
            found.append(plan)
        if len(found) == count:
            return found
    raise AssertionError("hardly any plan stores a parameter apart")


def test_layouts_that_are_offered_split_whole_axes_more_and_can_be_gathered() -> None:
    mesh, type = mesh_of(2, 4), TensorType((8, 6), "float32")
    assert layouts_stored(type, (REPLICATE, REPLICATE), mesh) == [
        (Shard(0), REPLICATE), (REPLICATE, Shard(0)), (Shard(0), Shard(0)),
    ]  # fmt: skip
    assert layouts_stored(type, (REPLICATE, Shard(0)), mesh) == [(Shard(1), Shard(0))]  # gathered axis by axis
    assert not layouts_stored(TensorType((8,), "float32"), (REPLICATE, Shard(0)), mesh)
    assert not layouts_stored(TensorType((3, 5), "float32"), (REPLICATE, REPLICATE), mesh)
    stored = (Shard(0), Shard(0))
    assert [change.axis for change in gathers(type, stored, (REPLICATE, REPLICATE), mesh)] == [*reversed(mesh.names)]


@pytest.mark.parametrize("name", ["mlp", "block"])
def test_a_program_holds_and_moves_what_it_is_to(name: str) -> None:
    """Parameter and states in pieces, what is read once beside it, and one gather and one scatter a step."""
    for plan in plans(name, (2, 2), 2):
        pricer = Pricer.on(plan.mesh, FAST, "adamw", 0, plan.graph.rounds)
        program = lower(plan, None, pricer)
        resident = {buffer.owner: buffer.nbytes for buffer in program.resident if buffer.kind is Kind.STATES}
        apart = [node for node in plan.graph.nodes if plan.choices[node.name].stored]
        for node in apart:
            local = local_type(plan.graph.stored_type(node), plan.parameters[node.target], plan.mesh).nbytes
            assert resident[f"optimizer states of {node.target}"] == 2 * local
        assert plan.peak_bytes["hbm"] == peaks(program)["hbm"]
        once = [comm for comm in plan.comms() if comm.once]
        assert sum(comm.collective == "all_gather" for comm in once) == sum(len(plan.gathers(node)) for node in apart)


@pytest.mark.parametrize("name", ["mlp", "block", pytest.param("t5", marks=pytest.mark.slow)])
def test_any_picks_cost_what_the_problem_says_and_hold_no_more(name: str) -> None:
    of = rounds_of(name)
    for sizes, hardware in (((2,), H100), ((2, 2), FAST)):
        found = drawn(of, Pricer.on(mesh_of(*sizes), hardware, "adamw", 3000, of.rounds), ("recompute", "host"))
        for seed in range(3):
            assert not (wrong := found.wrong(found.tidy(random.Random(seed)))), (sizes, seed, wrong[:3])


def test_a_plan_file_says_how_a_parameter_is_stored_and_forged_ones_are_refused() -> None:
    (plan,) = plans("block", (2, 2), 1)
    assert Plan.loads(dumps(plan), "text") == plan
    check_rules(plan)
    name, choice = next((name, one) for name, one in plan.choices.items() if one.stored)
    other = next(node.name for node in plan.graph.nodes if node.op != "parameter" and node.outputs[0] is not None)

    def forged(of: str, layout: tuple[object, ...]) -> Plan:
        return replace(plan, choices={**plan.choices, of: replace(plan.choices[of], stored=layout)})

    for broken, why in (
        (forged(other, (Shard(0), Shard(0))), "is no parameter that may be"),
        (forged(name, choice.gives[0]), "is not what is read in more pieces"),
        (forged(name, (Shard(7), REPLICATE)), "does not divide"),
        (
            replace(plan, graph=replace(plan.graph, rounds=replace(plan.graph.rounds, reduces_once=False))),
            "that may be",
        ),
    ):
        with pytest.raises(PlanMismatch, match=why):
            Plan.loads(dumps(broken), "text")
    with pytest.raises(PlanMismatch, match=r"is delivered as nobody expects it|is not computed as its rule says"):
        check_rules(replace(plan, choices={**plan.choices, name: replace(choice, stored=())}))


def test_both_layouts_are_told() -> None:
    plan = plans("mlp", (2, 2), 1)[0]
    node = next(node for node in plan.graph.nodes if plan.choices[node.name].stored)
    (type,) = node.outputs
    assert type is not None
    apart = f", stored {show(plan.choices[node.name].stored, plan.mesh, len(type.shape))}"
    assert layouts_told(plan, node).endswith(apart)
    assert apart in plan.explain() and apart in plan.to_dot()
