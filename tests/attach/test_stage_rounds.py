"""In every stage of a pipeline a micro-batch is of the same rows."""

from __future__ import annotations

import random

import pytest
import torch

from autopar.attach.rounds import Cut, played_in_stage
from autopar.decide.stages import in_stages
from autopar.errors import NotCut
from autopar.ir.layout import Layout, Shard
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.rewrite.stages import CHANNEL, Stage, forward_order
from tests.support.families import family
from tests.support.machines import machine
from tests.support.plans import PlanSampler

ROWS, COUNT = 4, 2
MESH, HARDWARE = Mesh(("data",), (2,)), machine()


def rows_of(cut: Cut, layout: Layout, rank: int, number: int) -> list[int]:
    """Which rows of the batch this rank reads in the micro-batch of that number, or puts where they were made."""
    rows = torch.arange(ROWS)
    if layout[0] == Shard(cut.dim):
        rows = rows.chunk(2)[rank]
    return rows.unflatten(0, (cut.blocks, COUNT, -1))[:, number].flatten().tolist()


@pytest.mark.parametrize("name", ["t5", "gpt2"])
def test_a_micro_batch_is_of_the_same_rows_in_all_stages(name: str) -> None:
    """Whether a stage has its inputs and outputs whole or in pieces: together its ranks read what others read."""
    graph = in_rounds_of_stages(family(name).graph, COUNT)
    length, drawn, kinds = len(forward_order(graph)), random.Random(0), set[tuple[bool, ...]]()
    for seed in range(6):
        plan = PlanSampler(graph, MESH).draw(seed)
        pricer = Pricer.on(MESH, HARDWARE, "adamw", 0, graph.rounds)
        ends = drawn.sample(range(1, length), length - 1)
        cut = next(cut for end in ends if (cut := _cut(plan, end, pricer)) is not None)
        read, whole = list[list[int]](), list[bool]()
        for stage, own in cut:
            inputs = [node for node in stage.graph.nodes if node.op == "input" and not node.target.startswith(CHANNEL)]
            results = [
                (result, delivery.layout)
                for result, delivery in zip(own.graph.results, own.deliveries, strict=True)
                if result.kind == "output" and not result.target.startswith(CHANNEL) and delivery is not None
            ]
            played = played_in_stage(plan, own, inputs, results)
            layouts = [own.choices[node.name].gives[0] for node in inputs], [layout for _, layout in results]
            for how, layout in zip((*played.inputs, *played.outputs), [*layouts[0], *layouts[1]], strict=True):
                if isinstance(how, Cut):
                    whole.append(layout[0] != Shard(how.dim))
                    read.append(sorted({row for rank in range(2) for row in rows_of(how, layout, rank, 0)}))
        assert all(one == read[0] for one in read), (seed, read)
        kinds.add(tuple(sorted(set(whole))))
    assert (False, True) in kinds, "no plan has both"


def _cut(plan: Plan, end: int, pricer: Pricer) -> tuple[tuple[Stage, Plan], ...] | None:
    try:
        return in_stages(plan, [end], pricer)
    except NotCut:
        return None
