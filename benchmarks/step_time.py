"""Step time of autopar's plan beside torch's own DDP, fully_shard and a hand-written tensor parallel, in one run.

    python -m benchmarks.step_time --processes 2 4 --models mlp conv gpt2 -o docs/benchmarks/step_time.md

Same model, weights, global batch, forward + backward + AdamW, one thread a process, gloo. The methods take turns, round
by round, so that whatever else the machine does falls on all of them, and another begins each round; the figure is the
median of the rounds, as a ratio to the best of torch's methods. More than one process per core is not a fair machine:
read the ratios, not the times.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.machine.local_ranks import environment
from benchmarks.models import MODELS

Step = Callable[[], float]


def _loss(out: object) -> Tensor:
    return out if isinstance(out, Tensor) else out["loss"]  # type: ignore[index]


def _step(model: nn.Module, kwargs: dict[str, Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def run() -> float:
        loss = _loss(model(**kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return run


def _part(kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's rows of the batch, for the data-parallel methods."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {name: value.chunk(world)[rank].contiguous() for name, value in kwargs.items()}


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module | None:
    """Column then row, by hand, for the linear pairs of the models that have them; None where there are none."""
    names = {name for name, _ in model.named_modules()}
    for up, down in (("up", "down"), ("fc1", "fc2")):
        if {up, down} <= names:
            return parallelize_module(model, mesh, {up: ColwiseParallel(), down: RowwiseParallel()})
    if {"mlp.0", "mlp.2"} <= names:
        return parallelize_module(model, mesh, {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
    return None


def methods(model: nn.Module, kwargs: dict[str, Tensor], mesh: DeviceMesh, hardware: str) -> dict[str, Step]:
    found: dict[str, Step] = {}
    plan = autopar.compile(copy.deepcopy(model), mesh, hardware=hardware, example_kwargs=kwargs)
    found["autopar"] = _step(plan, kwargs)
    found["DDP"] = _step(DistributedDataParallel(copy.deepcopy(model)), _part(kwargs))
    sharded = copy.deepcopy(model)
    units = ("GPT2Block",) if hasattr(sharded, "transformer") else ("Linear", "Embedding", "Conv2d")
    for child in [module for module in sharded.modules() if type(module).__name__ in units]:
        fully_shard(child, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    found["fully_shard"] = _step(sharded, _part(kwargs))
    tensor = _tensor_parallel(copy.deepcopy(model), mesh)
    if tensor is not None:
        found["tensor parallel"] = _step(tensor, kwargs)
    found["whole on each"] = _step(copy.deepcopy(model), kwargs)
    if dist.get_rank() == 0:
        print(plan.plan.explain(), file=sys.stderr)
    return found


def worker(name: str, rounds: int, hardware: str) -> None:
    torch.set_num_threads(1)
    mesh = autopar.init_mesh("cpu")
    torch.manual_seed(0)
    model, kwargs, told = MODELS[name]()
    steps = methods(model, kwargs, mesh, hardware)
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {method: [] for method in steps}
    turns = list(steps)
    for _ in range(rounds):
        for method in turns:
            dist.barrier()
            start = time.perf_counter()
            steps[method]()
            dist.barrier()
            times[method].append(time.perf_counter() - start)
        turns.append(turns.pop(0))  # who comes after whom decides what caches hold
    if dist.get_rank() == 0:
        told_times = {method: statistics.median(values) for method, values in times.items()}
        print("RESULT " + json.dumps({"model": told, "processes": dist.get_world_size(), "seconds": told_times}))
    dist.barrier()
    dist.destroy_process_group()


def table(rows: list[dict[str, object]]) -> str:
    lines = [
        "| model | processes | autopar ms | DDP | fully_shard | tensor parallel | whole on each | best of torch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds: dict[str, float] = row["seconds"]  # type: ignore[assignment]
        ours = seconds["autopar"]
        best = min(seconds[m] for m in ("DDP", "fully_shard", "tensor parallel") if m in seconds)
        cells = [
            f"{seconds[m] / ours:.2f}" if m in seconds else "-"
            for m in ("DDP", "fully_shard", "tensor parallel", "whole on each")
        ]
        lines.append(
            f"| {row['model']} | {row['processes']} | {ours * 1e3:.1f} | {' | '.join(cells)} | **{best / ours:.2f}** |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hardware", default="cpu-gloo")
    parser.add_argument("-o", type=Path)
    args = parser.parse_args()
    if "RANK" in os.environ:
        worker(args.models[0], args.rounds, args.hardware)
        return
    rows: list[dict[str, object]] = []
    for processes in args.processes:
        for name in args.models:
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m",
                "benchmarks.step_time", "--models", name, "--rounds", str(args.rounds), "--hardware", args.hardware,
            ]  # fmt: skip
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
            rows += [
                json.loads(line.removeprefix("RESULT "))
                for line in done.stdout.splitlines()
                if line.startswith("RESULT ")
            ]
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    command = (
        f"python -m benchmarks.step_time --processes {' '.join(map(str, args.processes))} "
        f"--models {' '.join(args.models)} --rounds {args.rounds} --hardware {args.hardware}"
    )
    text = (
        f"# Step time against torch's own methods\n\n`{command}`, {date.today()}, torch {torch.__version__}, "
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, gloo, one thread a process. "
        "Columns are step time over autopar's: above 1 means autopar is faster.\n\n" + table(rows) + "\n"
    )
    print(text)
    if args.o:
        args.o.parent.mkdir(parents=True, exist_ok=True)
        args.o.write_text(text)


if __name__ == "__main__":
    main()
