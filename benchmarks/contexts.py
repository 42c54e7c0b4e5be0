"""Context parallelism on real processes: gathered keys and values, ring, zigzag ring: time and measured memory.

    python -m benchmarks.contexts                          its table stands in docs/benchmarks/attention.md

One layer of a Llama with one long sequence, each time searched with all attention in that pattern, forward and
backward, then executed by `python -m autopar.measure` on gloo processes of one thread. With more processes than cores
times are those of all work together: what is balanced is no quicker there, what is left out is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from autopar.ir.attention import OPERANDS_OF_ATTENTION
from autopar.ir.mesh import Mesh
from autopar.measure.twin import traced
from autopar.search import Request, answer, ask
from cost_models.hardware import Hardware
from examples.llama import Example
from examples.llama import build as llama

PATTERNS = ["context parallel: gathered kv", "context parallel: ring", "context parallel: zigzag ring"]
SEQUENCE = 4096
HEAD = """\
| attention | s a step | s of it forward | s backward | peak MiB | predicted | MiB received |
|---|--:|--:|--:|--:|--:|--:|"""


def build() -> Example:
    """Attention is most of its work."""
    return llama(
        layers=1, width=256, heads=4, kv_heads=2, hidden=256, vocabulary=256, batch=1, sequence=SEQUENCE,
        dtype=torch.float32,
    )  # fmt: skip


def measured(pattern: str, ranks: int, steps: int, folder: Path) -> dict[str, Any]:
    """What `autopar.measure` says of the best plan in which all attention runs so."""
    model, args, kwargs = build()
    question = ask(traced(model, args, kwargs), Mesh(("context",), (ranks,)), Hardware.load("cpu-gloo"))
    strategies = dict(question.strategies)
    for node in question.graph.nodes:
        if node.op in OPERANDS_OF_ATTENTION:
            strategies[node.name] = tuple(one for one in strategies[node.name] if one.body == pattern)
    plan = answer(replace(question, strategies=strategies), Request())
    plan.save(folder / "plan.json")
    command = [
        sys.executable, "-m", "autopar.measure", str(folder / "plan.json"), "benchmarks/contexts.py:build", "--steps",
        str(steps), "--json", str(folder / "measured.json"),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "measured.json").read_text())


def row(pattern: str, found: dict[str, Any]) -> str:
    peaks = found["peak_bytes"]["step"]
    received = sum(one["nbytes"][1] for one in found["collectives"])
    return (
        f"| {pattern} | {found['step']['measured']:.2f} | {found['phases']['forward']['measured']:.2f} "
        f"| {found['phases']['backward']['measured']:.2f} | {peaks['measured'] / 2**20:.1f} "
        f"| {peaks['predicted'] / 2**20:.1f} | {received / 2**20:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    command = f"python -m benchmarks.contexts --processes {args.processes} --steps {args.steps}"
    print(
        f"`{command}`, {date.today()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, "
        f"one sequence of {SEQUENCE:,} tokens.\n"
    )
    print(HEAD, flush=True)
    for pattern in PATTERNS:
        with tempfile.TemporaryDirectory() as folder:
            print(row(pattern, measured(pattern, args.processes, args.steps, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
