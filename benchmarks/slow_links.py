"""Where pipeline stages beat FSDP: Llama-70B on 64 H100, over faster and slower links between nodes. All simulated.

    python -m benchmarks.slow_links -o docs/benchmarks/slow_links.md

FSDP sends all weights twice and their gradients once between nodes, in every step. Of stages of one node each, only
what lies between two layers crosses. So there is a speed of links below which stages are quicker.

A row is the same machine with other links between nodes. In it are FSDP (the quickest of its variants that fits), the
search's pipeline with a stage on each node, and with --searched its own plan without stages. Collectives of a stage
stay within a node, so the pipeline is searched for once, with the quickest links, and priced with the others.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch

from autopar.errors import Infeasible, NoAnswerInTime
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.search import Request, answer, ask
from autopar.search.context import Progress
from autopar.search.cutting import cut_again
from autopar.search.orders import within_stage
from autopar.search.pipeline import Pipeline
from autopar.search.pipelines import pipeline_of
from autopar.trace import capture, graph_of
from autopar.trace.precision import precision_named
from benchmarks.beside import memory_on, progress_from_now, seconds_by_hand
from cost_models.hardware import Hardware
from cost_models.whole_file import write_whole
from examples.llama import build

FSDP = ("fsdp", "zero2", "checkpoint-every-block")
LINKS = (12.5, 6.25, 3.125)  # GB/s of each GPU between nodes; the profile's own are 50, 3.2 Tb/s a node
FLAT, GRID, STAGES = Mesh(("data",), (64,)), Mesh(("data", "tensor"), (8, 8)), Mesh(("pipe", "tensor"), (8, 8))
MICRO_BATCHES = 128


@dataclass(frozen=True)
class Found:
    """A step: its seconds, and what it is; None where nothing fits."""

    seconds: float | None
    what: str

    def __str__(self) -> str:
        return self.what if self.seconds is None else f"{self.seconds:.2f} s ({self.what})"


@dataclass(frozen=True)
class Row:
    """What a step takes with links of so many GB/s."""

    link: float
    fsdp: Found
    without_stages: Found | None
    pipeline: Found


def llama(layers: int, batch: int) -> Graph:
    """The step of a Llama of 70B's width, computing in bfloat16 over float32 weights. It gives the loss alone: logits
    of all micro-batches would take as much as everything else.
    """
    model, _, inputs = build(
        layers=layers, width=8192, heads=64, kv_heads=8, hidden=28672, batch=batch, sequence=4096, dtype=torch.float32
    )
    precision = precision_named("bf16")
    return graph_of(capture(model, (), inputs, precision=precision, loss_alone=True, device_type="cuda"), precision)


def with_links(hardware: Hardware, link: float) -> Hardware:
    """The same machine with so many GB/s between nodes."""
    between = replace(hardware.links["inter"], bytes_per_s=link * 1e9)
    return replace(hardware, links={**hardware.links, "inter": between})


def by_hand(graph: Graph, hardware: Hardware, progress: Progress) -> Found:
    """The quickest variant of FSDP over all ranks."""
    question = ask(graph, FLAT, hardware, progress=progress)
    memory = memory_on(hardware, FLAT)
    best = Found(None, "does not fit")
    for policy in FSDP:
        try:
            seconds = seconds_by_hand(question, memory, policy)
        except (Infeasible, NoAnswerInTime) as error:
            progress(f"{policy}: {error}")
            continue
        progress(f"{policy}: {seconds:.2f} s")
        if best.seconds is None or seconds < best.seconds:
            best = Found(seconds, policy)
    return best


def without_stages(graph: Graph, hardware: Hardware, progress: Progress) -> Found:
    """The search's plan on nodes by GPUs of a node."""
    request = Request(memory=memory_on(hardware, GRID), simulation=True)
    try:
        plan = answer(ask(graph, GRID, hardware), request, progress=progress)
    except (Infeasible, NoAnswerInTime) as error:
        progress(f"without stages: {error}")
        return Found(None, "does not fit" if isinstance(error, Infeasible) else "no answer in time")
    progress(f"without stages: {plan.predicted_seconds:.2f} s")
    return Found(plan.predicted_seconds, str(GRID))


