"""A memory limit is kept by what really runs, the optimizer included."""

from __future__ import annotations

import autopar
from autopar.ir.mesh import Mesh
from autopar.measure.twin import measure, memory_of, traced
from autopar.search import Request, search
from benchmarks.models import MODELS
from cost_models.hardware import Hardware
from tests.processes.compare import same_steps
from tests.processes.worker import Ranks
from tests.support.families import family

MACHINE = Hardware.load("cpu-gloo")


def check_a_limit_is_kept(ranks: Ranks) -> None:
    """Just under what the best plan takes, and under what that one takes, until nothing fits or is found no more."""
    for name in ("mlp", "conv"):
        model, inputs, _ = MODELS[name]()
        graph, mesh = traced(model, (), inputs), Mesh(("data",), (2,))
        limit, tried = search(graph, mesh, MACHINE).peak_bytes["hbm"] * 0.999, 0
        for _ in range(3):
            try:
                plan = search(graph, mesh, MACHINE, Request(memory=limit))
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
        found = memory_of(search(graph, mesh, MACHINE, Request(policy=policy)), model, (), inputs)["step"]
        assert found.predicted is not None
        print(f"embeddings {policy or 'searched'} {found.predicted / found.measured:.4f}")
        assert 0.98 <= found.predicted / found.measured <= 1.05, (policy, found)


def check_zero1(ranks: Ranks) -> None:
    """Every weight gathered once, every gradient reduced once: the losses of one process, the bytes that the plan says,
    and its memory, which is more than that of zero2, which is more than that of fsdp.
    """
    for name in ("mlp", "gpt2"):
        case, mesh = family(name), Mesh(("data",), (2,))
        plans = [search(case.graph, mesh, MACHINE, Request(policy=policy)) for policy in ("fsdp", "zero2", "zero1")]
        found = [measure(plan, case.model, (), case.inputs, steps=1) for plan in plans]
        peaks = [one.peak_bytes["step"] for one in found]
        assert all(abs(peak.measured - peak.predicted) <= 0.001 * peak.measured for peak in peaks), peaks
        assert peaks[0].measured < peaks[1].measured < peaks[2].measured
        assert all(one.is_equal for one in found)
        received = {one.kind: one.nbytes[1] for one in found[-1].collectives}
        whole = sum(parameter.nbytes for parameter in case.model.parameters())
        assert received["all_gather"] == received["reduce_scatter"] == whole // 2, received
        parallel = autopar.compile(case.model, ranks.mesh(), example_kwargs=case.inputs, plan=plans[-1])
        same_steps(case.model, parallel, case.inputs)
