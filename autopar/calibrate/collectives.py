"""Collectives as programs run them: the functional operator on a contiguous tensor and its wait, behind other work.

Called one behind the other they are quicker than in a program: ranks stay in step, and no processor has anything else
to do when a message arrives. So each call stands behind a stretch of compute; its time is what the stretch takes with
it beyond what it takes without. That time has a long tail, which a step pays too: it is a mean, not a quantile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar._compat import functional_collectives
from autopar.calibrate.compute import GROWS_ON_CUDA
from autopar.calibrate.measure import Sample
from cost_models.price import shape_of_groups
from cost_models.steps import Comm

C10D = torch.ops._c10d_functional
assert functional_collectives  # imported for what it registers
SIZES = (2**10, 2**12, 2**13, 2**14, 2**16, 2**18, 2**19, 2**20, 2**22, 2**23, 2**24, 2**26)  # bytes of payload
HELD = (2**13, 2**19, 2**23)
LONGEST_S = 0.4  # of one call: larger messages are left out
PASSES = (2, 6)  # over all sizes, at least and at most
MOST_CALLS = 20  # of a size in a pass
LEAST_S = 1e-6  # of what takes less than the noise
STRETCH = 384  # of the largest stretch of compute: a product of squares of this size
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


def stretches(device: torch.device) -> list[Callable[[], object]]:
    """What stands between the collectives of programs: a few small operators, a pass over memory, a product."""
    grow = GROWS_ON_CUDA if device.type == "cuda" else 1
    few, some = torch.ones(2**10, device=device), torch.ones(2**18 * grow, device=device)
    square = torch.ones(STRETCH * grow, STRETCH * grow, device=device)

    def little() -> Tensor:
        return few.add(1.0).mul(2.0).add(few)

    return [little, lambda: some.add(1.0), lambda: square.mm(square)]


def time_collectives(
    mesh: DeviceMesh, ranks_per_node: int, budget_s: float, say: Callable[[str], None]
) -> Iterator[Sample]:
    """Every collective over every axis of the mesh, all groups of an axis at once. All ranks must call it."""
    sizes = tuple(mesh.mesh.shape)
    world = math.prod(sizes)
    device = torch.device(mesh.device_type)
    each_s = budget_s / (len(TIMED) * mesh.ndim)
    between = stretches(device)
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
            for payload, nbytes, seconds in zip(
                SIZES, payloads, _seconds(calls, between, device, each_s), strict=False
            ):
                step = Comm(collective, f"a{axis}", ranks, nbytes)
                yield Sample(f"{reach}.{collective}.{shape}", step, seconds, sizes, payload in HELD)


def _seconds(
    calls: Sequence[Callable[[], object]],
    between: Sequence[Callable[[], object]],
    device: torch.device,
    budget_s: float,
) -> list[float]:
    """Of one call each, up to the first that takes too long: mean of its passes, and of the ranks.

    Wall clock: a collective is mostly waiting. The sizes take turns, pass by pass, so that a busy moment of the machine
    falls on all of them. Ranks agree how many calls they make, or one would wait for ever.
    """

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def round_s(stretches: Sequence[Callable[[], object]], call: Callable[[], object] | None = None) -> float:
        """Of all these stretches of compute, with the call behind each."""
        dist.barrier()
        begin = now()
        for stretch in stretches:
            result = stretch()
            if call is not None:
                result = call()
        del result
        return now() - begin

    plan: list[tuple[int, int]] = []  # (passes, calls in each)
    for call in calls:
        round_s(between[:1], call)
        one_s = _agreed(round_s(between, call) / len(between), device, "max")
        most = int(budget_s / len(calls) / one_s)
        passes = max(PASSES[0], min(PASSES[1], most))
        plan.append((passes, max(1, min(MOST_CALLS, most // passes))))
        if one_s > LONGEST_S:
            break
    found: list[list[float]] = [[] for _ in plan]
    for number in range(PASSES[1]):
        alone = [round_s([stretch] * MOST_CALLS) / MOST_CALLS for stretch in between]
        for call, (passes, count), times in zip(calls, plan, found, strict=False):
            if number < passes:
                turns = [(number + i) % len(between) for i in range(count)]
                together = round_s([between[turn] for turn in turns], call)
                times.append((together - sum(alone[turn] for turn in turns)) / count)
    return [max(_agreed(_middle(times), device, "mean"), LEAST_S) for times in found]


def _middle(times: list[float]) -> float:
    """The mean, where there are some without the smallest and the largest."""
    return fmean(sorted(times)[1:-1] if len(times) > 4 else times)


def _agreed(value: float, device: torch.device, how: str) -> float:
    told = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
    return float(told) / (1 if how == "max" else dist.get_world_size())
