"""What the user closes, no plan does: every combination of ways, wherever a plan may come from."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from itertools import chain, combinations

import pytest
import torch
from torch import nn

from autopar.errors import Infeasible
from autopar.measure.twin import traced
from autopar.plan import Plan
from autopar.plan.tell import OFFLOADED, RECOMPUTED, modes_of
from autopar.search import Question, Request, answer, ask
from autopar.search.baselines import compare
from autopar.search.curve import memory_curve
from autopar.search.memory_options import ALLOWED
from autopar.search.policies import MEMORY_SAVING, NEEDS, POLICIES, is_open
from cost_models.hardware import Hardware
from tests.support.check import mesh_of

WAYS = [*chain.from_iterable(combinations(ALLOWED, count) for count in range(len(ALLOWED) + 1))]
SHARES = (0.6, 0.8)  # of what the fastest plan needs


class Layers(nn.Module):
    """Two alike, so that there are layers to checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def question(ranks: int) -> Question:
    with torch.device("meta"):
        graph = traced(Layers(), (torch.empty(1024, 64),), {})
    return ask(graph, mesh_of(ranks), Hardware.load("h100-sxm"))


ONE = [("offload-activations",), ("offload-parameters",), ("recompute",)]


def done_by(plan: Plan) -> set[str]:
    """The ways that a plan goes."""
    found = {{RECOMPUTED: "recompute", OFFLOADED: "offload"}[mode] for mode in modes_of(plan).values()}
    return found | {where for where in plan.residence.values() if where != "device"}


def within(words: Collection[str]) -> set[str]:
    """The ways that these words allow."""
    return {ALLOWED[word] for word in words}


@cache
def limits(ranks: int) -> tuple[float, ...]:
    return tuple(share * answer(question(ranks)).peak_bytes["hbm"] for share in SHARES)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ways", WAYS, ids=lambda ways: ",".join(ways) or "none")
def test_a_plan_does_what_is_allowed_and_nothing_else(ranks: int, ways: Collection[str]) -> None:
    """As it is found, and beside the baselines, which may take its place."""
    asked, found = question(ranks), 0
    for limit, simulation in ((limits(ranks)[0], True), (limits(ranks)[1], True), (limits(ranks)[0], False)):
        try:
            plan = answer(asked, Request(memory=limit, allow=ways, simulation=simulation, time_limit_s=20))
        except Infeasible:
            continue
        found += 1
        assert done_by(plan) <= within(ways), (limit, simulation)
        assert plan.peak_bytes["hbm"] <= limit
        if ranks == 2 and found == 1:
            rows = compare(asked, plan, Request(memory=limit, outputs="sharded", time_limit_s=20))
            assert {row.policy for row in rows} >= NEEDS.keys(), "all are compared with, whatever is allowed"
    assert found or not ways or ranks == 1


def test_offload_alone_once_gave_a_plan_that_recomputes() -> None:
    """Of candidates that were played, checkpointing was the quickest."""
    found = {}
    for ways in (("offload-activations",), ("recompute", "offload-activations")):
        plan = answer(question(2), Request(memory=limits(2)[1], allow=ways, simulation=True))
        found[ways] = {candidate.name for candidate in plan.candidates}
    assert "checkpoint-every-block" in found["recompute", "offload-activations"]
    assert not found["offload-activations",] & NEEDS.keys()


@pytest.mark.parametrize(
    "ways", [("offload-activations",), ("offload-parameters",), ("recompute",)], ids=lambda ways: ways[0]
)
def test_every_point_of_a_curve_does_what_is_allowed(ways: Collection[str]) -> None:
    for point in memory_curve(question(2), Request(allow=ways, simulation=True, time_limit_s=20), points=3):
        assert done_by(point.plan) <= within(ways)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "fsdp+tensor-parallel"])
def test_a_policy_says_which_ways_it_goes(policy: str) -> None:
    """Elixir's search puts parameters on the host where there is little room, and checkpoints always."""
    limit = None
    if policy == "elixir":
        limit = 0.4 * answer(question(2), Request(policy=policy)).peak_bytes["hbm"]
    try:
        plan = answer(question(2), Request(policy=policy, memory=limit))
    except Infeasible:
        return
    assert done_by(plan) <= {*NEEDS.get(policy, ())}
    assert is_open(policy, NEEDS.get(policy, ())) and is_open(policy, ()) == (policy not in NEEDS)
    assert not NEEDS.keys() - MEMORY_SAVING.keys()
