"""What people do by hand in stages: Megatron's axes, and layers that are run again where nothing fits otherwise."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar.ir.layout import Replicate, Shard
from autopar.ir.mesh import Mesh
from autopar.rewrite.micro_batches import in_rounds
from autopar.search import Question, Request, ask
from autopar.search.orders import within_stage
from autopar.search.stage_policies import STAGED, StagedRow, compare_staged, documents, table
from tests.support.families import family
from tests.support.machines import FAST

MESH = Mesh(("pipe", "data", "tensor"), (2, 2, 2))
FREE = Request(allow=("recompute",))


@cache
def question() -> Question:
    return ask(in_rounds(family("gpt2").graph, 2), within_stage(MESH), FAST)


def row(request: Request, policy: str, order: tuple[int, str] | None = None) -> StagedRow:
    return compare_staged(question(), MESH, request, [policy], order=order)[0]


def test_megatron_splits_weights_over_the_last_axis_and_the_batch_over_the_others() -> None:
    found = row(FREE, "megatron-3d").found
    assert found is not None
    layouts = found.whole.parameters
    assert {layout[0] for layout in layouts.values()} == {Replicate()}
    assert any(isinstance(layout[1], Shard) for layout in layouts.values())
    rounds = found.whole.graph.rounds
    inputs = [node for node in found.whole.graph.nodes if node.op == "input" and rounds.held(node.name) > 1]
    assert inputs and {found.whole.choices[node.name].gives[0][0] for node in inputs} == {Shard(0)}


@pytest.mark.parametrize("policy", STAGED)
def test_layers_are_run_again_only_where_a_policy_does_not_fit_otherwise(policy: str) -> None:
    free = row(FREE, policy)
    assert free.found is not None and not free.again
    limit = free.found.peak_bytes - 1
    again = row(replace(FREE, memory=limit), policy)
    assert again.found is not None and again.again
    assert again.found.peak_bytes <= limit and again.found.step_seconds > free.found.step_seconds
    closed = row(replace(FREE, memory=limit, allow=()), policy)
    assert closed.found is None and closed.why.startswith("does not fit (needs ")
    tight = row(replace(FREE, memory=again.found.peak_bytes - 1), policy)
    assert tight.found is None and tight.why.startswith("does not fit (needs ") and not tight.again
    told = table(free.found, [again, closed])
    assert "yes, with layers run again" in told and told.count("does not fit") == 1
    assert [one["recomputed"] for one in documents(free.found, [free, again])] == [False, True]


def test_a_policy_has_the_schedule_that_is_asked_for() -> None:
    found = row(FREE, "megatron-3d", (2, "interleaved")).found
    assert found is not None and found.schedule.name == "interleaved" and found.schedule.stages_per_rank == 2
