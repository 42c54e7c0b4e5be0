"""Training where the device has room for what a step computes and for a twelfth of the states: the same steps, with the
same layers run again in backward, beside those with all states on the device.

Elixir's claim is 84 % of the speed. States are parameters, gradients and AdamW's two, 16 bytes a parameter. What a step
computes is the peak of the plan without a limit less the 12 bytes that are there all along. The capped steps run with
`Streamed`, with and without `overlap`, while the allocator may reserve hardly more than the plan predicts.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import autopar
from autopar.emit import moves
from autopar.optim import Streamed
from autopar.plan import Plan
from autopar.simulate.steady_state import steady_s
from autopar.simulate.timeline import pricer_of
from benchmarks.capped import SHAPES, build, fraction_of, timed
from benchmarks.gpu.peaks import ROOM
from benchmarks.gpu.predicted import searched
from benchmarks.gpu.stage import Row, Setting, loss_of
from cost_models.caching_allocator import PAGE
from cost_models.hardware import Hardware

STEPS, SEQUENCE, PART = 20, 1024, 12
BATCHES = {"cuda": ("gpt-1.3b", (64, 16)), "cpu": ("tiny", (2,))}
PINNED = ("--pin", "transformer.h.*=recompute", "--outputs", "loss")
Example = tuple[nn.Module, tuple[()], dict[str, Any]]


def example(name: str, batch: int, device: str = "meta") -> Example:
    """In float32, without dropout."""
    model = build(name, SEQUENCE, device, torch.float32)
    ids = torch.randint(0, SHAPES[name][3], (batch, SEQUENCE), device=None if device == "meta" else device)
    return model, (), {"input_ids": ids, "labels": ids.clone()}


def batch_2() -> Example:
    return example("tiny", 2)


def batch_16() -> Example:
    return example("gpt-1.3b", 16)


def batch_64() -> Example:
    return example("gpt-1.3b", 64)


def twelfth(setting: Setting) -> Iterator[Row]:
    name, batches = BATCHES[setting.device]
    mesh = autopar.init_mesh(setting.device)
    parameters = sum(p.numel() for p in example(name, 1)[0].parameters())
    factories = [f"{__name__}:batch_{batch}" for batch in batches]
    free = searched(setting, [(factory, PINNED) for factory in factories])
    capped: list[Plan] = []
    if setting.is_cuda:
        limits = [_limit(plan, parameters) for plan in free]
        flags = [("--memory", f"{limit / 2**20:.0f}MiB", "--allow", "offload-parameters", *PINNED) for limit in limits]
        capped = searched(setting, list(zip(factories, flags, strict=True)))
    for number, batch in enumerate(batches):
        uncapped_s = 0.0
        for plan in (free[number], *capped[number : number + 1]):
            for row in _trained(setting, mesh, (name, batch), plan):
                uncapped_s = uncapped_s or row["ms"] / 1e3
                row["efficiency"] = round(1e3 * uncapped_s / row["ms"], 3)
                yield {"steps of": f"{name}, {batch * SEQUENCE:,} tokens"} | row


def _limit(plan: Plan, parameters: int) -> float:
    """Bytes of the device for a plan of the same step with room for a twelfth of the states, and for gaps."""
    computed = plan.peak_bytes["hbm"] - 12 * parameters
    return 1.02 * (computed + 16 * parameters / PART) + 4 * 2**25 + 2 * PAGE


def _trained(setting: Setting, mesh: Any, which: tuple[str, int], plan: Plan) -> Iterator[Row]:
    """Steps of one plan, in each of the ways that it may be run."""
    model, _, kwargs = example(*which, setting.device)
    how: dict[str, Any] = {"precision": "bf16", "outputs": "loss", "hardware": setting.priced_by}
    parallel = autopar.compile(model.cpu(), mesh, plan=plan, example_kwargs=kwargs, **how)
    del model
    hosted = sum(16 * p.numel() for name, p in parallel.named_parameters() if plan.residence.get(name) == "host")
    said = plan.search.get("reserved_bytes") or plan.peak_bytes["hbm"]
    ways = {"on the host": STEPS // 4, "on the host, overlapped": STEPS} if hosted else {"on the device": STEPS // 4}
    gc.collect()  # what was trained before holds itself
    for way, steps in ways.items():
        optimizer = Streamed(torch.optim.AdamW(parallel.parameters(), 1e-4), parallel, overlap="overlapped" in way)

        def step(optimizer: Streamed = optimizer) -> None:
            loss_of(parallel(**kwargs)).backward()
            optimizer.step()
            optimizer.zero_grad()

        times = _under(setting, ROOM * said if hosted else None, step, steps)
        row: Row = {"states": way, "on the host GiB": hosted / 2**30, "efficiency": 1.0}
        row |= {"ms": 1e3 * statistics.median(times), "predicted ms": 1e3 * _predicted_s(plan, way, setting)}
        if setting.is_cuda:
            row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
            row["predicted GiB"] = plan.peak_bytes["hbm"] / 2**30
            row |= {"reserved GiB": torch.cuda.max_memory_reserved() / 2**30, "its limit": ROOM * said / 2**30}
        yield {key: round(x, 3) if isinstance(x, float) else x for key, x in row.items()}


def _predicted_s(plan: Plan, way: str, setting: Setting) -> float:
    if "overlapped" not in way or not setting.is_cuda:
        return plan.predicted_seconds
    return steady_s(plan, pricer_of(plan, Hardware.load(setting.priced_by)))


def _under(setting: Setting, cap: float | None, step: Callable[[], None], steps: int) -> list[float]:
    if setting.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if cap is None else fraction_of(cap, total))
    try:
        return timed(step, steps, setting.device)
    finally:
        moves.settle()
        if setting.is_cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)
