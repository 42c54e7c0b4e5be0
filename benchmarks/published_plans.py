"""Pipelines that people published, beside what the search finds on the same machine. All simulated.

    python -m benchmarks.published_plans -o docs/benchmarks/published_plans.md

A row is a model, a machine, and the plan that a paper ran there: how many stages, ranks that split the batch and ranks
that split weights, micro-batches, schedule. That plan is made as a policy (tensor parallel, data parallel, an even cut;
layers run again where it does not fit otherwise) and priced as any other. Beside it stands the search's own, on the
same mesh and in as many micro-batches.
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
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.errors import Infeasible, NoAnswerInTime
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.rewrite.micro_batches import in_rounds
from autopar.search import Question, Request, answer, ask
from autopar.search.context import Progress
from autopar.search.less_memory import SAVING_NOTHING
from autopar.search.orders import PIPE, within_stage
from autopar.search.pipelines import pipeline_of
from autopar.search.stage_policies import compare_staged
from autopar.trace import capture, graph_of
from benchmarks.beside import memory_on, progress_from_now, seconds_by_hand
from cost_models.hardware import Hardware
from cost_models.whole_file import write_whole

VOCABULARY = 51200
HALF = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
SC21, ALPA = "Megatron-LM, SC'21", "Alpa, OSDI 2022"
SAME = 1e-6  # relative


@dataclass(frozen=True)
class Published:
    """A plan that was published. `batch`: sequences of a step, in `micro_batches`; `order`: stages on each rank, and
    their schedule.
    """

    name: str
    paper: str
    hardware: str
    layers: int
    width: int
    heads: int
    sequence: int
    batch: int
    mesh: Mesh
    micro_batches: int
    order: tuple[int, str] = (1, "1f1b")


def _megatron(
    name: str, layers: int, width: int, heads: int, sizes: tuple[int, int, int], batch: int, count: int, chunks: int = 1
) -> Published:
    order = (chunks, "1f1b" if chunks == 1 else "interleaved")
    mesh = Mesh((PIPE, "data", "tensor"), sizes)
    return Published(name, SC21, "a100-80gb", layers, width, heads, 2048, batch, mesh, count, order)


def _alpa(name: str, layers: int, width: int, heads: int, sizes: tuple[int, int, int], count: int) -> Published:
    mesh = Mesh((PIPE, "data", "tensor"), sizes)
    return Published(name, ALPA, "v100-16gb", layers, width, heads, 1024, 1024, mesh, count)


# Narayanan et al. 2021, table 1 and its scripts; Zheng et al. 2022, what its search found for GPT. Alpa's plan of 2.6B
# has stages of 2, 2 and 4 devices, which no mesh of ours says.
ROWS = (
    _alpa("6.7B", 32, 4096, 32, (2, 2, 4), 64),
    _alpa("15B", 48, 5120, 40, (4, 2, 4), 128),
    _alpa("39B", 48, 8192, 64, (16, 1, 4), 1024),
    _megatron("1.7B", 24, 2304, 24, (1, 32, 1), 512, 1),
    _megatron("3.6B", 30, 3072, 32, (1, 32, 2), 512, 1),
    _megatron("7.5B", 36, 4096, 32, (1, 32, 4), 512, 1),
    _megatron("18.4B", 40, 6144, 48, (1, 32, 8), 1024, 4),
    _megatron("39.1B", 48, 8192, 64, (2, 32, 8), 1536, 12),
    _megatron("76.1B", 60, 10240, 80, (4, 32, 8), 1792, 28, 3),
    _megatron("145.6B", 80, 12288, 96, (8, 24, 8), 2304, 48, 2),
    _megatron("310.1B", 96, 16384, 128, (16, 15, 8), 2160, 144, 2),
    _megatron("529.6B", 105, 20480, 128, (35, 9, 8), 2520, 280, 3),
    _megatron("1008B", 128, 25600, 160, (64, 6, 8), 3072, 512),
)


@dataclass(frozen=True)
class Row:
    """Seconds of a step of the published plan and of ours; None where it has none, which the words say."""

    of: Published
    published: float | None
    published_is: str
    searched: float | None
    searched_is: str
    cpu_s: float

    @property
    def is_quicker(self) -> bool:
        """Whether the search is no slower."""
        if self.searched is None:
            return self.published is None
        return self.published is None or self.searched <= self.published * (1 + SAME)


def gpt(row: Published) -> Graph:
    """A step of its model: float16 over float32 weights, without dropout; it gives the loss alone."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_layer=row.layers, n_embd=row.width, n_head=row.heads, n_positions=row.sequence,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
        ids = torch.empty(row.batch, row.sequence, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids}
    return graph_of(capture(model, (), inputs, precision=HALF, loss_alone=True, device_type="cuda"), HALF)


