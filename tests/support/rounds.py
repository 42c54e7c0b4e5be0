"""All rounds of a step in micro-batches, one behind the other, and what they give together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.emit.run_all_ranks import Ran
from autopar.ir.rounds import SUM
from autopar.plan import Plan
from tests.support.lockstep import run_all


def run_rounds(plan: Plan, values: Mapping[str, Tensor], seed: int = 0) -> Ran:
    """`values`: of the whole step, by node name."""
    graph = plan.graph
    rounds = graph.rounds
    found: list[Ran] = []
    for number in range(rounds.count):
        own = {
            name: value.chunk(rounds.count, rounds.cut[name])[number].clone() if name in rounds.cut else value.clone()
            for name, value in values.items()
        }
        ran, _ = run_all(plan, own, seed)
        found.append(ran)
    joined: dict[tuple[str, str], Tensor | None] = {}
    for result, join in zip(graph.results, rounds.joined, strict=True):
        parts = [ran.results[result.kind, result.target] for ran in found]
        if parts[0] is None:
            joined[result.kind, result.target] = None
        elif join == SUM:
            joined[result.kind, result.target] = torch.stack([one for one in parts if one is not None]).sum(0)
        elif isinstance(join, int):
            joined[result.kind, result.target] = torch.cat([one for one in parts if one is not None], join)
        else:
            joined[result.kind, result.target] = parts[-1]
    return Ran(joined)
