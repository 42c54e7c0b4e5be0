"""Predicted beside measured, over many plans of models of different character: step time, memory, bytes, and the ranks.

    python -m autopar.calibrate -o /tmp/cal.toml --processes 2 4
    python -m benchmarks.predictions --hardware /tmp/cal.toml --processes 2 4 -o docs/benchmarks/predictions.md

The plans of a model: the best by prediction, the best of every baseline policy, the model whole on every rank, and the
best for machines whose links are other than they are (these trade compute for communication differently), all priced
with the one profile. Every plan trains on gloo processes of one thread each, as a user's loop does. The plans of a
model take turns, round by round, so that whatever else the machine does falls on all of them: a step's time is the mean
of a round, and the median of the rounds counts. Memory and bytes are those of `autopar.measure`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import Plan
from autopar.attach.tensors import mesh_of
from autopar.calibrate.values import as_trained
from autopar.decide.referee import refereed
from autopar.ir.layout import REPLICATE
from autopar.ir.mesh import Mesh
from autopar.machine.local_ranks import environment
from autopar.measure.twin import measure, traced
from autopar.price.pricer import Pricer
from autopar.search import Request, search
from autopar.search.policies import policies_for
from benchmarks.models import MODELS
from cost_models.hardware import Hardware, Link
from cost_models.whole_file import write_whole

# Links other than they are: (latency, bytes per second), as factors.
OTHER_LINKS = ((0.05, 1.0), (20.0, 1.0), (1.0, 10.0), (1.0, 0.1))
ROUNDS = 7  # of all plans; the median counts
ROUND_S = 0.4  # about so long does a plan train in a round
STEPS = (2, 40)  # in a round, at least and at most
RATE = 1e-6  # of learning: values hardly change


@dataclass(frozen=True)
class Row:
    """One plan of one model: what was said of it and what it took."""

    model: str
    processes: int
    plan: str
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float
    bytes_equal: bool

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def plans(model: nn.Module, kwargs: Mapping[str, Tensor], mesh: Mesh, hardware: Hardware) -> Iterator[tuple[str, Plan]]:
    """Different plans, named, priced on `hardware`."""
    graph = traced(model, (), kwargs)
    found: dict[str, Plan] = {"searched": search(graph, mesh, hardware)}
    for policy in policies_for(mesh):
        found[policy] = search(graph, mesh, hardware, Request(policy=policy))
    whole = {node.target: (REPLICATE,) * len(mesh.sizes) for node in graph.nodes if node.op == "parameter"}
    found["parameters whole"] = search(graph, mesh, hardware, Request(fixed=whole))
    for latency, rate in OTHER_LINKS:
        links = {name: Link(link.latency_s * latency, link.bytes_per_s * rate) for name, link in hardware.links.items()}
        plain = {name: curve for name, curve in hardware.curves.items() if not name.startswith(("intra.", "inter."))}
        other = search(graph, mesh, replace(hardware, links=links, curves=plain))
        found[f"links {latency:g}x waiting, {rate:g}x rate"] = other
    seen: list[tuple[Any, Any]] = []
    for name, plan in found.items():
        pricer = Pricer.on(mesh, hardware, plan.optimizer, plan.bucket_bytes, plan.graph.rounds)
        priced = refereed(
            graph, plan.choices, plan.deliveries, pricer, objective=None, bound=0.0, memory=None, outputs=plan.outputs
        )
        if (priced.choices, priced.deliveries) not in seen:
            seen.append((priced.choices, priced.deliveries))
            yield name, priced


def training(plan: Plan, model: nn.Module, kwargs: Mapping[str, Tensor], mesh: DeviceMesh) -> Callable[[], None]:
    """One training step of the plan, as a user writes it, some way into the training."""
    parallel = autopar.compile(model, mesh, example_kwargs=kwargs, plan=plan)
    batch = parallel.shard_batch(kwargs)
    optimizer = torch.optim.AdamW(parallel.parameters(), RATE)

    def step() -> None:
        made = parallel(**batch)
        loss = made if isinstance(made, Tensor) else made["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    as_trained(optimizer)
    return step


def step_times(steps: Sequence[Callable[[], None]], rounds: int = ROUNDS) -> list[float]:
    """Seconds of each step, taken in turn; another one begins each round, as who follows whom finds other caches."""
    times: list[list[float]] = [[] for _ in steps]
    counts: list[int] = []
    for step in steps:
        step()
        step()
        once = torch.tensor(_seconds(step, 1))
        dist.broadcast(once, 0)
        counts.append(max(STEPS[0], min(STEPS[1], int(ROUND_S / float(once)))))
    turns = [*zip(steps, counts, times, strict=True)]
    for number in range(rounds):
        begins = number % len(turns)
        for step, count, found in turns[begins:] + turns[:begins]:
            step()
            found.append(_seconds(step, count))
    return [statistics.median(found) for found in times]


def _seconds(step: Callable[[], None], count: int) -> float:
    """Of one of so many steps, on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    dist.barrier()
    return (time.perf_counter() - begin) / count


