"""Single operators, timed on this machine's device at the local shapes that strategies need: what `--profile` does.

What is timed is what the emitted program runs, written by the same writer, local bodies included and collectives left
out: an operator with a fresh result each time, on operands that lie in memory as they will. A rank of one thread on a
CPU is timed by the processor time it gets, so that other programs on the machine count for little
(`calibrate.measure.Clock`). The time kept is that of a rank alone; `Pricer.timed` makes it longer where a calibrated
profile knows how crowding slows.
"""

from __future__ import annotations

import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx

from autopar.calibrate.compute import settle_memory
from autopar.calibrate.measure import LEAST_ROUND_S, Clock
from autopar.calibrate.values import bounds_of, random_tensor
from autopar.emit.writer import BodyWriter, Writer, target_of
from autopar.ir.graph import Ref, map_refs
from autopar.ir.mesh import Mesh
from autopar.machine.device import device_name, free_bytes, operators_path, tf32_set
from autopar.price.calls import Call, Profile, Profiled, Wanted
from autopar.rules.bodies import BODIES
from cost_models.hardware import Hardware
from cost_models.measured import Key, Store, Where

DEFAULT_S = 60.0  # of --profile without a number
EACH_S = 0.1  # of repeating one operator, if it is quick
ROUNDS = (5, 50)  # at least and at most, behind the warm-up
RESERVE = 0.7  # of the free memory: more is not asked for
TELL_S = 2.0  # between two lines of progress
SHARD = "shard"  # the mesh axis over which a local body is split, here


class NotTimed(RuntimeError):
    """This call keeps the formula; the message says why, the same words for the same cause."""


@dataclass(frozen=True)
class Ready:
    """A call with its operands, to be made as often as one likes."""

    run: Callable[..., Any]
    operands: tuple[Tensor, ...]

    def __call__(self) -> Any:
        return self.run(*self.operands)


def where_of(device: torch.device) -> Where:
    """What a time measured now, on this device, holds for. A CPU goes by the machine's name and its processor's."""
    told = device_name(device.type)
    if device.type == "cpu":
        told = f"{platform.node()}, {_processor() or told}"
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return Where(told, str(torch.__version__), threads, _float32_products(device.type))


def _float32_products(device_type: str) -> str:
    """What they may run as, in torch's words; its defaults are "highest"."""
    if device_type == "cpu":
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:  # set in torch's newer way, which this one cannot tell
            return torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    allowed = tf32_set()
    return ("high" if "matmul" in allowed else "highest") + ("" if "conv" in allowed else ", conv ieee")


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        return ""
    return f"{found[1].strip()} {torch.backends.cpu.get_cpu_capability()}" if found is not None else ""


# --- one call --------------------------------------------------------------------------------------------------------


class _Alone(BodyWriter):
    """A local body as it is emitted, but for the collectives: the time of these is a price of its own."""

    def all_reduce(self, value: Any, op: str) -> fx.Node:
        return self.writer.contiguous(value)


def prepare(call: Call, device: torch.device) -> Ready:
    """The call as emitted code, with random operands. Raises what the operator raises, if it cannot run at all."""
    graph = fx.Graph()
    writer = Writer(graph, Mesh((SHARD,), (call.shards,)), {}, device.type)
    distinct = [i for i, operand in enumerate(call.operands) if operand.same_as is None]
    places = {i: graph.placeholder(f"x{i}") for i in distinct}
    writer.coordinates = {SHARD: graph.placeholder("coordinate")}

    def value(ref: Ref) -> fx.Node:
        same = call.operands[ref.index].same_as
        return places[ref.index if same is None else same]

    args = map_refs(call.args, value)
    kwargs = {key: map_refs(arg, value) for key, arg in call.kwargs}
    if call.body:
        types = [operand.type for operand in call.operands]
        body = _Alone(writer, (SHARD,), call.body_size, types, call.outputs)
        made = BODIES[call.body].emit(body, call.node, args)
    else:
        made = writer.make("", target_of(call.node.op), args, kwargs)
    graph.output(made)
    module = fx.GraphModule(torch.nn.Module(), graph)
    below = bounds_of(call.node.op, call.args, [operand.type for operand in call.operands])
    operands = [random_tensor(call.operands[i].type, device, below.get(i), call.operands[i].order) for i in distinct]
    coordinate = torch.zeros((), dtype=torch.int64, device=device)
    return Ready(module.forward, (*operands, coordinate))