def without_one(mesh: Mesh) -> Mesh:
    """The mesh without axes of one rank; the first stays."""
    kept = [at for at, size in enumerate(mesh.sizes) if size > 1 or at == 0]
    return Mesh(tuple(mesh.names[at] for at in kept), tuple(mesh.sizes[at] for at in kept))


def compared(of: Published, graph: Graph, progress: Progress) -> Row:
    """The published plan and the search's."""
    began = time.process_time()
    hardware, mesh = Hardware.load(of.hardware), without_one(of.mesh)
    request = Request(memory=memory_on(hardware, mesh))
    if of.mesh.size(PIPE) > 1:
        question = ask(in_rounds_of_stages(graph, of.micro_batches), within_stage(mesh), hardware)
        found = _in_stages(of, question, mesh, request, progress)
    else:
        inner = without_one(within_stage(of.mesh))
        found = _without(ask(in_rounds(graph, of.micro_batches), inner, hardware), request, progress)
    return Row(of, *found, time.process_time() - began)


def _in_stages(
    of: Published, question: Question, mesh: Mesh, request: Request, progress: Progress
) -> tuple[float | None, str, float | None, str]:
    (by_hand,) = compare_staged(question, mesh, request, ["megatron-3d"], order=of.order, progress=progress)
    theirs, their_words = None, by_hand.why
    if by_hand.found is not None:
        theirs, their_words = by_hand.found.step_seconds, by_hand.found.schedule.name + _again(by_hand.again)
    try:
        ours = pipeline_of(question, mesh, request, progress=progress)
    except (Infeasible, NoAnswerInTime) as error:
        return theirs, their_words, None, str(error)
    return theirs, their_words, ours.step_seconds, ours.schedule.name


def _without(question: Question, request: Request, progress: Progress) -> tuple[float | None, str, float | None, str]:
    """The same without stages."""
    theirs, their_words, mesh = None, "does not fit", question.pricer.mesh
    policy = "data-parallel+tensor-parallel" if len(mesh.sizes) > 1 else "data-parallel"
    for again in (False, True):
        try:
            theirs = seconds_by_hand(question, request.memory, policy, SAVING_NOTHING if again else None)
        except (Infeasible, NoAnswerInTime) as error:
            progress(str(error))
            continue
        their_words = policy + _again(again)
        break
    try:
        ours = answer(question, replace(request, simulation=True), progress=progress)
    except (Infeasible, NoAnswerInTime) as error:
        return theirs, their_words, None, str(error)
    return theirs, their_words, ours.predicted_seconds, "no stages"


def _again(again: bool) -> str:
    return ", layers run again" if again else ""


def markdown(rows: list[Row]) -> str:
    slower = [row.of.name for row in rows if not row.is_quicker]
    told = f"slower for {', '.join(slower)}" if slower else "never slower"
    some = "" if len(rows) == len(ROWS) else f" --models {' '.join(row.of.name for row in rows)}"
    lines = [
        "# Published plans beside the search's",
        "",
        f"`python -m benchmarks.published_plans{some}`, {date.today()}, torch {torch.__version__}, "
        f"{platform.machine()}, {os.cpu_count()} cores, no GPU; CPU seconds of both, without tracing. Everything is "
        "simulated, with the profiles' figures.",
        "",
        f"The search's plan is {told} ({len(rows)} rows).",
        "",
        "| model | paper | on | micro-batches | published plan, s a step | searched, s a step | published / searched "
        "| CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "-" if row.published is None or row.searched is None else f"{row.published / row.searched:.2f}"
        theirs = row.published_is if row.published is None else f"{row.published:.2f} ({row.published_is})"
        ours = row.searched_is if row.searched is None else f"{row.searched:.2f} ({row.searched_is})"
        lines.append(
            f"| {row.of.name} | {row.of.paper} | {row.of.mesh}, {row.of.hardware} | {row.of.micro_batches} | {theirs} "
            f"| {ours} | {ratio} | {row.cpu_s:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [row.name for row in ROWS]
    parser.add_argument("--models", nargs="+", default=known, choices=known)
    parser.add_argument("-o", type=Path)
    given = parser.parse_args()
    progress = progress_from_now()
    rows: list[Row] = []
    for of in ROWS:
        if of.name in given.models:
            progress(f"{of.name} on {of.mesh}")
            rows.append(compared(of, gpt(of), progress))
            progress(f"{rows[-1]}")
            if given.o is not None:
                write_whole(given.o, markdown(rows))
    print(markdown(rows), end="")


if __name__ == "__main__":
    main()
