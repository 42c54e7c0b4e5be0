"""What a search costs: CPU seconds, peak memory, size of the problem, for real shapes on three meshes.

    python -m benchmarks.search_cost -o docs/benchmarks/search_cost.md
    python -m benchmarks.search_cost --tight-only                         the last rows alone

The last rows are limits that bind: recomputing, offloading and where parameters live are then part of the search. Each
search runs alone in a fresh process through the command line (`python -m autopar.search --json`), so that its CPU time
and peak memory are its own; both count everything, imports and tracing included. No GPU and no weights are involved.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from cost_models.whole_file import write_whole

CASES = [
    ("GPT-2 (12 layers)", "examples/gpt2.py:build"),
    ("Llama 1B", "examples/llama.py:build_1b"),
    ("Llama 8B", "examples/llama.py:build_8b"),
]
MESHES = ["data=8", "data=8,tensor=8", "data=32,tensor=8"]
TIGHT = [("Llama 8B", "data=8", "26GiB"), ("Llama 8B", "data=8,tensor=8", "6.7GiB")]  # about 0.6 of what is wanted


def search(model: str, mesh: str, memory: str, limit_s: int) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "autopar.search", model, "--mesh", mesh, "--hardware", "h100-sxm", "--memory", memory,
        "--time-limit", str(limit_s), "--json", "--quiet",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout)


def row(name: str, mesh: str, memory: str, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"| {name} | {mesh} | {memory} | {found['failed']} |" + " |" * 8
    simulated_s = found["simulated_seconds"]
    simulated = "-" if simulated_s is None else f"{simulated_s * 1e3:.1f}"
    return (
        f"| {name} | {mesh} | {memory} | {found['nodes']} | {found['items']} "
        f"| {found['variables']:,} | {found['constraints']:,} "
        f"| {found['cpu_seconds']:.1f} | {found['peak_rss_bytes'] / 2**30:.2f} | {simulated} "
        f"| {found['peak_bytes']['hbm'] / 2**30:.1f} | {found['gap']:.2%} | {'yes' if found['tied'] else 'no'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", nargs="+", default=["80GB", "40GiB"])
    parser.add_argument("--time-limit", type=int, default=60)
    parser.add_argument("--tight-only", action="store_true", help="only the limits that bind")
    parser.add_argument("-o", type=Path)
    args = parser.parse_args()
    head = [
        "| model | mesh | memory | nodes | items | variables | constraints | CPU s | peak RSS GiB "
        "| step ms (simulated) | peak GiB | gap | tied |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows: list[str] = []
    cases = [(name, mesh, memory) for name in dict(CASES) for mesh in MESHES for memory in args.memory]
    for name, mesh, memory in [*([] if args.tight_only else cases), *TIGHT]:
        rows.append(row(name, mesh, memory, search(dict(CASES)[name], mesh, memory, args.time_limit)))
        print(rows[-1], flush=True)
    given = " --tight-only" if args.tight_only else f" --memory {' '.join(args.memory)}"
    command = f"python -m benchmarks.search_cost{given} --time-limit {args.time_limit}"
    alone = "" if args.tight_only else " The last rows alone: `python -m benchmarks.search_cost --tight-only`."
    text = (
        f"# What a search costs\n\n`{command}`, {date.today()}, torch {torch.__version__}, {platform.machine()}, "
        f"{os.cpu_count()} cores. CPU seconds and memory are those of the whole process, imports and tracing included; "
        f"steps are predicted on h100-sxm.{alone}\n\n"
    )
    if args.o:
        write_whole(args.o, text + "\n".join(head + rows) + "\n")


if __name__ == "__main__":
    main()
