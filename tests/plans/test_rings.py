"""Whole models in which every product that may go round a ring does: numbers, bytes sent, and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from autopar.ir.mesh import Mesh
from autopar.lower import lower
from autopar.lower.verify import verify
from autopar.measure.twin import memory_of
from autopar.plan import Plan
from autopar.plan.fit import check
from autopar.price.pricer import Pricer
from autopar.simulate.timeline import timeline_of
from cost_models.hardware import Hardware
from tests.support.check import difference, mesh_of
from tests.support.families import family
from tests.support.lockstep import run_all
from tests.support.plans import PlanSampler, Wish
from tests.support.sends import send_beside_work

MACHINE = Hardware.load("cpu-gloo")
TOLERANCE = 1e-9  # in float64, as in tests/plans/test_random_plans.py
OVER, UNDER = 1.05, 0.98  # as in tests/measure/test_memory.py


@cache
def ringed(name: str, mesh: Mesh, moving: str, *, wide: bool) -> Plan:
    """The best plan in which operand `moving` of every product goes round where it may, else the other one does; or,
    where that is "sum", the sum of every product does.
    """
    pattern = "ring reduce-scatter" if moving == "sum" else "ring"
    case = family(name)
    sampler = PlanSampler(case.wide_graph if wide else case.graph, mesh, MACHINE)
    wishes: dict[str, Wish] = {}
    for node, options in sampler.strategies.items():
        rings = {one.roles for one in options if one.body == pattern}
        wanted = {roles for roles in rings if any(role.startswith(moving) for role in roles)} or rings
        if wanted:
            wishes[node] = lambda one, wanted=wanted: one.body == pattern and one.roles in wanted
    assert len(wishes) > 5, "too few products"
    return sampler.best(wishes)


CASES = [("mlp", (2,)), ("mlp", (4,)), ("gpt2", (2, 2)), ("llama", (4,))]


@pytest.mark.parametrize("moving", ["0", "1", "sum"])
@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_its_numbers_are_those_of_one_process_and_its_bytes_those_of_the_plan(
    name: str, sizes: tuple[int, ...], moving: str
) -> None:
    case, found = family(name), ringed(name, mesh_of(*sizes), moving, wide=True)
    check(found, case.wide_graph, found.mesh)
    assert any(collective == "shift" for collective, _ in found.comm_bytes)
    for prefetch in (None, 2):
        plan = replace(found, prefetch=prefetch)
        verify(lower(plan, prefetch))
        off, where = difference(plan, case)
        assert off <= TOLERANCE, where
    _, traffic = run_all(found, case.values(found.graph), case.seed)
    assert traffic == {key: nbytes for key, nbytes in found.comm_bytes.items() if nbytes}


@pytest.mark.parametrize("moving", ["0", "sum"])
@pytest.mark.parametrize("prefetch", [None, 1])
@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_it_holds_what_it_says(
    fake_mesh: Callable[..., object], monkeypatch: pytest.MonkeyPatch, name: str, sizes: tuple[int, ...],
    prefetch: int | None, moving: str,
) -> None:  # fmt: skip
    """With sends under way beside products, which a program on CPUs waits for at once (docs/design/0018)."""
    send_beside_work(monkeypatch)
    case, mesh = family(name), Mesh(("data", "tensor")[: len(sizes)], sizes)
    plan = replace(ringed(name, mesh, moving, wide=False), prefetch=prefetch)
    fake_mesh(**dict(zip(mesh.names, sizes, strict=True)))
    told = timeline_of(plan, Pricer.on(mesh, MACHINE, plan.optimizer), prefetch).memory["hbm"].peak_bytes
    if prefetch is None:
        assert told == plan.peak_bytes["hbm"]
    assert UNDER <= told / memory_of(plan, case.model, (), case.inputs)["step"].measured <= OVER


def test_a_file_of_it_reads_back_and_its_text_says_what_it_sends() -> None:
    plan = ringed("mlp", mesh_of(4), "0", wide=False)
    assert Plan.loads(_saved(plan), "text") == plan
    assert "shift" in plan.explain() and "digraph" in plan.to_dot()


def _saved(plan: Plan) -> str:
    from autopar.plan.store import dumps

    return dumps(plan)