def in_stages(graph: Graph, hardware: Hardware, micro_batches: int, progress: Progress) -> Pipeline:
    """The search's pipeline, a stage on each node."""
    question = ask(in_rounds_of_stages(graph, micro_batches), within_stage(STAGES), hardware)
    request = Request(memory=memory_on(hardware, STAGES))
    return pipeline_of(question, STAGES, request, stages_per_rank=1, progress=progress)


def priced_again(found: Pipeline, hardware: Hardware) -> Found:
    """The same stages in the same order, with the figures of another machine."""
    priced = cut_again(found, found.whole, hardware)
    assert priced is not None, "it was cut there before"
    return Found(priced.step_seconds, f"{priced.schedule.name}, {priced.peak_bytes / 2**30:.1f} GiB")


def crossing(rows: list[Row]) -> str:
    """In words: between which links stages become the quicker ones than FSDP."""
    told = [(row.link, row.fsdp.seconds, row.pipeline.seconds) for row in rows]
    quicker = [link for link, fsdp, pipe in told if pipe is not None and (fsdp is None or pipe < fsdp)]
    slower = [link for link, fsdp, pipe in told if fsdp is not None and (pipe is None or fsdp < pipe)]
    if not quicker or not slower:
        return f"{'Stages are' if quicker else 'FSDP is'} the quicker on all of these links."
    return f"FSDP is the quicker down to {min(slower):g} GB/s, stages are from {max(quicker):g} GB/s down."


def markdown(rows: list[Row], what: str, spent: float) -> str:
    lines = [
        "# Pipeline stages over slow links",
        "",
        f"{what}, {date.today()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, no GPU; "
        f"{spent:.0f} CPU seconds. Everything is simulated.",
        "",
        crossing(rows),
        "",
        f"| GB/s between nodes, each GPU (Gb/s a node) | FSDP on {FLAT} | searched without stages on {GRID} "
        f"| stages on {STAGES} | FSDP / stages |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        fsdp, pipe = row.fsdp.seconds, row.pipeline.seconds
        ratio = "-" if fsdp is None or pipe is None else f"{fsdp / pipe:.2f}"
        link = f"{row.link:g} ({8 * 8 * row.link:g})"
        lines.append(f"| {link} | {row.fsdp} | {row.without_stages or '-'} | {row.pipeline} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=float, nargs="+", default=LINKS, help="GB/s of each GPU between nodes")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--batch", type=int, default=256, help="sequences of 4,096 tokens, in all")
    parser.add_argument("--micro-batches", type=int, default=MICRO_BATCHES, help="of the pipeline")
    parser.add_argument("--searched", action="store_true", help="the search's own plan without stages, too")
    parser.add_argument("--hardware", default="h100-sxm")
    parser.add_argument("-o", type=Path)
    given = parser.parse_args()
    progress = progress_from_now()
    graph = llama(given.layers, given.batch)
    progress(f"traced {len(graph.nodes):,} operators")
    known = Hardware.load(given.hardware)
    pipeline = in_stages(graph, with_links(known, max(given.links)), given.micro_batches, progress)
    rows: list[Row] = []
    for link in given.links:
        hardware = with_links(known, link)
        searched = without_stages(graph, hardware, progress) if given.searched else None
        rows.append(Row(link, by_hand(graph, hardware, progress), searched, priced_again(pipeline, hardware)))
        progress(f"{rows[-1]}")
    command = "`python -m benchmarks.slow_links`"
    what = f"{command}: {given.layers} layers of Llama-70B's width, {given.batch} x 4,096 tokens in all, bfloat16"
    text = markdown(rows, f"{what}; stages in {given.micro_batches} micro-batches", time.process_time())
    print(text, end="")
    if given.o is not None:
        write_whole(given.o, text)


if __name__ == "__main__":
    main()
