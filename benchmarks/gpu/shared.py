"""Several ranks: how they are started, and 2 and 4 that share one GPU through the host."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from autopar.machine.local_ranks import environment, local_ranks
from benchmarks.gpu import staged
from benchmarks.gpu.cases import Case
from benchmarks.gpu.stage import Row, Setting, Wrong

LIMIT_S = 500


Task = tuple[str, dict[str, Any]]  # MODULE:FUNCTION of benchmarks.gpu, keyword arguments
COLLECTIVES: Task = ("cases:collectives", {})


def started(setting: Setting, ranks: int, backend: str, tasks: Sequence[Task]) -> Iterator[Row]:
    """The rows of the tasks, as they come. Raises Wrong for a number that is off, RuntimeError where a rank fails."""
    told, folder = json.dumps(tasks), setting.folder
    for left in ("rows", "wrong", "store"):
        Path(folder, left).unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.ranks", str(folder), setting.device, backend, told]
    shown, until = 0, time.monotonic() + LIMIT_S
    with local_ranks(command, ranks, environment()) as processes:
        while True:
            codes = [process.poll() for process in processes]  # before the rows: then none is missed
            rows = Path(folder, "rows").read_text().splitlines() if Path(folder, "rows").exists() else []
            yield from (json.loads(row) for row in rows[shown:])
            shown = len(rows)
            if Path(folder, "wrong").exists() and any(codes):
                raise Wrong(Path(folder, "wrong").read_text())
            if any(codes):
                failed = next(rank for rank, code in enumerate(codes) if code)
                told = f"rank {failed} of {ranks} ended with status {codes[failed]}"
                raise RuntimeError(f"{told}; its error stands in the output of this command")
            if None not in codes:
                break
            if time.monotonic() > until:
                raise RuntimeError(f"{ranks} ranks did not end within {LIMIT_S} s; {shown} rows are there")
            time.sleep(0.1)


def trained(cases: Sequence[Case]) -> list[Task]:
    return [("cases:trained", asdict(case)) for case in cases]


def random_cases(sizes: tuple[int, ...], seeds: Sequence[int]) -> list[Case]:
    models = ("mlp", "block", "cnn", "gpt2")
    return [Case(model, sizes, f"random {seed}", checkpoint=seed == seeds[0]) for model in models for seed in seeds]


TWO = [
    *random_cases((2,), (2, 5)),
    *(Case("block", (2,), policy) for policy in ("data-parallel", "fsdp", "tensor-parallel", "zero3-offload")),
    *(Case("bench-gpt2", (2,), plan, checkpoint=plan == "fsdp") for plan in ("fsdp", "tensor-parallel")),
    Case("bench-gpt2", (2,), "searched", "bfloat16"),
]
FOUR = [*random_cases((2, 2), (0,)), *random_cases((4,), (1,)), Case("bench-gpt2", (2, 2), "fsdp+tensor-parallel")]
COMPILED = [
    Case("mlp", (2,), "random 2", backend="inductor"),
    Case("mlp", (2,), "loop ring", backend="inductor"),
    Case("mlp", (2,), "loop ring reduce-scatter", backend="inductor"),
    Case("block", (2,), "random 5", backend="inductor"),
    Case("llama", (2,), "loop context parallel: ring", backend="inductor"),
    Case("gpt2", (2,), "random 2", backend="inductor"),
    Case("bench-gpt2", (2,), "fsdp", backend="inductor"),
]


def shared(setting: Setting, ranks: int, cases: Sequence[Case]) -> Iterator[Row]:
    yield from started(setting, ranks, staged.NAME, [COLLECTIVES, *trained(cases)])


two, four = partial(shared, ranks=2, cases=TWO), partial(shared, ranks=4, cases=FOUR)
inductor = partial(shared, ranks=2, cases=COMPILED)
