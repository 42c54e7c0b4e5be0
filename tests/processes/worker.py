"""One process of `run_checks`: joins the others, then runs every check of a file."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.launch import COLLECTIVE_S


@dataclass(frozen=True)
class Ranks:
    """What a check knows of its process: which one it is, of how many, and a folder that all share."""

    rank: int
    count: int
    folder: Path

    def mesh(self, *sizes: int) -> DeviceMesh:
        """A mesh with axes `data`, `tensor` of these sizes; without sizes, all ranks on `data`."""
        return autopar.init_mesh("cpu", **dict(zip(("data", "tensor"), sizes or (self.count,), strict=False)))


def main(file: str, notes: str, folder: str, *wanted: str) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module = importlib.import_module(f"tests.processes.{file}")
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=count,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )  # fmt: skip
    checks = {name: made for name, made in vars(module).items() if name.startswith("check_")}
    left_out = {name[1:] for name in wanted if name.startswith("-")}
    names = [name for name in checks if name not in left_out] if left_out or not wanted else list(wanted)
    ranks = Ranks(rank, count, Path(folder))
    started = time.monotonic()
    while names:
        if rank == 0:
            Path(notes, "left").write_text("\n".join(names))
        torch.manual_seed(0)
        try:
            checks[names[0]](ranks)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # the others may wait for this rank in a collective; nothing here may wait for them
        dist.barrier()
        print(names.pop(0), f"{time.monotonic() - started:.1f} s", flush=True)
        started = time.monotonic()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then when many groups are taken down at once (torch 2.13)


if __name__ == "__main__":
    main(*sys.argv[1:])
