"""Micro-batches over processes: the numbers of one process and the whole batch, whatever else the plan splits."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

import autopar
from autopar.ir.mesh import Mesh
from autopar.rewrite.micro_batches import in_rounds
from autopar.search import Request, search
from tests.processes.compare import LOSS, adamw, loss_of, near, same_gradients, same_steps
from tests.processes.worker import Ranks
from tests.support.families import family
from tests.support.machines import FAST

POLICIES = ("zero3", "tensor-parallel", "fsdp+tensor-parallel")


def check_policies(ranks: Ranks) -> None:
    """Parameters in pieces, batches in pieces, products in pieces: each round does what the plan says."""
    for name in ("mlp", "gpt2"):
        case = family(name)
        graph = in_rounds(case.graph, 2)
        sizes = {"data": 2, "tensor": 2} if ranks.count == 4 else {"data": 2}
        mesh = autopar.init_mesh("cpu", **sizes)
        for policy in POLICIES[:1] if ranks.count == 2 else POLICIES:
            path = ranks.folder / f"{name}-{policy}.json"
            if ranks.rank == 0:
                search(graph, _mesh(sizes), FAST, Request(policy=policy)).save(path)
            dist.barrier()
            plain = copy.deepcopy(case.model)
            parallel = autopar.compile(copy.deepcopy(case.model), mesh, plan=path)
            made = adamw(plain.parameters()), adamw(parallel.parameters())
            same_steps(plain, parallel, case.inputs, made, steps=2)
            assert parallel.plan.graph.rounds.count == 2, policy


def check_parts_of_each_rank(ranks: Ranks) -> None:
    """Each rank passes its own rows: they are cut where they lie, and own rows come back."""
    case, mesh = family("mlp"), autopar.init_mesh("cpu", data=ranks.count)
    inputs = {key: torch.cat([value, value + 0.25]) for key, value in case.inputs.items()}
    plain = copy.deepcopy(case.model)
    parallel = autopar.compile(copy.deepcopy(case.model), mesh, inputs="local", micro_batches=2)
    share = len(inputs["x"]) // ranks.count
    mine = {key: value[ranks.rank * share : (ranks.rank + 1) * share] for key, value in inputs.items()}
    for _ in range(2):
        ours, wanted = loss_of(parallel(**mine)), loss_of(plain(**inputs))
        near(ours, wanted, LOSS, "loss")
        ours.backward(), wanted.backward()
    same_gradients(plain, parallel)


def check_a_smaller_limit_is_met_by_more_of_them(ranks: Ranks) -> None:
    """What one step at once cannot do in the memory, the search does in several, and nobody holds more than that."""
    case, mesh = family("gpt2"), autopar.init_mesh("cpu", data=ranks.count)
    inputs = {key: torch.cat([value] * 8) for key, value in case.inputs.items()}
    options = {"hardware": FAST, "allow": "none", "example_kwargs": inputs}
    at_once = autopar.compile(copy.deepcopy(case.model), mesh, **options).plan
    limit = int(0.6 * at_once.peak_bytes["hbm"])
    parallel = autopar.compile(copy.deepcopy(case.model), mesh, memory=limit, micro_batches="auto", **options)
    plain = copy.deepcopy(case.model)
    same_steps(plain, parallel, inputs, (adamw(plain.parameters()), adamw(parallel.parameters())), steps=2)
    assert parallel.plan.graph.rounds.count > 1 and parallel.plan.peak_bytes["hbm"] <= limit


def _mesh(sizes: dict[str, int]) -> Mesh:
    return Mesh(tuple(sizes), tuple(sizes.values()))
