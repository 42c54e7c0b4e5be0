"""OPT-30B on one A100 with 40 GB, its states on the host: how much of the GPU's time is compute, predicted.

    python -m benchmarks.opt_30b -o docs/benchmarks/opt_30b.md
    python -m benchmarks.opt_30b --ranks 1 2 4 8 --batches 8

Elixir's published claim: 84 % of the GPU's efficiency. Its constants are the profile's (`a100_elixir.toml`). The model
is traced on the meta device from its configuration; layers are recomputed, values offloaded and parameters put on the
host as the search decides. Efficiency is the share of the step in which the GPU computes, with copies overlapped
where the program has them so:

    compute     seconds of all kernels of forward, backward and what runs again
    step        the plan simulated (`autopar.simulate.timeline`): one step, at whose end the host updates its parameters
    overlapped  the same steps one behind the other, the host's updates overlapped with the next forward
                (`autopar.simulate.steady_state`), as `autopar.optim.Streamed(..., overlap=True)` makes them
    8 P T / F   what people count for it: P parameters, T tokens, F flops per second, layers run forward twice

A search counts on what waits for its copies, and fills the memory; copies ahead need some. So searches are asked with
less than there is, too (`LEFT`), and of their plans the quickest counts that fits when it is simulated.

The model is in bfloat16, and so are its gradients and states: 8 bytes a parameter on the host, where float32 states and
a master copy make 16 (480 GB, which would fit, too). The host's rate is Elixir's in parameters per second, so its step
takes what it would take in float32.

With `--ranks` each number of GPUs trains so many sequences on each of them. More GPUs hold more of the states, so that
less lies on the host: Elixir claims a speed-up above the number of GPUs. Beside it stands the same training with all
states on GPUs that have as much memory more as the plan takes of the host.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

from autopar.assemble.builder import DEVICE, HOST
from autopar.errors import Infeasible
from autopar.ir.mesh import Mesh
from autopar.measure.twin import traced
from autopar.search import Question, Request, answer, ask
from autopar.search.curve import offloaded_bytes, recomputed
from autopar.search.overlap_loop import Simulated, best_prefetch
from autopar.simulate.steady_state import steady_s
from benchmarks.limits import machine
from cost_models.hardware import Hardware, HostLink
from cost_models.whole_file import write_whole

PROFILE = Path(__file__).with_name("a100_elixir.toml")
SEQUENCE = 2048
BATCHES = (8, 10, 12, 16)  # sequences: 16k to 32k tokens
WANTED = 0.84
LEFT = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)  # of the memory, what a search may use
ALLOW = ("recompute", "offload-activations", "offload-parameters")
LAYERS, WIDTH, HEADS, VOCABULARY = 48, 7168, 56, 50272


class Loss(nn.Module):
    """OPT that returns its loss alone: no logits leave the step."""

    def __init__(self, layers: int) -> None:
        from transformers import OPTConfig, OPTForCausalLM

        super().__init__()
        config = OPTConfig(
            num_hidden_layers=layers, hidden_size=WIDTH, ffn_dim=4 * WIDTH, num_attention_heads=HEADS, dropout=0.0,
            vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, word_embed_proj_dim=WIDTH, use_cache=False,
        )  # fmt: skip
        self.model = OPTForCausalLM(config)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss


@dataclass(frozen=True)
class Row:
    """What was found for so many tokens a step: `compute_s` of its kernels, `counted_s` as people count them,
    `overlapped_s` of a step whose updates on the host are overlapped with the next forward.
    """

    tokens: int
    parameters: int
    simulated: Simulated
    compute_s: float
    counted_s: float
    overlapped_s: float

    @property
    def efficiency(self) -> float:
        return self.compute_s / self.simulated.seconds

    @property
    def overlapped(self) -> float:
        return self.compute_s / self.overlapped_s

    @property
    def with_nothing_hidden(self) -> float:
        return self.compute_s / self.simulated.plan.step_seconds


def asked(batch: int, ranks: int, hardware: Hardware, layers: int = LAYERS) -> Question:
    """So many sequences on each of so many GPUs."""
    with torch.device("meta"):
        model = Loss(layers).to(torch.bfloat16)
        ids = torch.empty(batch * ranks, SEQUENCE, dtype=torch.long)
    return ask(traced(model, (), {"input_ids": ids, "labels": ids}), Mesh(("data",), (ranks,)), hardware)


def found(batch: int, hardware: Hardware, layers: int = LAYERS, ranks: int = 1) -> Row | None:
    """The quickest of the plans that fit when they are simulated, with copies overlapped; None: there is none."""
    memory = float(hardware.tiers[DEVICE].capacity_bytes)
    question = asked(batch, ranks, hardware, layers)
    best: Simulated | None = None
    for left in LEFT:
        try:
            plan = answer(question, Request(memory=left * memory, allow=ALLOW))
        except Infeasible:
            break
        simulated = best_prefetch(plan, question.pricer, memory)
        if simulated.timeline is not None and (best is None or simulated.seconds < best.seconds):
            best = simulated
    if best is None:
        return None
    types = [node.outputs[0] for node in question.graph.nodes if node.op == "parameter"]
    parameters = sum(type.numel for type in types if type is not None)
    counted_s = 8.0 * parameters * batch * SEQUENCE / hardware.rate("bfloat16", "matmul")
    overlapped_s = steady_s(best.plan, replace(question.pricer, bucket_bytes=best.plan.bucket_bytes))
    return Row(batch * SEQUENCE, parameters, best, best.plan.seconds_by["compute"], counted_s, overlapped_s)


def on_gpus(batch: int, hardware: Hardware, layers: int, ranks: int, more: float) -> float:
    """Seconds of a step with all states on the GPUs, which have so many bytes more for them; layers are recomputed as
    the rest of the memory wants it.
    """
    question = asked(batch, ranks, hardware, layers)
    memory = hardware.tiers[DEVICE].capacity_bytes + more
    for _ in range(20):
        try:
            return answer(question, Request(memory=memory, allow=("recompute",), simulation=True)).predicted_seconds
        except Infeasible as error:  # gradients stand beside each other there, which the host takes one by one
            memory = max(1.02 * memory, error.enough or error.at_least or 0.0)
    raise RuntimeError(f"no plan of {ranks} GPUs alone fits in {memory / 1e9:.0f} GB each")


def shared_by(hardware: Hardware, gpus: int) -> Hardware:
    """A node with so many GPUs: each has its part of the host's memory and of the rate of its updates. Links to the
    host are Elixir's for so many: 16.3 n + 8.7 and 15.8 n + 2.3 GB/s together.
    """
    host = hardware.tiers[HOST]
    each = replace(host, capacity_bytes=host.capacity_bytes / gpus, bytes_per_s=host.bytes_per_s / gpus)
    link = HostLink((16.3e9 * gpus + 8.7e9) / gpus, (15.8e9 * gpus + 2.3e9) / gpus)
    return replace(hardware, ranks_per_node=gpus, tiers={**hardware.tiers, HOST: each}, host_link=link)


def scaled(batch: int, ranks: Sequence[int], one_gpu: Hardware, layers: int = LAYERS) -> Iterator[str]:
    """The lines of a table: tokens a second of so many GPUs, against one and against training without the host."""
    yield "| GPUs | step s | overlapped s | tokens/s | speed-up | GPUs alone s | beside it | host GB a GPU |"
    yield "|--:" * 8 + "|"
    first: float | None = None
    for count in ranks:
        hardware = shared_by(one_gpu, count)
        row = found(batch, hardware, layers, count)
        if row is None:
            yield f"| {count} | no plan that fits when it is simulated |" + " |" * 6
            continue
        on_host = row.simulated.plan.peak_bytes.get(HOST, 0)
        alone = on_gpus(batch, hardware, layers, count, on_host)
        tokens_per_s = count * batch * SEQUENCE / row.overlapped_s
        first = first or tokens_per_s / count
        yield (
            f"| {count} | {row.simulated.seconds:.2f} | {row.overlapped_s:.2f} | {tokens_per_s:,.0f} "
            f"| {tokens_per_s / first:.2f} | {alone:.2f} | {alone / row.overlapped_s:.1%} "
            f"| {on_host / 1e9:.0f} |"
        )


def line(batch: int, row: Row | None) -> str:
    if row is None:
        return f"| {batch * SEQUENCE:,} | no plan that fits when it is simulated |" + " |" * 12
    simulated, timeline = row.simulated, row.simulated.timeline
    assert timeline is not None
    exposed = ", ".join(f"{name} {seconds:.3f}" for name, seconds in sorted(timeline.exposed_s.items()) if seconds)
    busy = ", ".join(f"{name} {timeline.busy_s.get(name, 0.0):.2f}" for name in ("h2d", "d2h", "host"))
    plan = simulated.plan
    return (
        f"| {row.tokens:,} | {row.efficiency:.1%} | {row.overlapped:.1%} | {row.with_nothing_hidden:.1%} "
        f"| {simulated.seconds:.2f} | {row.overlapped_s:.2f} | {row.compute_s:.2f} | {row.counted_s:.2f} "
        f"| {exposed} | {busy} | {recomputed(plan)} | {offloaded_bytes(plan) / 1e9:.1f} "
        f"| {simulated.peak_bytes / 1e9:.1f} | {plan.peak_bytes[HOST] / 1e9:.0f} |"
    )


def verdict(rows: Sequence[Row]) -> list[str]:
    """What came of the claim."""

    def said(enough: Sequence[Row]) -> str:
        if not enough:
            return "with none of these numbers of tokens"
        return f"from {min(row.tokens for row in enough):,} tokens a step on"

    waited = [row for row in rows if row.efficiency >= WANTED]
    overlapped = [row for row in rows if row.overlapped >= WANTED]
    return [
        f"- {WANTED:.0%} is reached {said(waited)}; with the host's updates overlapped with the next forward "
        f"{said(overlapped)}. Wanted: with 32,768 at most"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help=f"of {SEQUENCE} tokens each")
    parser.add_argument("-o", type=Path, metavar="FILE", help="write the page there, too")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of GPUs, each with the first of --batches")
    given = parser.parse_args()
    if given.ranks:
        for told in scaled(given.batches[0], given.ranks, Hardware.load(PROFILE)):
            print(told, flush=True)
        return
    lines = [
        "| tokens a step | efficiency | overlapped | nothing overlapped | step s | overlapped s | compute s | 8PT/F s "
        "| GPU waits for (s) | busy (s) | recomputed | offloaded GB | peak GB | host GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    hardware = Hardware.load(PROFILE)
    rows = [(batch, found(batch, hardware)) for batch in given.batches]
    lines += [line(batch, row) for batch, row in rows]
    told = verdict([row for _, row in rows if row is not None])
    print("\n".join([*told, "", *lines]))
    if given.o:
        command = f"python -m benchmarks.opt_30b -o {given.o}"
        text = (
            f"# OPT-30B on one A100 of 40 GB, predicted\n\n`{command}`, {date.today()}, torch {torch.__version__}, "
            f"{machine()}, {os.cpu_count()} cores; profile `benchmarks/{PROFILE.name}` (Elixir's constants). Nothing "
            "was run: the step is simulated. Efficiency: seconds of the GPU's kernels over those of the step, copies "
            "overlapped, the host's step at the end; overlapped: with the host's updates, too, in the next forward "
            "(`Streamed(..., overlap=True)`); then with every copy waited for. 8PT/F: P parameters, T tokens, F "
            "flops/s.\n\n"
        )
        write_whole(given.o, text + "\n".join([*told, "", *lines]) + "\n")


if __name__ == "__main__":
    main()
