"""Whether each pattern pays: searches of random models with all patterns, without each, and policies, all simulated.

    python -m benchmarks.patterns --models 20              its table stands in docs/benchmarks/patterns.md

Patterns (rings, SUMMA, context parallelism) are more options for the same problem, so no search should find a slower
plan with one than without. The plan is chosen by simulated time among candidates, which no theorem covers: so here it
is counted. Models are two layers of Llama or GPT-2 of random sizes, in bfloat16, on 4 to 16 simulated H100.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import transformers

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.rules.patterns import is_pattern
from autopar.search import Question, Request, answer, ask
from autopar.search.overlap_loop import best_prefetch
from autopar.search.policy_axis import everywhere
from autopar.trace import capture, graph_of
from cost_models.hardware import Hardware

POLICIES = ("data-parallel", "fsdp", "zero2")
MESHES = ((4,), (8,), (2, 4), (4, 4), (2, 2, 2))
SAME = 1e-6  # relative
VOCABULARY = 1024


@dataclass(frozen=True)
class Shape:
    """Of a model, its batch and its mesh."""

    family: str
    heads: int
    kv_heads: int
    width: int
    hidden: int
    sequence: int
    batch: int
    mesh: tuple[int, ...]


def shapes(count: int, seed: int = 0) -> list[Shape]:
    """So many, no two alike."""
    drawn, found = random.Random(seed), dict[Shape, None]()
    while len(found) < count:
        heads = drawn.choice([4, 8, 16])
        width = heads * drawn.choice([32, 64, 128])
        llama = drawn.random() < 0.7
        found[Shape(
            "Llama" if llama else "GPT-2", heads, drawn.choice([heads, heads // 4]) if llama else heads, width,
            width * (drawn.choice([2, 4]) if llama else 4), drawn.choice([128, 1024, 8192]),
            drawn.choice([1, 2, 8, 16]), drawn.choice(MESHES),
        )] = None  # fmt: skip
    return list(found)


def graph(shape: Shape) -> Graph:
    with torch.device("meta"):
        if shape.family == "Llama":
            model: torch.nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=shape.width, intermediate_size=shape.hidden, num_hidden_layers=2,
                num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, use_cache=False,
                max_position_embeddings=shape.sequence,
            ))  # fmt: skip
        else:
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
                vocab_size=VOCABULARY, n_embd=shape.width, n_layer=2, n_head=shape.heads, n_positions=shape.sequence,
                use_cache=False, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            ))  # fmt: skip
        ids = torch.empty(shape.batch, shape.sequence, dtype=torch.int64)
        return graph_of(capture(model.bfloat16(), (), {"input_ids": ids, "labels": ids}))


def compared(shape: Shape, hardware: Hardware) -> tuple[float, dict[str, float]]:
    """Simulated seconds of the searched plan; and what was left out, or the policy -> seconds of that plan."""
    made, mesh = graph(shape), Mesh(tuple("abc"[: len(shape.mesh)]), shape.mesh)

    def question(left_out: Collection[str] = ()) -> Question:
        asked = ask(made, mesh, hardware)
        return replace(asked, strategies=everywhere(asked.strategies, lambda one: one.body not in left_out))

    asked = question()
    bodies = sorted({one.body for options in asked.strategies.values() for one in options if is_pattern(one.body)})
    others: dict[str, float] = {}
    for left_out in ([one] for one in bodies):
        others[f"without {left_out[0]}"] = answer(question(left_out), Request(simulation=True)).predicted_seconds
    others["without all"] = answer(question(bodies), Request(simulation=True)).predicted_seconds
    for policy in POLICIES:
        others[policy] = best_prefetch(answer(asked, Request(policy=policy)), asked.pricer, None).seconds
    return answer(asked, Request(simulation=True)).predicted_seconds, others


def rows(chosen: list[Shape], hardware: Hardware) -> Iterator[str]:
    yield "| model | mesh | step ms | without any pattern | quickest of all others | searched / that |"
    yield "|---|---|--:|--:|---|--:|"
    for shape in chosen:
        begun = time.process_time()
        seconds, others = compared(shape, hardware)
        best = min(others, key=lambda name: others[name])
        model = (
            f"{shape.family}, {shape.heads}/{shape.kv_heads} heads, {shape.width}/{shape.hidden} wide, "
            f"{shape.batch} x {shape.sequence:,}"
        )
        mesh = "x".join(map(str, shape.mesh))
        yield (
            f"| {model} | {mesh} | {seconds * 1e3:.3f} | {others['without all'] * 1e3:.3f} | {best} "
            f"{others[best] * 1e3:.3f} | {seconds / others[best]:.4f}{' !' if is_slower(seconds, others) else ''} |"
        )
        print(f"{model} on {mesh}: {time.process_time() - begun:.0f} CPU seconds", file=sys.stderr, flush=True)


def is_slower(seconds: float, others: Mapping[str, float]) -> bool:
    return seconds > min(others.values()) * (1 + SAME)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.patterns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=20, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--hardware", default="h100-sxm", metavar="NAME")
    given = parser.parse_args()
    for line in rows(shapes(given.models), Hardware.load(given.hardware)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
