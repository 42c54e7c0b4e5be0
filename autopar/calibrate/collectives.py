"""Collectives as emitted programs run them: the functional operator on a contiguous tensor, and its wait."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar._compat import functional_collectives
from autopar.calibrate.measure import Sample, quantile
from cost_models.price import shape_of_groups
from cost_models.steps import Comm

C10D = torch.ops._c10d_functional
assert functional_collectives  # imported for what it registers
SIZES = (2**10, 2**12, 2**13, 2**14, 2**16, 2**18, 2**19, 2**20, 2**22, 2**23, 2**24, 2**26)  # bytes of payload
HELD = (2**13, 2**19, 2**23)
LONGEST_S = 0.4  # of one call: larger messages are left out
TIMED = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def mesh_shapes(world: int) -> list[tuple[int, ...]]:
    """Meshes whose axes have every group shape worth knowing: all ranks, two in the outer axis, two in the inner one."""
    shapes = [(world,)] if world > 1 else []
    if world >= 4 and world % 2 == 0:
        shapes += [(2, world // 2)] if world == 4 else [(2, world // 2), (world // 2, 2)]
    return shapes


def _call(collective: str, payload: int, ranks: int, group: str, device: torch.device) -> Callable[[], Tensor]:
    count = payload // 4
    x = torch.ones(count // ranks if collective == "all_gather" else count, device=device)
    started: dict[str, Callable[[Tensor], Any]] = {
        "all_gather": lambda x: C10D.all_gather_into_tensor.default(x, ranks, group),
        "reduce_scatter": lambda x: C10D.reduce_scatter_tensor.default(x, "sum", ranks, group),
        "all_reduce": lambda x: C10D.all_reduce.default(x, "sum", group),
        "all_to_all": lambda x: C10D.all_to_all_single.default(
            x, [count // ranks] * ranks, [count // ranks] * ranks, group
        ),
    }

    def run(start: Callable[[Tensor], Any]) -> Tensor:
        return C10D.wait_tensor.default(start(x.contiguous()))

    return partial(run, started[collective])


def time_collectives(
    mesh: DeviceMesh, ranks_per_node: int, budget_s: float, say: Callable[[str], None]
) -> Iterator[Sample]:
    """Every collective over every axis of the mesh, all groups of an axis at once. All ranks must call it."""
    sizes = tuple(mesh.mesh.shape)
    world = math.prod(sizes)
    device = torch.device(mesh.device_type)
    each_s = budget_s / (len(TIMED) * len(SIZES) * mesh.ndim)
    for axis, ranks in enumerate(sizes):
        if ranks == 1:
            continue
        stride = math.prod(sizes[axis + 1 :])
        crosses = world > ranks_per_node and any(
            first // ranks_per_node != (first + stride * (ranks - 1)) // ranks_per_node
            for block in range(0, world, ranks * stride)
            for first in range(block, block + stride)
        )
        shape = (
            f"{'inter' if crosses else 'intra'}",
            f"{ranks}x{shape_of_groups(ranks, world, ranks_per_node, crosses)}",
        )
        group = mesh.get_group(axis).group_name
        for collective in TIMED:
            say(f"{collective} of {ranks} ranks, axis {axis} of {'x'.join(map(str, sizes))}")
            for payload in SIZES:
                nbytes = payload // (4 * ranks) * 4 * ranks
                seconds = _seconds(_call(collective, nbytes, ranks, group, device), device, each_s)
                step = Comm(collective, f"a{axis}", ranks, nbytes)
                yield Sample(f"{shape[0]}.{collective}.{shape[1]}", step, seconds, sizes, payload in HELD)
                if seconds > LONGEST_S:
                    break


def _seconds(call: Callable[[], Tensor], device: torch.device, budget_s: float) -> float:
    """Of one call, the same on every rank: lower quartile over rounds on the wall clock, mean over the ranks.

    Ranks agree how many calls they make, or one would wait for ever. Small messages are timed several to a round.
    """

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    result = call()
    dist.barrier()
    begin = now()
    result = call()
    one_s = _agreed(now() - begin, device, "max")
    per_round = max(1, min(20, int(2e-3 / one_s)))
    count = max(3, min(40, int(budget_s / (one_s * per_round))))
    rounds: list[float] = []
    for _ in range(count):
        begin = now()
        for _ in range(per_round):
            result = call()
        rounds.append((now() - begin) / per_round)
    del result
    return _agreed(quantile(rounds, 0.25), device, "mean")


def _agreed(value: float, device: torch.device, how: str) -> float:
    told = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
    return max(float(told) / (1 if how == "max" else dist.get_world_size()), 1e-9)
