"""All ranks go on, or none does: work that may fail on one rank only, before the others wait for it in a collective."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar._compat import default_store
from autopar.errors import Infeasible, NoAnswerInTime, NotCut, PlanMismatch, TraceError

Result = TypeVar("Result")
TELL_S = 60.0  # of waiting, then twice as long, and so on

_KINDS = (
    Infeasible, NoAnswerInTime, PlanMismatch, TraceError, ValueError, TypeError, KeyError, AttributeError, MemoryError,
    NotCut, FileNotFoundError, PermissionError, IsADirectoryError, OSError, NotImplementedError, torch.OutOfMemoryError,
)  # fmt: skip
KNOWN: dict[str, type[Exception]] = {kind.__name__: kind for kind in _KINDS}


def agreed(work: Callable[[], Result], device_mesh: DeviceMesh) -> Result:
    """What `work` returns on this rank. Where it fails on any, all raise: their own error, or that of the first one."""
    result, error = None, None
    try:
        result = work()
    except Exception as caught:  # raised below, once the others know
        error = caught
    if dist.get_world_size() > 1:
        first = torch.tensor(
            dist.get_world_size() if error is None else dist.get_rank(), device=device_mesh.device_type
        )
        dist.all_reduce(first, dist.ReduceOp.MIN)
        if int(first) < dist.get_world_size():
            told = None if error is None else f"{type(error).__name__} {error}"
            kind, _, message = text_from(int(first), told, device_mesh).partition(" ")
            if error is None:
                raise KNOWN.get(kind, RuntimeError)(f"{message} (on rank {int(first)})")
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def found_by_rank_zero(work: Callable[[], Result], device_mesh: DeviceMesh) -> Result | None:
    """What `work` returns on rank 0; None on the others, which wait for it on the store, where no timeout of a process
    group ends them. An error is raised on all ranks.
    """
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return work()
    rank, store = dist.get_rank(), default_store()
    key = f"autopar/found/{store.add(f'autopar/sought/{rank}', 1)}"
    result, error = None, None
    if rank == 0:
        try:
            result = work()
        except Exception as caught:  # raised below, once the others know
            error = caught
        store.set(key, "")
    began, told_s = time.monotonic(), TELL_S
    while rank != 0 and not _is_there(key, store):
        time.sleep(min(0.5, 0.01 + (time.monotonic() - began) / 10))
        if rank == 1 and time.monotonic() - began > told_s:
            logging.getLogger("autopar").warning("rank 0 has been looking for a plan for %.0f s", told_s)
            told_s *= 2

    def outcome() -> Result | None:
        if error is not None:
            raise error
        return result

    return agreed(outcome, device_mesh)


def _is_there(key: str, store: Any) -> bool:
    try:
        return store.check([key])
    except dist.DistError as error:
        raise RuntimeError("rank 0 has ended while it looked for a plan; what it wrote last says why") from error


def same_everywhere(settings: Mapping[str, object], device_mesh: DeviceMesh) -> None:
    """Raises ValueError on all ranks where one of them was told something else than rank 0."""
    if dist.get_world_size() == 1:
        return
    mine = [[name, repr(value)] for name, value in settings.items()]
    theirs = json.loads(text_from(0, json.dumps(mine), device_mesh))

    def compare() -> None:
        for (name, here), (_, there) in zip(mine, theirs, strict=True):
            if here != there:
                raise ValueError(
                    f"autopar.compile has {name} {here} on rank {dist.get_rank()} and {there} on rank 0; every rank "
                    "must be told the same, from the same files"
                )

    agreed(compare, device_mesh)


def text_from(rank: int, text: str | None, device_mesh: DeviceMesh) -> str:
    """That rank's text on every rank (bytes over the wire, nothing pickled)."""
    if dist.get_world_size() == 1:
        assert text is not None
        return text
    device = torch.device(device_mesh.device_type)
    data = text.encode() if text is not None and dist.get_rank() == rank else b""
    length = torch.tensor(len(data), device=device)
    dist.broadcast(length, src=rank)
    buffer = torch.empty(int(length), dtype=torch.uint8, device=device)
    if data:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    dist.broadcast(buffer, src=rank)
    return bytes(buffer.cpu().numpy()).decode()


def least_of(value: float, device_mesh: DeviceMesh) -> float:
    """The smallest of the ranks' values."""
    if dist.get_world_size() == 1:
        return value
    least = torch.tensor(value, dtype=torch.float64, device=device_mesh.device_type)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float(least)
