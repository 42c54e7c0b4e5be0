"""docs/adding.md, "A pattern": one with a loop, added where it says and nowhere else, and used in plans.

`aten.sum` over dim 0 of what is split there, whole on every rank: each rank's term goes round, and all add all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.emit import emit
from autopar.ir.graph import Node, TensorType
from autopar.ir.layout import REPLICATE, Shard, local_type
from autopar.ir.mesh import Mesh
from autopar.lower import lower
from autopar.lower.program import Loop
from autopar.lower.verify import verify
from autopar.plan import Plan
from autopar.plan.fit import check_rules
from autopar.plan.store import dumps
from autopar.rules.looped import Do, Looped, Offer, Shift
from autopar.rules.patterns import PATTERNS
from autopar.simulate.timeline import timeline_of
from cost_models.steps import Compute, received_bytes
from tests.support.check import difference, mesh_of
from tests.support.families import Case
from tests.support.lockstep import run_all
from tests.support.plans import PlanSampler

SUM = "aten.sum.dim_IntList"
TOLERANCE = 1e-9  # in float64, as in tests/plans


def round_sum(node: Node, types: tuple[TensorType, ...], mesh: Mesh) -> Iterator[Offer]:
    """The pattern: along each axis, where dim 0 divides."""
    if node.op != SUM or tuple(node.args[1]) != (0,) or any(node.args[2:]):
        return
    made = node.outputs[0]
    assert made is not None
    for at, ranks in enumerate(mesh.sizes):
        whole = (REPLICATE,) * len(mesh.sizes)
        if ranks == 1 or types[0].shape[0] % ranks:
            continue
        takes = (*whole[:at], Shard(0), *whole[at + 1 :])
        roles = tuple("round" if axis == at else "" for axis in range(len(mesh.sizes)))
        yield Offer(
            roles, mesh.names[at], (takes,), (whole,), loop(node, local_type(types[0], takes, mesh), made, ranks)
        )


def loop(node: Node, given: TensorType, made: TensorType, ranks: int) -> Looped:
    def work(op: str, nbytes: int) -> Compute:
        return Compute(op, 0.0, 1.0 * nbytes, made.dtype, 1, "elementwise")

    def add_up(b: Any, turn: int, x: Any) -> Any:
        return b.call(SUM, x, (0,))

    def copy(b: Any, turn: int, x: Any) -> Any:
        return b.call("aten.clone.default", x)

    def add(b: Any, turn: int, total: Any, term: Any) -> Any:
        return b.call("aten.add_.Tensor", total, term)

    adding = Do("add", add, ("total", "term"), "total", None, work(SUM, 3 * made.nbytes))
    return Looped(
        before=(
            Do("add up", add_up, ("0",), "own", made, work(SUM, given.nbytes + made.nbytes)),
            Shift("own", "term", made),
            Do("copy", copy, ("own",), "total", made, work("aten.clone.default", 2 * made.nbytes)),
        ),
        rounds=ranks - 2,
        round=(Shift("term", "next", made), adding),
        carried=(("term", "next"),),
        after=(adding,),
        gives=("total",),
    )


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one place that the guide names."""
    monkeypatch.setitem(PATTERNS, "round_sum", round_sum)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x)).sum(0).square().mean()


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(3)
    return Case(Net(), {"x": torch.randn(12, 24)})


def looped(case: Case, mesh: Mesh) -> tuple[str, Plan]:
    """The best plan in which the sum of forward goes round."""
    sampler = PlanSampler(case.wide_graph, mesh)
    name = next(n for n, options in sampler.strategies.items() if any(one.body == "round_sum" for one in options))
    return name, sampler.best({name: lambda one: one.body == "round_sum"})


def test_until_it_is_listed_nobody_offers_it(case: Case) -> None:
    strategies = PlanSampler(case.wide_graph, mesh_of(4)).strategies
    assert not any(one.body == "round_sum" for options in strategies.values() for one in options)


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 3)], ids=str)
def test_plans_with_it_compute_what_the_model_does_and_send_what_they_say(
    known: None, case: Case, sizes: tuple[int, ...]
) -> None:
    _, found = looped(case, mesh_of(*sizes))
    check_rules(found)
    assert Plan.loads(dumps(found), "text") == found
    for prefetch in (None, 1):
        off, where = difference(replace(found, prefetch=prefetch), case)
        assert off <= TOLERANCE, where
    _, traffic = run_all(found, case.values(found.graph), case.seed)
    assert traffic == {key: nbytes for key, nbytes in found.comm_bytes.items() if nbytes}


def test_it_is_a_loop_that_is_verified_played_written_and_held_in_memory(known: None, case: Case) -> None:
    mesh = mesh_of(4)
    name, plan = looped(case, mesh)
    sampler = PlanSampler(case.wide_graph, mesh)
    strategy = next(one for one in sampler.strategies[name] if one.body == "round_sum")
    program = lower(plan, 1, sampler.pricer)
    verify(program)
    (rounds,) = (one for _, one in program if isinstance(one, Loop))
    assert rounds.rounds == 2
    shifts = [comm for comm in plan.comms() if comm.collective == "shift"]
    assert len(shifts) == 3 and sum(map(received_bytes, shifts)) == 3 * 12 * 8
    assert strategy.workspace == 2 * 12 * 8, "the term that is passed on, and the one that comes"
    assert str(emit(plan, {"a": "a"}).code).count("autopar.shift.default(") == 3
    timeline = timeline_of(plan, sampler.pricer, 1)
    assert sum(event.name == f"{name}: add" for event in timeline.events) == 3


def test_an_edited_plan_that_says_otherwise_is_refused(known: None, case: Case) -> None:
    name, plan = looped(case, mesh_of(4))

    def edited(**parts: Any) -> Plan:
        return replace(plan, choices={**plan.choices, name: replace(plan.choices[name], **parts)})

    for wrong in (edited(roles=("square",)), edited(body_axes=()), edited(body="ring")):
        with pytest.raises(ValueError, match="as it does not offer it"):
            Plan.loads(dumps(wrong), "text")
    with pytest.raises(ValueError, match="other steps than"):
        check_rules(edited(steps=plan.choices[name].steps[:1]))
