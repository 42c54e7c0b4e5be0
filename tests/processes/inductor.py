"""The generated code, compiled."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch.distributed as dist

import autopar
from autopar.attach.tensors import mesh_of
from autopar.plan import Plan
from tests.processes.compare import LOSS, loss_of, near, same_gradients, same_steps, splits
from tests.processes.families import trains
from tests.processes.models import batch, net
from tests.processes.worker import Ranks
from tests.support.families import family
from tests.support.machines import FAST
from tests.support.plans import PlanSampler

PATTERNS = {"mlp": ("ring", "ring reduce-scatter"), "llama": ("context parallel: ring",)}


def check_steps(ranks: Ranks) -> None:
    plain = net()
    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST, backend="inductor")
    same_steps(plain, parallel, batch(), steps=3)
    splits(parallel)


def check_families(ranks: Ranks) -> None:
    for name in ("gpt2", "cnn"):
        trains(name, ranks, backend="inductor")


def check_two_axes(ranks: Ranks) -> None:
    trains("llama", ranks, 2, ranks.count // 2, backend="inductor")


def check_micro_batches(ranks: Ranks) -> None:
    trains("gpt2", ranks, micro_batches=2, backend="inductor")


def _runs(name: str, plan: Plan, ranks: Ranks, what: str) -> None:
    """One step of a plan that rank 0 has, compiled, beside the plain model's."""
    file, case = ranks.folder / f"{name}-{what}.json".replace(" ", "-").replace(":", ""), family(name)
    if ranks.rank == 0:
        plan.save(file)
    dist.barrier()
    plain = copy.deepcopy(case.model)
    parallel = autopar.compile(copy.deepcopy(plain), ranks.mesh(), plan=file, hardware=FAST, backend="inductor")
    ours, wanted = loss_of(parallel(**case.inputs)), loss_of(plain(**case.inputs))
    near(ours, wanted, LOSS, f"loss of {name}, {what}")
    ours.backward(), wanted.backward()
    same_gradients(plain, parallel)


def check_random_plans(ranks: Ranks) -> None:
    """Gradients one by one, and in buckets, whose sums are made in place where nothing is compiled."""
    for name, seeds in (("mlp", range(4)), ("cnn", range(2))):
        sampler = PlanSampler(family(name).graph, mesh_of(ranks.mesh()), FAST)
        for seed in seeds:
            plan = replace(sampler.draw(seed), bucket_bytes=(1 << 20) * (seed % 2), prefetch=1)
            _runs(name, plan, ranks, f"random {seed}")


def check_patterns(ranks: Ranks) -> None:
    """Loops that send beside their work."""
    for name, patterns in PATTERNS.items():
        sampler = PlanSampler(family(name).graph, mesh_of(ranks.mesh()), FAST)
        for pattern in patterns:
            _runs(name, sampler.looping(pattern), ranks, pattern)