def worker(name: str, hardware: str, folder: str) -> None:
    """A rank: measures the plans that rank 0 has found."""
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    mesh = autopar.init_mesh("cpu", data=world)
    torch.manual_seed(0)
    model, kwargs, _ = MODELS[name]()
    machine = profile_of(hardware)
    if dist.get_rank() == 0:
        for number, (told, plan) in enumerate(plans(model, kwargs, mesh_of(mesh), machine)):
            plan.save(Path(folder, f"{number:02d}.json"))
            Path(folder, f"{number:02d}.name").write_text(told)
    dist.barrier()
    files = sorted(Path(folder).glob("*.json"))
    found = [Plan.load(file) for file in files]
    seconds = step_times([training(plan, model, kwargs, mesh) for plan in found])
    for file, plan, step_s in zip(files, found, seconds, strict=True):
        measured = measure(plan, model, kwargs=kwargs, steps=1, hardware=machine)
        peak = measured.peak_bytes["step"]
        row = Row(
            name, world, file.with_suffix(".name").read_text(), plan.predicted_seconds, step_s,
            peak.predicted or 0.0, peak.measured, measured.is_equal,
        )  # fmt: skip
        if dist.get_rank() == 0:
            print("ROW " + json.dumps(row.__dict__), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(name: str, processes: int, hardware: str) -> list[Row]:
    """Measure the plans of a model on so many processes."""
    return [Row(**row) for row in rows_of("benchmarks.predictions", name, processes, hardware)]


def rows_of(module: str, name: str, processes: int, profile: str, *more: str) -> list[dict[str, Any]]:
    """What the workers of a benchmark print of a model behind `ROW `. A folder is theirs to share."""
    with tempfile.TemporaryDirectory(prefix="autopar-benchmark-") as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m",
            module, "--worker", name, "--hardware", profile, "--folder", folder, *more,
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
    return [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]


def profile_of(text: str) -> Hardware:
    """A profile by its name, or from its file."""
    return Hardware.load(Path(text)) if text.endswith(".toml") else Hardware.load(text)


def verdict(rows: list[Row]) -> list[str]:
    """The figures that say whether predictions hold."""
    numbers = list(dict.fromkeys(row.processes for row in rows))
    groups = {"all": rows} | {f"on {n}": [row for row in rows if row.processes == n] for n in numbers}
    lines: list[str] = []
    for told, of in groups.items() if len(numbers) > 1 else [("all", rows)]:
        errors = [abs(row.error) for row in of]
        middle = statistics.median(errors)
        rank = float(spearmanr([row.predicted_s for row in of], [row.measured_s for row in of]).statistic)
        lines.append(
            f"- {told}: {len(of)} plans of {len({row.model for row in of})} models, rank correlation (Spearman) "
            f"{rank:.3f}, median absolute error of the step time {middle:.0%} (worst {max(errors):.0%})"
        )
    memory = [row.predicted_bytes / row.measured_bytes for row in rows]
    lines += [
        f"- predicted / measured peak memory {min(memory):.2f} to {max(memory):.2f}",
        f"- collective bytes equal in {sum(row.bytes_equal for row in rows)} of {len(rows)}",
    ]
    for model, processes in dict.fromkeys((row.model, row.processes) for row in rows):
        of = [row for row in rows if (row.model, row.processes) == (model, processes)]
        chosen, best = min(of, key=lambda row: row.predicted_s), min(of, key=lambda row: row.measured_s)
        error = statistics.median(abs(row.error) for row in of)
        lines.append(
            f"- {model} on {processes}: predicted best ({chosen.plan}) takes {chosen.measured_s / best.measured_s:.2f} "
            f"times as long as the measured best ({best.plan}); median error {error:.0%}"
        )
    return lines


def markdown(rows: list[Row], command: str) -> str:
    lines = [
        "# Predictions beside measurements",
        "",
        f"`{command}`, {date.today()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, gloo, "
        f"one thread a process; medians of {ROUNDS} rounds.",
        "",
        *verdict(rows),
        "",
        "| model | processes | plan | predicted ms | measured ms | error | predicted MiB | measured MiB | bytes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.model} | {row.processes} | {row.plan} | {row.predicted_s * 1e3:.2f} | {row.measured_s * 1e3:.2f} "
            f"| {row.error:+.0%} | {row.predicted_bytes / 2**20:.1f} | {row.measured_bytes / 2**20:.1f} "
            f"| {'equal' if row.bytes_equal else 'differ'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", required=True, help="calibrated profile (.toml), or the name of a known one")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=["gpt2", "conv", "embeddings", "tiny"], choices=list(MODELS))
    parser.add_argument("-o", type=Path)
    parser.add_argument("--rows", type=Path, help="JSON lines: rows that stand there are not measured again")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.hardware, given.folder)
        return
    began, rows = time.perf_counter(), []
    kept = given.rows.read_text().splitlines() if given.rows and given.rows.exists() else []
    known = [Row(**json.loads(line)) for line in kept]
    for processes in given.processes:
        for name in given.models:
            found = [row for row in known if (row.model, row.processes) == (name, processes)]
            if not found:
                found = run(name, processes, given.hardware)
                kept += [json.dumps(row.__dict__) for row in found]
                if given.rows:
                    write_whole(given.rows, "\n".join(kept) + "\n")
            rows += found
            print(f"{name} on {processes}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    text = markdown(rows, "python -m benchmarks.predictions " + " ".join(sys.argv[1:]))
    print(text)
    if given.o:
        write_whole(given.o, text)


if __name__ == "__main__":
    main()
