"""Memory of training steps: the most that was allocated and reserved, beside what the plan predicted, where the
allocator may take hardly more than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import autopar
from autopar.emit import moves
from autopar.optim import Streamed
from benchmarks.capped import SHAPES, build, fraction_of
from benchmarks.gpu.stage import Row, Setting, loss_of

BATCH, SEQUENCE, STEPS = 8, 1024, 20
ROOM = 1.05  # of what the plan predicts is reserved: no more may be
SHARES = (None, 0.5, 0.35)  # of the peak of the first plan


def peaks(setting: Setting) -> Iterator[Row]:
    mesh = autopar.init_mesh(setting.device)
    small = not setting.is_cuda
    for name in ("tiny",) if small else ("gpt-125m", "gpt-350m"):
        first = None
        for share in SHARES:
            limit = None if share is None or first is None else int(share * first)
            row = _row(name, mesh, limit, setting)
            first = first or row["predicted MiB"] * 2**20
            yield row


def _row(name: str, mesh: object, limit: int | None, setting: Setting) -> Row:
    """A plan in so many bytes. What does not fit the plan is told, not wrong: it is what this stage is to find out."""
    batch, sequence = (BATCH, SEQUENCE) if setting.is_cuda else (2, 32)
    model = build(name, sequence, "cpu")
    ids = torch.randint(0, SHAPES[name][3], (batch, sequence), device=setting.device)
    kwargs = {"input_ids": ids, "labels": ids.clone()}
    row: Row = {"model": name, "limit MiB": "-" if limit is None else round(limit / 2**20, 1)}
    try:
        parallel = autopar.compile(model, mesh, memory=limit, example_kwargs=kwargs, time_limit_s=30)  # type: ignore[arg-type]
    except autopar.Infeasible as error:
        return row | {"predicted MiB": 0, "not feasible": str(error)[:120]}
    predicted = parallel.plan.peak_bytes["hbm"]
    row["predicted MiB"] = round(predicted / 2**20, 1)
    if not setting.is_cuda:
        return row | dict.fromkeys(("steps", "allocated / predicted", "reserved / predicted", "retries"), "-")
    said = parallel.plan.search["reserved_bytes"]
    row |= _trained(parallel, kwargs, ROOM * said)
    stats = torch.cuda.memory_stats()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    row |= {"allocated MiB": round(allocated / 2**20, 1), "allocated / predicted": round(allocated / predicted, 3)}
    row |= {"reserved MiB": round(reserved / 2**20, 1), "reserved / predicted": round(reserved / said, 3)}
    row["retries"] = stats["num_alloc_retries"]
    del parallel
    torch.cuda.empty_cache()
    return row


def _trained(parallel: autopar.ParallelModule, kwargs: Any, cap: float) -> Row:
    """Steps under a cap; how many went well. Out of memory is told: that is what is to be found out."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction_of(cap, total))
    optimizer = Streamed(torch.optim.AdamW(parallel.parameters(), 1e-4), parallel)
    done = 0
    try:
        for _ in range(STEPS):
            made = parallel(**kwargs)  # logits and all: a plan counts what its caller holds until the step ends
            loss_of(made).backward()
            optimizer.step()
            optimizer.zero_grad()
            del made
            done += 1
        moves.settle()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        return {"steps": done, "out of memory": " ".join(str(error).split())[:150]}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return {"steps": done}
