"""Processes of this machine that stand for the ranks of a mesh."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# glibc keeps what is freed. It would else give large pieces back to the kernel in every step, and take them again page
# by page: on a CPU up to half of the step of a model with large weights (docs/design/0014).
KEEPS_FREED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def environment() -> dict[str, str]:
    """For ranks that share a machine: the user's own; where that is silent one thread each, as torchrun has it, and
    freed memory is kept.
    """
    return {**ONE_THREAD, **KEEPS_FREED, **os.environ}


@contextmanager
def local_ranks(command: Sequence[str], ranks: int, env: Mapping[str, str]) -> Generator[list[subprocess.Popen[bytes]]]:
    """The command, run as ranks 0, 1, ... of one node, in `env` and torchrun's variables. None outlives the context."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            told = {name: str(value) for name, value in of_rank.items()}
            processes.append(subprocess.Popen(command, env={**env, **told}))
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()
