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
PASSES = 4  # over all sizes
LOW = 0.15  # quantile of the rounds: others on the machine only make them longer
TIMED = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def mesh_shapes(world: int) -> list[tuple[int, ...]]:
    """Meshes whose axes have the group shapes worth knowing: all ranks, two on the outer axis, two on the inner."""
    shapes = [(world,)] if world > 1 else []
    if world >= 4 and world % 2 == 0:
        shapes += [(2, world // 2)] if world == 4 else [(2, world // 2), (world // 2, 2)]
    return shapes


def _call(collective: str, payload: int, ranks: int, group: str, device: torch.device) -> Callable[[], Tensor]:
    count = payload // 4
    x = torch.ones(count // ranks if collective == "all_gather" else count, device=device)
    splits = [count // ranks] * ranks
    started: dict[str, Callable[[Tensor], Any]] = {
        "all_gather": lambda x: C10D.all_gather_into_tensor.default(x, ranks, group),
        "reduce_scatter": lambda x: C10D.reduce_scatter_tensor.default(x, "sum", ranks, group),
        "all_reduce": lambda x: C10D.all_reduce.default(x, "sum", group),
        "all_to_all": lambda x: C10D.all_to_all_single.default(x, splits, splits, group),
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
        reach = "inter" if crosses else "intra"
        shape = f"{ranks}x{shape_of_groups(ranks, world, ranks_per_node, crosses)}"
        group = mesh.get_group(axis).group_name
        for collective in TIMED:
            say(f"{collective} of {ranks} ranks, axis {axis} of {'x'.join(map(str, sizes))}")
            payloads = [payload // (4 * ranks) * 4 * ranks for payload in SIZES]
            calls = [_call(collective, nbytes, ranks, group, device) for nbytes in payloads]
            for payload, nbytes, seconds in zip(SIZES, payloads, _seconds(calls, device, each_s), strict=False):
                step = Comm(collective, f"a{axis}", ranks, nbytes)
                yield Sample(f"{reach}.{collective}.{shape}", step, seconds, sizes, payload in HELD)


def _seconds(calls: list[Callable[[], Tensor]], device: torch.device, each_s: float) -> list[float]:
    """Of one call each, up to the first that takes too long: low quantile of rounds, mean over the ranks.

    Wall clock: a collective is mostly waiting. The sizes take turns, pass by pass, so that a busy moment of the machine
    falls on all of them. Ranks agree how many calls they make, or one would wait for ever.
    """

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    plan: list[tuple[int, int]] = []  # (calls in a round, rounds in a pass)
    rounds: list[list[float]] = []
    for call in calls:
        result = call()
        dist.barrier()
        begin = now()
        result = call()
        one_s = _agreed(now() - begin, device, "max")
        per_round = max(1, min(20, int(2e-3 / one_s)))
        plan.append((per_round, max(1, min(10, int(each_s / PASSES / (one_s * per_round))))))
        rounds.append([])
        if one_s > LONGEST_S:
            break
    for _ in range(PASSES):
        for call, (per_round, count), found in zip(calls, plan, rounds, strict=False):
            for _ in range(count):
                begin = now()
                for _ in range(per_round):
                    result = call()
                found.append((now() - begin) / per_round)
    del result
    return [_agreed(quantile(found, LOW), device, "mean") for found in rounds]


def _agreed(value: float, device: torch.device, how: str) -> float:
    told = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
    return max(float(told) / (1 if how == "max" else dist.get_world_size()), 1e-9)
