"""Recomputed and offloaded values, parameters on the host and streamed states, on real processes: the plain losses."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

import autopar
from autopar.ir.mesh import Mesh
from autopar.ir.work import FETCH, STORE
from autopar.optim import Streamed
from autopar.plan import Plan
from tests.processes.compare import GRADIENT, LOSS, PARAMETER, adamw, loss_of, near, same_gradients, same_state
from tests.processes.worker import Ranks
from tests.support.families import family
from tests.support.residence import ResidenceSampler


def check_training(ranks: Ranks) -> None:
    """The first random plan of each model that has all there is; five steps each."""
    for name in ("mlp", "block"):
        case, mesh = family(name), Mesh(("data",), (ranks.count,))
        sampler = ResidenceSampler(case.graph, mesh)
        plan = next(plan for plan in map(sampler.draw, range(50)) if has_all(plan))
        for prefetch in (None, 1):
            trains(ranks, name, replace(plan, prefetch=prefetch, bucket_bytes=3000))


def has_all(plan: Plan) -> bool:
    runs_again = any(node.target and not node.is_source for node in plan.graph.nodes)
    return (
        runs_again
        and {node.op for node in plan.graph.nodes} >= {STORE, FETCH}
        and {*plan.residence.values()} == {"host", "stream"}
        and bool(plan.comm_bytes)
    )


def trains(ranks: Ranks, name: str, plan: Plan) -> None:
    case = family(name)
    plain = copy.deepcopy(case.model)
    parallel = autopar.compile(plain, ranks.mesh(), example_kwargs=case.inputs, plan=plan)
    optimizers = adamw(plain.parameters()), Streamed(adamw(parallel.parameters()), parallel)
    for _ in range(5):
        losses = [loss_of(module(**case.inputs)) for module in (plain, parallel)]
        near(losses[1], losses[0], LOSS, f"loss of {name}")
        for loss in losses:
            loss.backward()
        same_gradients(plain, parallel)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_state(plain, parallel, PARAMETER)


def check_clipping(ranks: Ranks) -> None:
    case, mesh = family("block"), Mesh(("data",), (ranks.count,))
    plan = ResidenceSampler(case.graph, mesh).draw(5)
    plain = copy.deepcopy(case.model)
    parallel = autopar.compile(plain, ranks.mesh(), example_kwargs=case.inputs, plan=plan)
    for module in (plain, parallel):
        loss_of(module(**case.inputs)).backward()
    norms = [torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1) for module in (plain, parallel)]
    near(norms[1], norms[0], GRADIENT, "norm")
    same_gradients(plain, parallel)
