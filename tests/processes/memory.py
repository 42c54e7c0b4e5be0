"""A memory limit is kept by what really runs, the optimizer included."""

from __future__ import annotations

import autopar
from autopar.measure.twin import memory_of, traced
from autopar.mesh import Mesh
from autopar.search import search
from benchmarks.models import MODELS
from cost_models.hardware import Hardware
from tests.processes.worker import Ranks

MACHINE = Hardware.load("cpu-gloo")


def check_a_limit_is_kept(ranks: Ranks) -> None:
    """Just under what the best plan takes, and under what that one takes, until nothing fits or is found no more."""
    for name in ("mlp", "conv"):
        model, inputs, _ = MODELS[name]()
        graph, mesh = traced(model, (), inputs), Mesh(("data",), (2,))
        limit, tried = search(graph, mesh, MACHINE).peak_bytes["hbm"] * 0.999, 0
        for _ in range(3):
            try:
                plan = search(graph, mesh, MACHINE, memory=limit)
            except autopar.Infeasible:
                break
            measured = memory_of(plan, model, (), inputs)["step"].measured
            assert measured <= limit * 1.001, (name, limit, plan.peak_bytes, measured)  # counters of steps come on top
            limit, tried = plan.peak_bytes["hbm"] * 0.999, tried + 1
        assert tried, name


def check_lookups(ranks: Ranks) -> None:
    """Their indices must be real: a fake group does not do."""
    model, inputs, _ = MODELS["embeddings"]()
    graph, mesh = traced(model, (), inputs), Mesh(("data",), (2,))
    for policy in (None, "fsdp", "data-parallel"):
        found = memory_of(search(graph, mesh, MACHINE, policy=policy), model, (), inputs)["step"]
        assert found.predicted is not None
        print(f"embeddings {policy or 'searched'} {found.predicted / found.measured:.4f}")
        assert 0.98 <= found.predicted / found.measured <= 1.05, (policy, found)
