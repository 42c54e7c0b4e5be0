"""A training step under torch's profiler: kernels, how long the device is busy, and where the host waits for it."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar.plan import Plan
from benchmarks.gpu import predicted
from benchmarks.gpu.stage import Row, Setting, loss_of

STEPS, WARM = 20, 5
WAYS = ("eager", "autopar", "torch.compile", "autopar, inductor")


def profiled(setting: Setting) -> Iterator[Row]:
    """The models of `predicted`, in bfloat16 over parameters in float32, with fused AdamW."""
    setting.needs_cuda("a profile of kernels")
    mesh = autopar.init_mesh("cuda")
    for factory in predicted.MODELS["cuda"]:
        plan: Plan | None = None
        for way in WAYS:
            model, kwargs = _model(factory)
            trained = _made(way, model, mesh, kwargs, plan)
            plan = trained.plan if isinstance(trained, autopar.ParallelModule) else plan
            step = _step(trained, kwargs, cast=not isinstance(trained, autopar.ParallelModule))
            for _ in range(WARM):
                step()
            torch.cuda.reset_peak_memory_stats()
            row: Row = {"step": f"{factory.__name__}, {way}"} | _timed(step)
            row["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            yield row | _kernels(step) | {"synchronisations": _synchronisations(step)}
            del model, trained, step
            torch.cuda.empty_cache()


def _model(factory: predicted.Model) -> tuple[nn.Module, dict[str, Any]]:
    """With random values, on the device, and a batch of random tokens."""
    model, _, kwargs = factory()
    vocabulary, shape = model.config.vocab_size, kwargs["input_ids"].shape
    model = type(model)(model.config).cuda()
    ids = torch.randint(0, vocabulary, shape, device="cuda")
    return model, {"input_ids": ids, "labels": ids.clone()}


def _made(way: str, model: nn.Module, mesh: Any, kwargs: dict[str, Any], plan: Plan | None) -> Any:
    if way == "eager":
        return model
    if way == "torch.compile":
        return torch.compile(model)
    backend = "inductor" if "inductor" in way else "eager"
    return autopar.compile(model, mesh, plan=plan, precision="bf16", backend=backend, example_kwargs=kwargs)


def _step(model: Any, kwargs: dict[str, Any], *, cast: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=cast):
            loss = loss_of(model(**kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _timed(step: Callable[[], None]) -> Row:
    """Median and quartiles; on the host alone what it takes to launch a step."""
    whole, launched = list[float](), list[float]()
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        launched.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - begin)
    low, middle, high = (1e3 * one for one in statistics.quantiles(whole, n=4))
    told = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    return {"ms": told, "host ms": round(1e3 * statistics.median(launched), 2)}


def _kernels(step: Callable[[], None]) -> Row:
    """Of one step: kernels, the milliseconds in which one runs, and those between the first and the last in which none
    does.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        if not getattr(event, "is_user_annotation", False)
        and str(event.device_type).endswith("CUDA")
        and event.time_range.end > event.time_range.start
    ]
    spans.sort()
    busy, gaps, until = 0.0, 0.0, spans[0][0] if spans else 0.0
    for start, end in spans:
        gaps += max(0.0, start - until)
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return {"kernels": len(spans), "busy ms": round(busy / 1e3, 2), "gaps ms": round(gaps / 1e3, 2)}


def _synchronisations(step: Callable[[], None]) -> str:
    """How often a step makes the host wait, as torch sees it, and where first."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [one for one in caught if "synchroniz" in str(one.message)]
    return "0" if not found else f"{len(found)}, first {found[0].filename.rsplit('/', 2)[-1]}:{found[0].lineno}"
