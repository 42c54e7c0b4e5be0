"""Predicted beside measured, over many plans of models of different character: step time, memory, bytes, and the ranks.

    python -m autopar.calibrate -o /tmp/cal.toml --processes 2 4
    python -m benchmarks.predictions --hardware /tmp/cal.toml --processes 2 4 -o docs/benchmarks/predictions.md

The plans of a model: the best by prediction, the best of every baseline policy, the model whole on every rank, and the
best for machines whose links are other than they are (these trade compute for communication differently), all priced
with the one profile. Every plan trains for some steps on gloo processes of one thread each (autopar.measure); the plans
of a model take turns, so that whatever else the machine does falls on all of them.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import spearmanr
from torch import Tensor, nn

from autopar import Plan
from autopar.decide import refereed
from autopar.layout import REPLICATE
from autopar.measure.twin import measure, traced
from autopar.mesh import Mesh
from autopar.policies import policies_for
from autopar.price import Pricer
from autopar.search import search
from benchmarks.models import MODELS
from cost_models.hardware import Hardware, Link
from cost_models.whole_file import write_whole

# Links other than they are: (latency, bytes per second), as factors.
OTHER_LINKS = ((0.05, 1.0), (20.0, 1.0), (1.0, 10.0), (1.0, 0.1))
ROUNDS = 2  # of all plans; the median counts


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
        found[policy] = search(graph, mesh, hardware, policy=policy)
    whole = {node.target: (REPLICATE,) * len(mesh.sizes) for node in graph.nodes if node.op == "parameter"}
    found["parameters whole"] = search(graph, mesh, hardware, fixed=whole)
    for latency, rate in OTHER_LINKS:
        links = {name: Link(link.latency_s * latency, link.bytes_per_s * rate) for name, link in hardware.links.items()}
        plain = {name: curve for name, curve in hardware.curves.items() if not name.startswith(("intra.", "inter."))}
        other = search(graph, mesh, replace(hardware, links=links, curves=plain))
        found[f"links {latency:g}x waiting, {rate:g}x rate"] = other
    seen: list[tuple[Any, Any]] = []
    for name, plan in found.items():
        pricer = Pricer.on(mesh, hardware, plan.optimizer, plan.bucket_bytes)
        priced = refereed(
            graph, plan.choices, plan.deliveries, pricer, objective=None, bound=0.0, memory=None, outputs=plan.outputs
        )
        if (priced.choices, priced.deliveries) not in seen:
            seen.append((priced.choices, priced.deliveries))
            yield name, priced


def worker(name: str, hardware: str, folder: str, steps: int) -> None:
    """A rank: measures the plans that rank 0 has found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, kwargs, _ = MODELS[name]()
    machine = Hardware.load(Path(hardware)) if hardware.endswith(".toml") else Hardware.load(hardware)
    if dist.get_rank() == 0:
        mesh = Mesh(("data",), (dist.get_world_size(),))
        for number, (told, plan) in enumerate(plans(model, kwargs, mesh, machine)):
            plan.save(Path(folder, f"{number:02d}.json"))
            Path(folder, f"{number:02d}.name").write_text(told)
    dist.barrier()
    files = sorted(Path(folder).glob("*.json"))
    rounds = [
        [measure(Plan.load(file), model, kwargs=kwargs, steps=steps, hardware=machine) for file in files]
        for _ in range(ROUNDS)
    ]
    if dist.get_rank() == 0:
        for file, of_plan in zip(files, zip(*rounds, strict=True), strict=True):
            first, peak = of_plan[0], of_plan[0].peak_bytes["step"]
            row = Row(
                name, dist.get_world_size(), file.with_suffix(".name").read_text(), first.step.predicted or 0.0,
                statistics.median(measured.step.measured for measured in of_plan),
                peak.predicted or 0.0, peak.measured, all(measured.is_equal for measured in of_plan),
            )  # fmt: skip
            print("ROW " + json.dumps(row.__dict__), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(name: str, processes: int, hardware: str, steps: int) -> list[Row]:
    """Measure the plans of a model on so many processes."""
    with tempfile.TemporaryDirectory(prefix="autopar-predictions-") as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m",
            "benchmarks.predictions", "--worker", name, "--hardware", hardware, "--folder", folder,
            "--steps", str(steps),
        ]  # fmt: skip
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    lines = [line.removeprefix("ROW ") for line in done.stdout.splitlines() if line.startswith("ROW ")]
    return [Row(**json.loads(line)) for line in lines]


def verdict(rows: list[Row]) -> list[str]:
    """The figures that say whether predictions hold."""
    errors = [abs(row.error) for row in rows]
    rank = float(spearmanr([row.predicted_s for row in rows], [row.measured_s for row in rows]).statistic)
    memory = [row.predicted_bytes / row.measured_bytes for row in rows]
    lines = [
        f"- {len(rows)} plans of {len({row.model for row in rows})} models: rank correlation (Spearman) {rank:.3f}, "
        f"median absolute error of the step time {statistics.median(errors):.0%} (worst {max(errors):.0%})",
        f"- predicted / measured peak memory {min(memory):.2f} to {max(memory):.2f}",
        f"- collective bytes equal in {sum(row.bytes_equal for row in rows)} of {len(rows)}",
    ]
    for model, processes in dict.fromkeys((row.model, row.processes) for row in rows):
        of = [row for row in rows if (row.model, row.processes) == (model, processes)]
        chosen, best = min(of, key=lambda row: row.predicted_s), min(of, key=lambda row: row.measured_s)
        lines.append(
            f"- {model} on {processes}: predicted best ({chosen.plan}) takes {chosen.measured_s / best.measured_s:.2f} "
            f"times as long as the measured best ({best.plan})"
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
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("-o", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.hardware, given.folder, given.steps)
        return
    began, rows = time.perf_counter(), []
    for processes in given.processes:
        for name in given.models:
            rows += run(name, processes, given.hardware, given.steps)
            print(f"{name} on {processes}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    text = markdown(rows, "python -m benchmarks.predictions " + " ".join(sys.argv[1:]))
    print(text)
    if given.o:
        write_whole(given.o, text)


if __name__ == "__main__":
    main()
