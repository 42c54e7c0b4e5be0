"""One process of several: `python -m benchmarks.gpu.ranks FOLDER DEVICE BACKEND TASKS`, in torchrun's variables.

TASKS is JSON, a list of [MODULE:FUNCTION, keyword arguments]; every rank calls them in turn. Rank 0 appends the rows to
FOLDER/rows; a rank that finds something wrong says it in FOLDER/wrong.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.attach import programs
from autopar.emit import emit
from benchmarks.gpu import staged
from benchmarks.gpu.stage import Wrong, exact_products

COLLECTIVE_S = 180  # of waiting for one: rank 0 may be searching


def main(folder: str, device: str, backend: str, tasks: str) -> None:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    exact_products()
    if device == "cuda":
        here = 0 if backend == staged.NAME else int(os.environ["LOCAL_RANK"])
        os.environ["LOCAL_RANK"] = str(here)
        torch.cuda.set_device(here)
        torch.empty(1, device="cuda")  # a device mesh leaves the device as it is once something lies there
    if backend == staged.NAME:
        staged.register()
        # On a CPU each collective is waited for at once, as gloo needs it. This backend does not: as on a GPU, then.
        programs.emit = lambda *args, **options: emit(*args, **options | {"one_at_a_time": False})
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=count,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )  # fmt: skip
    try:
        for function, given in json.loads(tasks):
            module, _, name = function.partition(":")
            task = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
            for row in task(device, Path(folder), **given):
                if rank == 0:
                    with Path(folder, "rows").open("a") as rows:
                        rows.write(json.dumps(row, default=str) + "\n")
            dist.barrier()
    except Wrong as error:
        Path(folder, "wrong").write_text(f"{error} (rank {rank})")
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the others may wait for this rank in a collective; nothing here may wait for them
    os._exit(0)  # gloo's threads abort now and then when many groups are taken down at once


if __name__ == "__main__":
    main(*sys.argv[1:])
