"""In which pipeline stage each backward operator runs, so that the least bytes come back across the cuts.

It is a small integer program: a gradient goes back, so who reads one is in no later stage than who makes it, and each
cut on the way costs its bytes. Most operators have one stage left once that is known of those beside them; the solver
has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.errors import NotCut
from autopar.ir.graph import Node, Ref
from solver import Edge, Problem, solve

Crossing = Callable[[Ref], NDArray[np.float64]]  # [stage that makes it, stage that reads it] -> bytes, inf for never
NO_ORDER = "no order of stages lets gradients only go back across these cuts; cut the model elsewhere"


def least_crossing(
    nodes: Sequence[Node], allowed: Mapping[str, set[int]], count: int, crossing: Crossing
) -> dict[str, int]:
    """Node -> its stage, one of those `allowed` of `count`. `nodes`: in order. Raises NotCut where there is none for
    all of them.
    """
    read = {node.name: [ref for ref in dict.fromkeys(node.operands) if ref.name in allowed] for node in nodes}
    left = {name: {*stages} for name, stages in allowed.items()}
    for node in nodes:
        for ref in read[node.name]:
            last = max(left[ref.name], default=-1)
            left[node.name] = {stage for stage in left[node.name] if stage <= last}
    for node in reversed(nodes):
        first = min(left[node.name], default=0)
        for ref in read[node.name]:
            left[ref.name] = {stage for stage in left[ref.name] if stage >= first}
    if not all(left.values()):
        raise NotCut(NO_ORDER)
    settled = {name: min(stages) for name, stages in left.items() if len(stages) == 1}
    opened = [node for node in nodes if node.name not in settled]
    at = {node.name: place for place, node in enumerate(opened)}
    costs = [np.where([stage in left[node.name] for stage in range(count)], 0.0, np.inf) for node in opened]
    edges: list[Edge] = []
    for node in nodes:
        for ref in read[node.name]:
            match settled.get(ref.name), settled.get(node.name):
                case None, None:
                    edges.append(Edge(at[ref.name], at[node.name], crossing(ref)))
                case None, int(reads):
                    costs[at[ref.name]] += crossing(ref)[:, reads]
                case int(made), None:
                    costs[at[node.name]] += crossing(ref)[made]
                case int(made), int(reads):
                    if not np.isfinite(crossing(ref)[made, reads]):
                        raise NotCut(NO_ORDER)
    if not opened:
        return settled
    solution = solve(Problem(tuple(costs), tuple(edges), names=tuple(node.name for node in opened)))
    if solution.picks is None:
        raise NotCut(NO_ORDER)
    return settled | {node.name: pick for node, pick in zip(opened, solution.picks, strict=True)}
