"""Parameters that are cast once a step, in front of its micro-batches: the same numbers, and one copy of each cast."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autopar.decide.stages import in_stages
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.precision import CAST
from autopar.lower import lower
from autopar.lower.memory import changes, resident_bytes
from autopar.lower.program import Kind
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.rewrite.cast_once import cast_once, in_rounds_of_stages
from autopar.rewrite.micro_batches import in_rounds
from autopar.search.stage_prices import price_of
from autopar.trace import capture, graph_of
from autopar.trace.precision import precision_named
from cost_models.hardware import Hardware
from tests.assemble.drawn import drawn
from tests.rewrite.test_stages import places
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.machines import FAST
from tests.support.plans import PlanSampler
from tests.support.rounds import run_rounds

SLOW = pytest.mark.slow
NAMES = ["mlp", "llama", pytest.param("gpt2", marks=SLOW), pytest.param("t5", marks=SLOW)]
H100 = Hardware.load("h100-sxm")


@cache
def graph(name: str) -> Graph:
    precision = precision_named("bf16")
    return graph_of(capture(family(name).model, (), family(name).inputs, precision=precision), precision)


def values(name: str, of: Graph) -> dict[str, Tensor]:
    """The sources; parameters as the graph reads them."""
    found = family(name).values(of)
    types = {node.name: node.outputs[0] for node in of.nodes if node.op == "parameter"}
    return found | {one: found[one].to(getattr(torch, type.dtype)) for one, type in types.items() if type is not None}


@pytest.mark.parametrize("name", NAMES)
def test_every_cast_of_a_parameter_goes_and_no_number_changes(name: str) -> None:
    """Bitwise, as every rank does the same with the same."""
    before, after = in_rounds(graph(name), 2), in_rounds_of_stages(graph(name), 2)
    assert cast_once(after) == after and cast_once(graph(name)) is graph(name)
    casts = [
        node for node in before.nodes if node.op == CAST and before.by_name[node.operands[0].name].op == "parameter"
    ]
    assert len(casts) == len(after.rounds.stored) == len(before.nodes) - len(after.nodes) > 5
    alone = Mesh(("data",), (1,))
    one, other = (
        run_rounds(PlanSampler(of, alone).draw(0), values(name, of), family(name).seed) for of in (before, after)
    )
    assert one.results.keys() == other.results.keys()
    for key, value in one.results.items():
        found = other.results[key]
        assert (value is None) == (found is None), key
        assert value is None or found is None or (torch.equal(value, found) and value.dtype == found.dtype), key
    gradients = {value.dtype for (kind, _), value in other.results.items() if kind == "gradient" and value is not None}
    assert gradients == {torch.float32}


@pytest.mark.parametrize("cut", [in_rounds, in_rounds_of_stages])
@pytest.mark.parametrize("name", NAMES)
def test_any_picks_of_a_round_cost_what_the_problem_says_and_hold_no_more(
    name: str, cut: Callable[[Graph, int], Graph]
) -> None:
    of = cut(graph(name), 2)
    for sizes, hardware, optimizer, bucket_bytes in (
        ((2,), FAST, "adamw", 0), ((2, 2), H100, "adamw", 4096), ((2,), FAST, "rmsprop", 1 << 20)
    ):  # fmt: skip
        pricer = Pricer.on(mesh_of(*sizes), hardware, optimizer, bucket_bytes, of.rounds)
        found = drawn(of, pricer, ("recompute", "offload-activations"))
        for seed in range(2):
            wrong = found.wrong(found.tidy(random.Random(seed)))
            assert not wrong, (sizes, seed, wrong[:3])


def test_a_plan_keeps_what_parameters_are_stored_in(tmp_path: Path) -> None:
    of = in_rounds_of_stages(graph("mlp"), 2)
    plan = PlanSampler(of, mesh_of(2)).draw(1)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.graph.rounds.stored == of.rounds.stored and again.graph.digest == of.digest
    with pytest.raises(ValueError, match="read a cast of %nothing, and no parameter has that name"):
        replace(of, rounds=replace(of.rounds, stored={"nothing": "float32"}))


def test_a_micro_batch_in_flight_holds_no_casts() -> None:
    """The copies are one of each parameter, beside the stored ones, and what a stage saves is less by them."""
    saved = dict[bool, list[float]]()
    for once in (False, True):
        of = (in_rounds_of_stages if once else in_rounds)(graph("gpt2"), 2)
        plan = PlanSampler(of, Mesh(("data",), (1,))).draw(0)
        pricer = Pricer.on(plan.mesh, H100, "adamw", 0, of.rounds)
        cut = in_stages(plan, [places("gpt2")[len(places("gpt2")) // 2]], pricer)
        saved[once] = [price_of(stage, one, pricer).saved for stage, one in cut]
        for _, one in cut if once else ():
            program, types = lower(one, None, pricer), [n for n in one.graph.nodes if n.name in one.graph.rounds.stored]
            casts = [(phase, b, sign) for phase, b, sign in changes(program) if b.kind is Kind.CAST]
            read = sum(type.nbytes for n in types for type in n.outputs if type is not None)
            assert sum(b.nbytes for _, b, sign in casts if sign > 0) == read
            assert {phase for phase, _, sign in casts if sign > 0} == {"forward"}
            assert {phase for phase, _, sign in casts if sign < 0} == {"backward"}
            stored = sum(b.nbytes for b in program.resident if b.kind is Kind.PARAMETER)
            assert stored == 2 * read and resident_bytes(program)["hbm"] >= 4 * stored
    assert all(one < 0.8 * other for one, other in zip(saved[True], saved[False], strict=True)), saved
