"""What a search for a large model costs: seconds and peak memory, against what was set as acceptable.

    python -m benchmarks.large -o docs/benchmarks/large.md

    a GPT of 96 layers on 2x8 ranks     searched within 60 s on 2 cores
    a model of 7 billion parameters     traced and searched within 120 s, in 4 GB

Each with memory enough, and with less than the fastest plan takes: then what to recompute, to offload and to keep on
the host is searched, too. Every search runs alone in a fresh process (`benchmarks.search_cost.search`). No GPU and no
weights are involved. On a busy machine the clock tells how busy it is, so what counts are CPU seconds, of which each
part has the share that it has of the clock's: a search is one thread, and alone on the machine the two agree.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.limits import machine
from benchmarks.search_cost import search
from cost_models.whole_file import write_whole
from examples import gpt2, llama

MODEL = "benchmarks/large.py:{}"
MEMORY_BYTES = 4e9  # of the process


@dataclass(frozen=True)
class Case:
    """A model on a mesh of H100s with so much memory each; the seconds of `parts` may be `within_s` in all."""

    name: str
    factory: str
    mesh: str
    memory: str
    parts: tuple[str, ...]
    within_s: float


GPT = Case("GPT, 96 layers of 2048", "gpt", "data=2,tensor=8", "80GB", ("propose", "search"), 60.0)
LLAMA = Case("Llama 7B", "llama_7b", "data=8", "80GB", ("trace", "propose", "search"), 120.0)
CASES = [replace(case, memory=memory) for case in (GPT, LLAMA) for memory in ("80GB", "30GiB")]


def gpt() -> gpt2.Example:
    """4.9 billion parameters in float32."""
    return gpt2.build(layers=96, width=2048, heads=16)


def llama_7b() -> llama.Example:
    """The shapes of Llama 1 and 2 7B, in bfloat16."""
    return llama.build(layers=32, width=4096, heads=32, kv_heads=32, hidden=11008, vocabulary=32000)


def row(case: Case, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"| {case.name} | {case.mesh} | {case.memory} | {found['failed']} |" + " |" * 9
    seconds = found["seconds"]
    taken = found["cpu_seconds"] * sum(seconds[part] for part in case.parts) / seconds["total"]
    kept = taken <= case.within_s and found["peak_rss_bytes"] <= MEMORY_BYTES
    step = found["simulated_seconds"] or found["step_seconds"]
    return (
        f"| {case.name} | {case.mesh} | {case.memory} | {found['nodes']} | {seconds['total']:.1f} "
        f"| {found['cpu_seconds']:.1f} | {' + '.join(case.parts)} | {taken:.1f} | {case.within_s:.0f} "
        f"| {found['peak_rss_bytes'] / 1e9:.2f} | {step * 1e3:.1f} "
        f"| {found['peak_bytes']['hbm'] / 2**30:.1f} | {'yes' if kept else 'no'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=int, default=60, metavar="S", help="of the solver, for each search")
    parser.add_argument("-o", type=Path, metavar="FILE", help="write the page there, too")
    given = parser.parse_args()
    lines = [
        "| model | mesh | memory | nodes | s by the clock | CPU s | of which counts | CPU s | within s | peak RSS GB "
        "| step ms (simulated) | peak GiB | kept |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        lines.append(row(case, search(MODEL.format(case.factory), case.mesh, case.memory, given.time_limit)))
        print(lines[-1], flush=True)
    if given.o:
        command = f"python -m benchmarks.large --time-limit {given.time_limit} -o {given.o}"
        text = (
            f"# What a search for a large model costs\n\n`{command}`, {date.today()}, torch {torch.__version__}, "
            f"{machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end. Steps are predicted on "
            "h100-sxm. CPU seconds and memory are those of the whole process, imports and tracing included.\n\n"
        )
        write_whole(given.o, text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
