"""What stages hold and send on real processes, beside what their pipeline says: every byte."""

from __future__ import annotations

import copy

import torch.distributed as dist

from autopar.ir.mesh import Mesh
from autopar.measure.pipeline import measure_pipeline
from autopar.measure.twin import traced
from autopar.search import Request
from autopar.search.pipelines import find_pipeline
from tests.processes.worker import Ranks
from tests.support.families import family
from tests.support.machines import machine

NEAR, ABOVE = 0.999, 1.02  # where a value goes to two readers, what is predicted may be more than what is held
CASES = {
    2: (
        ("embeds", "zb-h1", 4),
        ("gpt2", "1f1b", 4),
        ("t5", "zb-h1", 4),
        ("llama", "interleaved", 4),
        ("gpt2", "zb-v", 4),
        ("vit", "gpipe", 2),
    ),
    4: (("embeds", "1f1b", 4), ("gpt2", "1f1b", 4), ("llama", "interleaved-zb", 4), ("t5", "zb-h2", 4)),
}


def check_what_stages_hold_and_send(ranks: Ranks) -> None:
    sizes = (2, 2) if ranks.count == 4 else (2,)
    mesh = Mesh(("pipe", "data")[: len(sizes)], sizes)
    wrong: list[str] = []
    for name, schedule, count in CASES[ranks.count]:
        case = family(name)
        graph = traced(case.model, (), case.inputs)
        pipeline = find_pipeline(graph, mesh, machine(1e10, flops=1e10), count, Request(), schedule=schedule)
        found = measure_pipeline(pipeline, copy.deepcopy(case.model), (), case.inputs, steps=1)
        if not found.is_equal:
            wrong.append(f"{name}, {schedule}: {[(one.sent, dict(one.collectives)) for one in found.ranks]}")
        for rank in found.ranks:
            assert rank.peak.predicted is not None
            if not NEAR * rank.peak.measured <= rank.peak.predicted <= ABOVE * rank.peak.measured:
                wrong.append(f"{name}, {schedule}: {[one.peak for one in found.ranks]}")
        assert found.step.measured > 0 and all(one.forward.measured > 0 for one in found.stages)
        dist.barrier()
    assert not wrong, "\n".join(wrong)
