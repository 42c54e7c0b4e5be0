"""A whole node, one rank for each GPU: plans on one axis and on two; collectives and steps beside their prediction."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.calibrate.collectives import time_collectives
from autopar.ir.mesh import Mesh
from autopar.machine.device import hardware_or_here
from autopar.measure.twin import traced
from autopar.search import Request, search
from benchmarks.capped import SHAPES, build
from benchmarks.gpu.cases import Case
from benchmarks.gpu.shared import COLLECTIVES, started, trained
from benchmarks.gpu.stage import Row, Setting, Skipped, loss_of
from cost_models.hardware import Hardware
from cost_models.price import links_of, seconds
from examples import llama

STEPS, WARM = 20, 5
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
PLANS = ("searched", "fsdp", "data-parallel", "tensor-parallel")


def shapes(ranks: int) -> list[tuple[int, ...]]:
    """One axis, and two where the ranks can be cut."""
    if ranks < 2:
        raise Skipped("a node has two ranks or more; --nproc says how many")
    return [(ranks,)] + ([(2, ranks // 2)] if ranks >= 4 and ranks % 2 == 0 else [])


def numbers(setting: Setting) -> Iterator[Row]:
    """Random plans and those that people make by hand, against one process."""
    models = ("mlp", "block", "gpt2", "llama") if setting.is_cuda else ("mlp",)
    cases: list[Case] = []
    for sizes in shapes(setting.ranks):
        cases += [Case(model, sizes, f"random {seed}", checkpoint=not seed) for model in models for seed in (0, 1)]
        if setting.is_cuda:
            policies = ("fsdp", "tensor-parallel") if len(sizes) == 1 else ("fsdp+tensor-parallel",)
            cases += [Case("bench-gpt2", sizes, policy) for policy in policies]
            cases.append(Case("bench-gpt2", sizes, "searched", "bfloat16"))
    yield from started(setting, setting.ranks, BACKENDS[setting.device], [COLLECTIVES, *trained(cases)])


def collectives(setting: Setting) -> Iterator[Row]:
    tasks = [("node:timed_collectives", {"sizes": sizes}) for sizes in shapes(setting.ranks)]
    yield from started(setting, setting.ranks, BACKENDS[setting.device], tasks)


def timed_collectives(device: str, folder: Path, sizes: list[int]) -> Iterator[Row]:
    """Each over each axis, groups of an axis at once: the seconds, beside the price of the profile for this device."""
    names = tuple(f"a{place}" for place in range(len(sizes)))
    mesh = init_device_mesh(device, tuple(sizes), mesh_dim_names=names)
    hardware = _hardware(device)
    links = links_of(hardware, names, sizes)
    for sample in time_collectives(mesh, dist.get_world_size(), 120.0 if device == "cuda" else 4.0, lambda text: None):
        step: Any = sample.step
        predicted = seconds(step, hardware, links)
        yield {
            "collective": step.collective, "mesh": "x".join(map(str, sizes)), "axis": step.axis, "bytes": step.nbytes,
            "us": round(1e6 * sample.seconds, 1), "predicted us": round(1e6 * predicted, 1),
            "GB/s": round(step.nbytes / sample.seconds / 1e9, 2),
        }  # fmt: skip


def _hardware(device: str) -> Hardware:
    try:
        return hardware_or_here(None, device)
    except ValueError:  # a device without a profile: the prices are those of another one, and say so by being off
        return Hardware.load("h100-sxm")


def steps(setting: Setting, model: str) -> Iterator[Row]:
    tasks = [
        ("node:timed_steps", {"model": model if setting.is_cuda else "tiny", "sizes": sizes, "plan": plan})
        for sizes in shapes(setting.ranks)
        for plan in PLANS
        if not (len(sizes) > 1 and plan == "tensor-parallel")
    ]
    yield from started(setting, setting.ranks, BACKENDS[setting.device], tasks)


gpt2, two_layers = partial(steps, model="gpt-125m"), partial(steps, model="llama-8b-layers")


def timed_steps(device: str, folder: Path, model: str, sizes: list[int], plan: str) -> Iterator[Row]:
    """Median step of the slowest rank with fused AdamW, what the plan predicted, and the memory of the fullest rank."""
    names = ("data", "tensor")[: len(sizes)]
    mesh = autopar.init_mesh(device, **dict(zip(names, sizes, strict=True)))
    net, kwargs, tokens = _model(model, device)
    hardware = _hardware(device)
    row: Row = {"model": model, "mesh": "x".join(map(str, sizes)), "plan": plan}
    if plan == "searched":
        parallel = autopar.compile(net, mesh, hardware=hardware, example_kwargs=kwargs)
    else:
        shape = Mesh(names, tuple(sizes))
        made = search(traced(net, (), kwargs, device_type=device), shape, hardware, Request(policy=plan))
        parallel = autopar.compile(net, mesh, plan=made, example_kwargs=kwargs)
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-4, fused=True)
    times: list[float] = []
    for number in range(WARM + (STEPS if device == "cuda" else 3)):
        if device == "cuda":
            torch.cuda.synchronize()
            if number == WARM:
                torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        begin = time.perf_counter()
        loss_of(parallel(**kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    low, middle, high = statistics.quantiles(times[WARM:], n=4)
    held = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    told = torch.tensor([middle, low, high, held], dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    middle, low, high, held = told.tolist()
    predicted = parallel.plan.predicted_seconds
    yield row | {
        "ms": f"{1e3 * middle:.2f} ({1e3 * low:.2f} to {1e3 * high:.2f})", "predicted ms": round(1e3 * predicted, 2),
        "tokens/s": round(tokens / middle), "GiB": round(held / 2**30, 2),
        "predicted GiB": round(parallel.plan.peak_bytes["hbm"] / 2**30, 2),
    }  # fmt: skip


def _model(name: str, device: str) -> tuple[nn.Module, dict[str, Any], int]:
    """With a batch for the whole node, and how many tokens that is."""
    batch, sequence = (4 * dist.get_world_size(), 1024) if device == "cuda" else (2 * dist.get_world_size(), 32)
    torch.manual_seed(0)
    if name == "llama-8b-layers":
        shape = {"layers": 2, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 32000}
        net, _, _ = llama.build(batch=batch, sequence=sequence, **shape)
        net = net.to_empty(device="cpu")
        with torch.no_grad():
            for value in (*net.parameters(), *net.buffers()):
                value.normal_(0.0, 0.02) if value.is_floating_point() else value.zero_()
        vocabulary = 32000
    else:
        net, vocabulary = build(name, sequence, "cpu"), SHAPES[name][3]
    ids = torch.randint(0, vocabulary, (batch, sequence)).to(device)
    return net, {"input_ids": ids, "labels": ids.clone()}, batch * sequence
