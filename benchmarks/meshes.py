"""Which mesh is chosen beside which is quicker: models on 4 gloo processes, as one axis of 4 and as two axes of 2.

    python -m autopar.calibrate -o /tmp/cal.toml --processes 2 4
    python -m benchmarks.meshes --hardware /tmp/cal.toml -o docs/benchmarks/meshes.md

Each mesh gets the plan that the search finds on it, as `--devices 4` does; the one that is predicted to be the quickest
is chosen, of equal ones that of fewer axes. All plans of a model then train in turn, as `benchmarks.predictions`
measures them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

import autopar
from autopar import Plan
from autopar.measure.twin import traced
from autopar.search import search
from autopar.search.meshes import Row as OfMesh
from autopar.search.meshes import meshes_of, quickest_first
from benchmarks.models import MODELS
from benchmarks.predictions import profile_of, rows_of, step_times, training
from cost_models.whole_file import write_whole

WITHIN = 1.05  # of the quickest: what a chosen mesh may take


@dataclass(frozen=True)
class Row:
    """The plan of one model on one mesh. Of the rows of a model the chosen mesh is the first."""

    model: str
    mesh: str
    predicted_s: float
    measured_s: float


def worker(name: str, profile: str, folder: str, rounds: int) -> None:
    """A rank: measures the plans that rank 0 has found, one for each mesh."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, kwargs, _ = MODELS[name]()
    hardware = profile_of(profile)
    if dist.get_rank() == 0:
        graph = traced(model, (), kwargs)
        found = [OfMesh(mesh, search(graph, mesh, hardware)) for mesh in meshes_of(dist.get_world_size(), hardware)]
        for number, one in enumerate(sorted(found, key=quickest_first)):
            assert one.plan is not None
            one.plan.save(Path(folder, f"{number:02d}.json"))
    dist.barrier()
    plans = [Plan.load(file) for file in sorted(Path(folder).glob("*.json"))]
    meshes = [autopar.init_mesh("cpu", **dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))) for plan in plans]
    steps = [training(plan, model, kwargs, mesh) for plan, mesh in zip(plans, meshes, strict=True)]
    seconds = step_times(steps, rounds)
    if dist.get_rank() == 0:
        for plan, step_s in zip(plans, seconds, strict=True):
            print("ROW " + json.dumps(Row(name, str(plan.mesh), plan.predicted_seconds, step_s).__dict__), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(name: str, processes: int, profile: str, rounds: int) -> list[Row]:
    """Measure the best plan of each mesh of a model on so many processes."""
    found = rows_of("benchmarks.meshes", name, processes, profile, "--rounds", str(rounds))
    return [Row(**row) for row in found]


def of_models(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each model; the mesh that is chosen was first and stays so."""
    return {name: [row for row in rows if row.model == name] for name in dict.fromkeys(row.model for row in rows)}


def markdown(rows: Sequence[Row], processes: int, rounds: int, command: str) -> str:
    models = of_models(rows)
    over = {name: found[0].measured_s / min(row.measured_s for row in found) for name, found in models.items()}
    missed = [f"; {name}: {ratio:.2f} times" for name, ratio in over.items() if ratio > WITHIN]
    lines = [
        "# Which mesh is chosen, and which is quicker",
        "",
        f"`{command}`, {date.today()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, gloo, "
        f"{processes} processes of one thread; medians of {rounds} rounds in turn.",
        "",
        f"The mesh that is predicted to be the quickest is measured within {WITHIN - 1:.0%} of the quickest for "
        f"{len(models) - len(missed)} of {len(models)} models" + "".join(missed) + ".",
        "",
        "| model | mesh | predicted ms | measured ms | to the quickest | |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in models.items():
        best = min(row.measured_s for row in found)
        for row in found:
            lines.append(
                f"| {name} | {row.mesh} | {row.predicted_s * 1e3:.2f} | {row.measured_s * 1e3:.2f} | "
                f"{row.measured_s / best:.2f} | {'chosen' if row is found[0] else ''} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", required=True, help="calibrated profile (.toml), or the name of a known one")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=21, help="of all plans of a model; the median counts")
    parser.add_argument("-o", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.hardware, given.folder, given.rounds)
        return
    rows: list[Row] = []
    for name in given.models:
        rows += run(name, given.processes, given.hardware, given.rounds)
        print(f"{name}: measured", file=sys.stderr, flush=True)
    text = markdown(rows, given.processes, given.rounds, "python -m benchmarks.meshes " + " ".join(sys.argv[1:]))
    print(text)
    if given.o:
        write_whole(given.o, text)


if __name__ == "__main__":
    main()