def seconds_of(ready: Callable[[], object], clock: Clock, limit_s: float = EACH_S) -> float:
    """Of one call: warm-up, then the median of rounds for `limit_s`. The last result stays alive, as in a program."""
    result = ready()
    until = time.perf_counter() + limit_s
    once, result = clock.round_s(ready, 1)
    count = max(1, int(LEAST_ROUND_S / max(once, 1e-7)))
    rounds = [once] if count == 1 else []
    while len(rounds) < ROUNDS[0] or (time.perf_counter() < until and len(rounds) < ROUNDS[1]):
        if rounds and time.perf_counter() > until + ROUNDS[0] * limit_s:
            break  # it takes seconds: what there is must do
        taken_s, result = clock.round_s(ready, count)
        rounds.append(taken_s / count)
    del result
    return max(median(rounds), 1e-9)


def time_call(want: Wanted, clock: Clock, room: float) -> float:
    """Seconds of the call. Raises NotTimed where it would not fit in `room` bytes, or does not run."""
    op = want.call.node.op
    if op.split(".")[1].endswith("_"):
        raise NotTimed(f"{op} writes into its operand")
    if 2 * want.nbytes > room:
        raise NotTimed("it needs more memory than is free")
    try:
        return seconds_of(prepare(want.call, clock.device), clock)
    except torch.OutOfMemoryError:
        raise NotTimed("out of memory") from None
    except Exception as error:
        told = " ".join(str(error).split())
        raise NotTimed(f"{op}: {type(error).__name__}: {told[:120]}") from error


# --- all of them -----------------------------------------------------------------------------------------------------


def profiler(
    device_type: str,
    budget_s: float,
    hardware: Hardware,
    path: str | Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Profile:
    """What `autopar.search.ask` takes as `profile`: known times from the database in `path`, and for `budget_s` seconds
    at most, of all questions together, those that are missing, measured now and kept. The default path is beside the
    calibrated profile.
    """
    left_s = budget_s

    def profile(calls: Sequence[Wanted]) -> Profiled:
        nonlocal left_s
        began = time.perf_counter()
        with Store(operators_path() if path is None else path) as store:
            found = _profiled(calls, torch.device(device_type), left_s, hardware, store, progress)
        left_s = max(0.0, left_s - (time.perf_counter() - began))
        return found

    return profile


def _profiled(
    calls: Sequence[Wanted],
    device: torch.device,
    budget_s: float,
    hardware: Hardware,
    store: Store,
    progress: Callable[[str], None],
) -> Profiled:
    where = where_of(device)
    known = store.known(where)
    seconds = {want.call.key: known[want.call.key] for want in calls if want.call.key in known}
    missing = [want for want in calls if want.call.key not in seconds]
    progress(f"{len(calls):,} calls of operators on {where.device}: {len(seconds):,} known, {len(missing):,} not")
    timed, failed, late = 0, Counter[str](), len(missing)
    if missing and budget_s > 0:
        timed, failed, late = _time_missing(missing, device, budget_s, hardware, store, where, seconds, progress)
    notes: list[str] = []
    if failed:
        told = "; ".join(f"{why} ({count})" for why, count in failed.most_common(3))
        notes.append(f"{sum(failed.values())} calls of operators cannot be timed and keep the formula: {told}")
    if late:
        notes.append(
            f"{late} of {len(calls)} calls of operators are left to the formula: there were {budget_s:.3g} s to time "
            "them"
        )
    for text in ([f"timed {timed} calls"] if timed else []) + notes:
        progress(text)
    return Profiled(seconds, tuple(notes))


def _time_missing(
    missing: Sequence[Wanted], device: torch.device, budget_s: float, hardware: Hardware, store: Store, where: Where,
    seconds: dict[Key, float], progress: Callable[[str], None],
) -> tuple[int, Counter[str], int]:  # fmt: skip
    """(how many were timed and added to `seconds`, why how many could not be, for how many there was no time)"""
    began = told = time.perf_counter()
    clock, failed, late, timed = Clock(device, 1), Counter[str](), 0, 0
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():  # the user's random numbers stay as they are
        settle_memory(device)
        room = RESERVE * free_bytes(device.type, hardware)
        for want in missing:
            now = time.perf_counter()
            left_s = budget_s - (now - began)
            if left_s <= 0 or want.seconds * (2 + ROUNDS[0]) > left_s:
                late += 1
                continue
            if now - told > TELL_S:
                progress(f"timed {timed} of {len(missing)} calls, {now - began:.0f} of {budget_s:.3g} s")
                told = now
            try:
                found = time_call(want, clock, room)
            except NotTimed as why:
                failed[str(why)] += 1
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                continue
            seconds[want.call.key] = found
            store.keep(where, {want.call.key: found})
            timed += 1
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the search may count on is free again
    return timed, failed, late
