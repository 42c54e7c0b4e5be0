"""`python -m autopar.calibrate`: measure this machine in about a minute and keep the result where autopar finds it."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.calibrate.host import with_dispatch
from autopar.calibrate.measure import Sample
from autopar.calibrate.profile import check_table, drift_table, profile_from, save
from autopar.calibrate.ranks import device_of, loud, measure_world, start
from autopar.errors import BadArgument
from autopar.ir.words import count_of
from autopar.machine.cli import BAD_ARGUMENTS, INTERRUPTED, writable
from autopar.machine.device import calibrated_path, device_name, hardware_or_here, processors
from autopar.machine.local_ranks import KEEPS_FREED, environment
from cost_models.hardware import Hardware

FASTEST_S = 2.0


def main(arguments: list[str] | None = None) -> int:
    """0: the profile is written. 1: a process failed. 2: bad arguments. 130: interrupted; nothing was written."""
    given = _arguments(arguments)
    kind = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    path = given.output or calibrated_path(kind)
    try:
        if given.output is not None:
            writable(str(given.output), "-o")
        return _torchrun(given.seconds, kind, path) if "RANK" in os.environ else _alone(given, kind, path)
    except BadArgument as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m autopar.calibrate",
        description="Measure this machine and write a hardware profile, which autopar.compile then uses by itself. "
        "Under torchrun the running world is measured; else processes are started here.",
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="where to write (default: where autopar looks for it)")
    add("--processes", type=int, nargs="+", metavar="N", help="numbers of ranks (default: 2 4; on CUDA all devices)")
    add("--seconds", type=float, default=60.0, metavar="S", help="about how long to measure (default: 60)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    given = parser.parse_args(arguments)
    if given.seconds < FASTEST_S:
        parser.error(f"--seconds {given.seconds:g} is too short to measure anything; give at least {FASTEST_S:g}")
    if given.processes and min(given.processes) < 1:
        parser.error(f"--processes {min(given.processes)} is not a number of processes")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has none")
    return given


def _alone(given: argparse.Namespace, kind: str, path: Path) -> int:
    default = [torch.cuda.device_count()] if kind == "cuda" else [2, 4]
    numbers: list[int] = sorted(set(given.processes or default))
    if kind == "cuda" and numbers[-1] > torch.cuda.device_count():
        raise RuntimeError(f"--processes {numbers[-1]}: there are {torch.cuda.device_count()} CUDA devices")
    # The first number of ranks measures everything, the others collectives and how much slower compute is.
    shares = [1.0] if len(numbers) == 1 else [0.6] + [0.4 / (len(numbers) - 1)] * (len(numbers) - 1)
    samples: list[Sample] = []
    for i, (ranks, share) in enumerate(zip(numbers, shares, strict=True)):
        print(f"starting {count_of(ranks, 'process', 'processes')} on {device_name(kind)}", file=sys.stderr)
        samples += start(ranks, "crowd" if i else "all", share * given.seconds, kind)
    _finish(samples, kind, path)
    return 0


def _torchrun(seconds: float, kind: str, path: Path) -> int:
    device = device_of(kind)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        samples = measure_world("all", seconds, device, loud(dist.get_rank()))
        if dist.get_rank() == 0:
            _finish(samples, kind, path)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def _finish(samples: list[Sample], kind: str, path: Path) -> None:
    base = _base(kind)
    transport, threads = "nccl" if kind == "cuda" else "gloo", os.environ.get("OMP_NUM_THREADS", "1")
    env = os.environ if dist.is_initialized() else environment()  # torchrun's, or of those started here
    keeps = all(env.get(name) == value for name, value in KEEPS_FREED.items())
    kept = "" if kind == "cuda" else f", freed memory {'kept' if keeps else 'given back'}"
    how = (
        f"on {platform.node()}, {device_name(kind)}, {processors()} processors, {date.today()}, "
        f"torch {torch.__version__}, {transport}, OMP_NUM_THREADS={threads}{kept}"
    )
    hardware = profile_from(samples, base, path.stem, how, shares_processors=kind == "cpu")
    if kind == "cuda":
        hardware = with_dispatch(hardware, kind, how)
    print(check_table(hardware, samples))
    if path.exists():
        try:
            print(f"\ndrift against the profile of {time.ctime(path.stat().st_mtime)} in {path}")
            print(drift_table(Hardware.load(path), hardware))
        except ValueError as error:
            print(f"the profile that stood there cannot be read and is replaced: {error}")
    save(hardware, path)
    print(f"\nwritten: {path}")


def _base(kind: str) -> Hardware:
    """What is known of the machine without measuring it: capacities, and links between nodes."""
    try:
        base = hardware_or_here(None, kind, calibrated=False)
    except ValueError:  # a GPU that no profile knows: the H100's structure with this one's memory
        base = Hardware.load("h100-sxm")
        base = replace(base, sources=dict.fromkeys(base.sources, "assumed: as in h100-sxm, not measured"))
    if kind == "cuda":
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        tiers = {**base.tiers, "hbm": replace(base.tiers["hbm"], capacity_bytes=total)}
        sources = {
            **base.sources,
            "tiers.hbm.capacity_bytes": "the driver",
            "ranks_per_node": "devices of this machine",
        }
        base = replace(base, tiers=tiers, ranks_per_node=torch.cuda.device_count(), sources=sources)
    return base


if __name__ == "__main__":
    sys.exit(main())
