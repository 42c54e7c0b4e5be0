"""Training in little device memory, on one GPU: autopar's plan beside the same model without a cap and torch's offload.

    python -m benchmarks.capped --models gpt-125m gpt-350m gpt-1.3b --share 0.4 -o docs/benchmarks/capped.md

Every method runs alone in a process of its own, in bfloat16 on random tokens, forward + backward + AdamW, and all but
the first under the same cap, which is that share of what the first one reserved. The cap is of what the allocator
reserves (`set_per_process_memory_fraction`), with expandable segments for every method; a plan is told the cap, and
leaves room in it for what it does not count (`cost_models.reserve`), and that logits are dropped, as by every method:

    uncapped        the plain model
    autopar         the plan that fits in the cap (autopar.compile(memory=...))
    elixir          the same compiler with Elixir's published rule in the place of the search
    fully_shard     torch's, each block, with parameters, gradients and states on the CPU and blocks checkpointed

Efficiency is the uncapped time over the method's. Without CUDA it says so and ends with status 0. `--device cpu` runs
small shapes on bookkept copies instead, without a cap: that the command works, and nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import autopar
from autopar.optim import Streamed
from cost_models.caching_allocator import PAGE
from cost_models.whole_file import write_whole

SHAPES = {  # layers, width, heads, vocabulary (OPT's and GPT's tables)
    "tiny": (2, 64, 2, 512),
    "gpt-125m": (12, 768, 12, 50257),
    "gpt-350m": (24, 1024, 16, 50257),
    "gpt-1.3b": (24, 2048, 32, 50257),
    "opt-2.7b": (32, 2560, 32, 50272),
    "opt-6.7b": (32, 4096, 32, 50272),
}
METHODS = ("uncapped", "autopar", "elixir", "fully_shard")


def build(name: str, sequence: int, device: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads, vocabulary = SHAPES[name]
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=sequence, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return GPT2LMHeadModel(config).to(dtype)


def parallel(
    model: nn.Module, kwargs: dict[str, Any], device: str, cap: float | None, policy: str | None, profile: str | None
) -> Any:  # fmt: skip
    mesh = autopar.init_mesh(device)
    limit = None if cap is None else int(cap)
    if policy is None:
        return autopar.compile(model, mesh, memory=limit, example_kwargs=kwargs, outputs="loss", hardware=profile)
    from autopar.ir.mesh import Mesh
    from autopar.machine.device import hardware_or_here, has_expandable_segments, memory_bytes
    from autopar.measure.twin import traced
    from autopar.price.pricer import Pricer
    from autopar.search import Request, search
    from autopar.search.reserved import held_within, telling
    from cost_models.reserve import room_in

    machine = hardware_or_here(profile, device)
    graph = traced(model, (), kwargs, device_type=device, loss_alone=True)
    room = room_in(memory_bytes(limit, machine, device), machine, (1,), expandable=has_expandable_segments())
    one = Mesh(("data",), (1,))
    with telling(room):
        plan = held_within(
            room,
            lambda held: search(graph, one, machine, Request(memory=held, policy=policy, outputs="loss")),
            Pricer.on(one, machine, "adamw"),
        )
    return autopar.compile(model, mesh, plan=plan, example_kwargs=kwargs, outputs="loss")


def sharded(model: nn.Module, device: str) -> nn.Module:
    mesh = autopar.init_mesh(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    offload = {"offload_policy": CPUOffloadPolicy()} if device == "cuda" else {}
    for block in [module for module in model.modules() if type(module).__name__ == "GPT2Block"]:
        fully_shard(block, mesh=mesh, **offload)
    fully_shard(model, mesh=mesh, **offload)
    return model


def worker(given: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps; what it took."""
    device, method = given.device, given.worker
    if device == "cuda" and given.cap is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(fraction_of(given.cap, total))
    home = "cpu" if method in ("autopar", "elixir", "fully_shard") else device  # the whole of it may not fit
    model = build(given.models[0], given.sequence, home)
    ids = torch.randint(0, SHAPES[given.models[0]][3], (given.batch, given.sequence), device=device)
    kwargs = {"input_ids": ids, "labels": ids.clone()}
    plan = None
    if method in ("autopar", "elixir"):
        model = parallel(model, kwargs, device, given.cap, "elixir" if method == "elixir" else None, given.hardware)
        plan = model.plan
    elif method == "fully_shard":
        model = sharded(model, device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    if plan is not None:
        optimizer = Streamed(optimizer, model, overlap=True)  # as the docs say where parameters are on the host

    def step() -> None:
        model(**kwargs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    times = timed(step, given.steps, device)
    found = {"seconds": statistics.median(times), "peak": torch.cuda.max_memory_allocated() if device == "cuda" else 0}
    found["reserved"] = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    if plan is not None:
        found |= {"predicted_s": plan.predicted_seconds, "predicted": plan.peak_bytes["hbm"]}
        found["predicted_reserved"] = plan.search.get("reserved_bytes", 0)
    return found


def fraction_of(cap: float, total: float) -> float:
    """The share of the device that the allocator may reserve: never less than the cap, however it is rounded, which a
    plan may take to the last page.
    """
    return min(1.0, (math.ceil(cap / PAGE) * PAGE + PAGE) / total)


def timed(step: Callable[[], None], steps: int, device: str) -> list[float]:
    times: list[float] = []
    for number in range(steps + 2):
        if device == "cuda":
            torch.cuda.synchronize()
            if number == 1:
                torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return times[2:]


def run(given: argparse.Namespace, model: str, method: str, cap: float | None) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "benchmarks.capped", "--worker", method, "--models", model, "--device", given.device,
        "--batch", str(given.batch), "--sequence", str(given.sequence), "--steps", str(given.steps),
        *([] if given.hardware is None else ["--hardware", given.hardware]),
        *([] if cap is None else ["--cap", str(cap)]),
    ]  # fmt: skip
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if given.device == "cuda" else {}
    env = {**os.environ, **allocator, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(command, capture_output=True, text=True, env={**env, "MASTER_PORT": "29511"})
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    said = [line for line in done.stderr.splitlines() if line.strip() and ":[W" not in line]  # NCCL warns behind errors
    return {"failed": (said or ["no output"])[-1][:160]}


def row(model: str, method: str, found: dict[str, Any], uncapped_s: float) -> str:
    if "failed" in found:
        return f"| {model} | {method} | {found['failed']} |" + " |" * 7
    told = [f"{found['seconds'] * 1e3:.1f}", f"{uncapped_s / found['seconds']:.0%}", f"{found['peak'] / 2**30:.2f}"]
    told.append(f"{found['reserved'] / 2**30:.2f}")
    predicted = ["-", "-", "-"]
    if "predicted_s" in found:
        predicted = [f"{found['predicted_s'] * 1e3:.1f}", f"{found['predicted'] / 2**30:.2f}"]
        predicted.append(f"{found['predicted_reserved'] / 2**30:.2f}")
    return f"| {model} | {method} | " + " | ".join([*told, *predicted]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt-125m", "gpt-350m", "gpt-1.3b"], choices=list(SHAPES))
    parser.add_argument("--share", type=float, default=0.4, help="the cap, as a share of what the plain model takes")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--hardware", help="the profile that prices plans (default: as autopar.compile has it)")
    parser.add_argument("-o", type=Path)
    parser.add_argument("--worker", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--cap", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("this machine has no CUDA device: nothing was measured")
        return
    if given.worker:
        print("RESULT " + json.dumps(worker(given)), flush=True)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return
    device = torch.cuda.get_device_name() if given.device == "cuda" else platform.machine()
    lines = [
        "# Training in little device memory",
        "",
        f"`python -m benchmarks.capped {' '.join(sys.argv[1:])}`, {date.today()}, torch {torch.__version__}, {device}; "
        f"batch {given.batch} x {given.sequence} tokens, bfloat16, AdamW, median of {given.steps} steps.",
        "",
        "| model | method | ms | efficiency | peak GiB | reserved GiB | predicted ms | peak | reserved |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def found(line: str) -> None:
        """As it comes: whoever has a device for a short time keeps what there is."""
        lines.append(line)
        print(line, file=sys.stderr, flush=True)
        if given.o:
            write_whole(given.o, "\n".join(lines) + "\n")

    for model in given.models:
        whole = run(given, model, "uncapped", None)
        found(row(model, "uncapped", whole, whole.get("seconds", 0.0)))
        cap = given.share * whole["reserved"] if whole.get("reserved") else None
        for method in METHODS[1:]:
            if method == "elixir" and cap is None:
                continue
            found(row(model, method, run(given, model, method, cap), whole.get("seconds", 0.0)))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
