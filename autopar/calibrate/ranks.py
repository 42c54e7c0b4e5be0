"""The processes that measure: gloo ranks that are started here, or the running world of torchrun. All are busy at once.

`python -m autopar.calibrate.ranks FILE PARTS SECONDS DEVICE` is one of those that are started; rank 0 leaves its
samples in FILE. Progress goes to standard error, from rank 0.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.calibrate.collectives import mesh_shapes, time_collectives
from autopar.calibrate.compute import Made, everything, probes, settle_memory
from autopar.calibrate.measure import Clock, Sample
from autopar.ir.words import count_of
from autopar.machine.cli import INTERRUPTED
from autopar.machine.local_ranks import environment, local_ranks

Say = Callable[[str], None]
PARTS = ("all", "crowd")  # everything; or collectives and a few probes of compute, for one more number of ranks
COMPUTE_SHARE = 0.5  # of the time; the rest is for collectives
BENCHES, MORE = 420, 100  # about so many calls share the time for compute; and what is expected behind so many
PROBES = 20
LOST_S = 120  # a collective that waits longer has lost its partners
START_S = 180  # for starting the processes, beside others who work


def measure_world(parts: str, budget_s: float, device: torch.device, say: Say) -> list[Sample]:
    """Measure in the running world (or alone); the samples are whole on rank 0. All ranks must call it."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    ranks_per_node = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    settle_memory(device)
    clock = Clock(device, ranks_per_node)
    shapes = mesh_shapes(world)
    share = (COMPUTE_SHARE if shapes else 1.0) if parts == "all" else 0.15
    mesh = init_device_mesh(device.type, (world,)) if dist.is_initialized() else None

    def timed(made: Iterable[tuple[str, Made]], within_s: float, count: int, more: int) -> Iterator[Sample]:
        """About `count` calls; what their operands take to make is part of the time."""
        until, left = time.monotonic() + within_s, count
        for what, benches in made:
            say(f"{what}, {count_of(world, 'rank')} at once")
            for bench in benches:
                if world > 1:
                    dist.barrier()
                each_s = max(0.0, until - time.monotonic()) / max(left, more)
                seconds = clock.seconds(bench.call, each_s) / bench.counts
                left -= 1
                yield Sample(bench.curve, bench.step, seconds, (world,), bench.held)

    few = budget_s * 0.15, PROBES, PROBES // 4
    made = timed(everything(device, mesh), budget_s * share, BENCHES, MORE) if parts == "all" else ()
    samples = _mean_over_ranks([*made, *timed(probes(device), *few)], device)
    for sizes in shapes:
        names = tuple(f"a{i}" for i in range(len(sizes)))
        grid = init_device_mesh(device.type, sizes, mesh_dim_names=names)
        samples += time_collectives(grid, ranks_per_node, budget_s * (1 - share) / len(shapes), say)
    if shapes:  # a machine has better moments and worse ones
        samples += _mean_over_ranks([*timed(probes(device), *few)], device)
    return samples


def _mean_over_ranks(samples: Sequence[Sample], device: torch.device) -> list[Sample]:
    if not dist.is_initialized():
        return list(samples)
    told = torch.tensor([sample.seconds for sample in samples], dtype=torch.float64, device=device)
    dist.all_reduce(told)
    means = (told / dist.get_world_size()).tolist()
    return [
        Sample(s.curve, s.step, mean, s.sizes, s.held) for s, mean in zip(samples, means, strict=True)
    ]  # the ranks of one machine differ little; where they do, a step waits for all of them in turn


def device_of(kind: str) -> torch.device:
    """This rank's device. One thread on the CPU, unless OMP_NUM_THREADS says otherwise: as training does."""
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return torch.device(kind)


def start(ranks: int, parts: str, budget_s: float, kind: str) -> list[Sample]:
    """Measure on `ranks` new processes. They end with this call, however it ends. Raises RuntimeError if one fails."""
    with tempfile.TemporaryDirectory(prefix="autopar-calibrate-") as folder:
        command = [sys.executable, "-m", __spec__.name, f"{folder}/samples", parts, str(budget_s), kind]
        env = environment() | {"AUTOPAR_STORE": f"{folder}/store"}
        with local_ranks(command, ranks, env) as processes:
            until = time.monotonic() + START_S + 20 * budget_s
            while None in [process.poll() for process in processes]:
                failed = [i for i, process in enumerate(processes) if process.returncode]
                if failed or time.monotonic() > until:
                    why = f"rank {failed[0]} failed; its error stands above" if failed else "they take far too long"
                    raise RuntimeError(f"measuring on {ranks} processes did not work: {why}")
                time.sleep(0.1)
            if failed := [i for i, process in enumerate(processes) if process.returncode]:
                raise RuntimeError(f"measuring on {ranks} processes did not work: rank {failed[0]} failed")
        return [Sample.from_json(one) for one in json.loads(Path(folder, "samples").read_text())]


def loud(rank: int) -> Say:
    """Progress lines with the seconds since now, from rank 0."""
    started = time.monotonic()

    def say(text: str) -> None:
        if rank == 0:
            print(f"[{time.monotonic() - started:5.1f} s] {text}", file=sys.stderr, flush=True)

    return say


def main(file: str, parts: str, budget: str, kind: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = device_of(kind)
    if world > 1:
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo", init_method=f"file://{os.environ['AUTOPAR_STORE']}",
            rank=rank, world_size=world, timeout=timedelta(seconds=LOST_S),
        )  # fmt: skip
    samples = measure_world(parts, float(budget), device, loud(rank))
    if rank == 0:
        Path(file).write_text(json.dumps([sample.to_json() for sample in samples]))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
