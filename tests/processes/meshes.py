"""A mesh that the plan decides: training is that of one process, whatever is made of the devices."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import autopar
from autopar.ir.mesh import Mesh
from autopar.search import Request, search
from tests.processes.compare import LOSS, adamw, loss_of, near, same_gradients, same_state, same_steps
from tests.processes.worker import Ranks
from tests.support.families import family
from tests.support.machines import FAST

SLOW = replace(FAST.links["inter"], latency_s=1e-10, bytes_per_s=FAST.links["intra"].bytes_per_s / 50)
NODES_OF_TWO = replace(
    FAST, name="nodes of two", ranks_per_node=2,
    links={"intra": replace(FAST.links["intra"], latency_s=1e-10), "inter": SLOW},
)  # fmt: skip


def check_the_plan_decides(ranks: Ranks) -> None:
    """Also where an optimizer has the parameters before there is a plan."""
    case, devices = family("mlp"), autopar.init_mesh("cpu", devices=ranks.count)
    plain = copy.deepcopy(case.model)
    parallel = autopar.compile(case.model, devices, hardware=NODES_OF_TWO)
    same_steps(plain, parallel, case.inputs, (adamw(plain.parameters()), adamw(parallel.parameters())))
    assert parallel.plan.mesh.ranks == ranks.count
    held = [p for p in parallel.parameters() if isinstance(p, DTensor)]
    assert all(tuple(p.device_mesh.shape) == parallel.plan.mesh.sizes for p in held)
    whole = parallel.full_state_dict(rank0_only=False)
    same_state(plain, parallel)
    assert all(torch.equal(whole[name], value) for name, value in parallel.full_state_dict(rank0_only=False).items())
    told = [None] * ranks.count
    dist.all_gather_object(told, str(parallel.plan.mesh))
    assert len({*told}) == 1


def check_two_axes_with_parts_of_the_batch(ranks: Ranks) -> None:
    """What each rank loads lies along one axis until the plan has two; evaluation and other sizes take its mesh."""
    case, mesh = family("mlp"), Mesh(("data", "tensor"), (2, ranks.count // 2))
    if ranks.rank == 0:
        search(case.graph, mesh, FAST, Request(policy="fsdp+tensor-parallel")).save(ranks.folder / "two.json")
    dist.barrier()
    plain, devices = copy.deepcopy(case.model), autopar.init_mesh("cpu", devices=ranks.count)
    parallel = autopar.compile(case.model, devices, plan=ranks.folder / "two.json", inputs="local")
    share = len(case.inputs["x"]) // ranks.count
    mine = {name: value[ranks.rank * share : (ranks.rank + 1) * share] for name, value in case.inputs.items()}
    for _ in range(2):
        ours, wanted = loss_of(parallel(**mine)), loss_of(plain(**case.inputs))
        near(ours, wanted, LOSS, "loss")
        ours.backward(), wanted.backward()
    same_gradients(plain, parallel)
    assert parallel.plan.mesh == mesh
    plain.eval(), parallel.eval()
    with torch.no_grad():
        near(loss_of(parallel(**mine)), loss_of(plain(**case.inputs)), 10 * LOSS, "loss in eval mode")


def check_wrong_numbers_are_refused(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=f"devices={ranks.count + 1} is asked for, but {ranks.count} processes run"):
        autopar.init_mesh("cpu", devices=ranks.count + 1)
    with pytest.raises(ValueError, match="leaves the axes to the plan, and data="):
        autopar.init_mesh("cpu", devices=ranks.count, data=ranks.count)
    case = family("mlp")
    if ranks.rank == 0:
        search(case.graph, Mesh(("data",), (3,)), FAST).save(ranks.folder / "three.json")
    dist.barrier()
    with pytest.raises(ValueError, match=f"has 3 ranks, but {ranks.count} processes run"):
        devices = autopar.init_mesh("cpu", devices=ranks.count)
        autopar.compile(case.model, devices, plan=ranks.folder / "three.json")
