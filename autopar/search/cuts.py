"""Where a model is cut into pipeline stages: the places where little crosses, and the best of them by
`solver.cut_pipeline`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.decide.stages import in_stages
from autopar.ir.graph import Graph, Ref
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.rewrite.micro_batches import NotCut
from autopar.rewrite.stages import Stage, forward_order, parameters_read
from solver import PipelineProblem, Value, additive_stages, chain_cuts, cut_pipeline

Array = NDArray[np.float64]
Send = Callable[[float], float]  # bytes -> seconds from one stage to the next
NARROW = 1.5  # a cut may let so many times the bytes cross that the median narrow place does


def best_cut(whole: Plan, count: int, pricer: Pricer, send: Send) -> tuple[list[int], tuple[tuple[Stage, Plan], ...]]:
    """(ends, stages with their plans) of the best cut that is legal. Raises NotCut where there is none."""
    graph = whole.graph
    order = forward_order(graph)
    if count == 1:
        return [], in_stages(whole, [], pricer)
    crossing = _crossing(graph)
    spent = _seconds(whole, pricer)
    closed: set[int] = set()
    why: NotCut | None = None
    for _ in range(len(order)):
        places = [one for one in _narrow(crossing, count) if one not in closed]
        if len(places) < count - 1:
            break
        ends = _cut(places, spent, crossing, count, graph.rounds.count, send)
        try:
            return ends, in_stages(whole, ends, pricer)
        except NotCut as error:
            why = error
        bad = [end for end in ends if not _is_legal(whole, end, pricer)]
        closed.update(bad or ends[:1])
    raise NotCut(
        f"the model has no {count - 1} places where it can be cut into {count} stages"
        + (f"; the last one tried: {why}" if why else "; it has too few layers one behind the other")
    )


def _is_legal(whole: Plan, end: int, pricer: Pricer) -> bool:
    try:
        in_stages(whole, [end], pricer)
    except NotCut:
        return False
    return True


def _crossing(graph: Graph) -> list[float]:
    """Bytes that cross behind each forward operator but the last."""
    order = forward_order(graph)
    names = {node.name for node in order}
    readers = defaultdict[Ref, list[str]](list)
    for node in order:
        for ref in dict.fromkeys(node.operands):
            if ref.name in names:
                readers[ref].append(node.name)
    values = [Value(ref.name, tuple(who), graph.type_of(ref).nbytes) for ref, who in readers.items()]
    return chain_cuts([node.name for node in order], values).tolist()


def _narrow(crossing: Sequence[float], count: int) -> list[int]:
    """Ends of stages behind which little crosses, at least `count` of them where there are so many."""
    local = [
        at + 1
        for at, nbytes in enumerate(crossing)
        if nbytes
        and (at == 0 or nbytes <= crossing[at - 1])
        and (at + 1 == len(crossing) or nbytes <= crossing[at + 1])
    ]
    if not local:
        return []
    middle = sorted(crossing[end - 1] for end in local)[len(local) // 2]
    most = NARROW * middle
    found = [end for end in local if crossing[end - 1] <= most]
    return found if len(found) >= count else local


def _seconds(whole: Plan, pricer: Pricer) -> Array:
    """Of each forward operator for one micro-batch, with its part of backward, which is spread alike."""
    spent: dict[str, float] = {}
    total = {"forward": 0.0, "backward": 0.0}
    for node in whole.graph.nodes:
        choice = whole.choices[node.name]
        steps = [
            *choice.steps,
            *(step for read in choice.reads for change in read for step in change.steps(whole.mesh.size(change.axis))),
        ]
        spent[node.name] = pricer.seconds(steps) / whole.graph.rounds.count
        total[node.phase] += spent[node.name]
    order = forward_order(whole.graph)
    placed = sum(spent[node.name] for node in order)
    share = (total["forward"] + total["backward"]) / placed if placed else 1.0
    return np.array([spent[node.name] * share for node in order])


def _cut(
    places: Sequence[int], spent: Array, crossing: Sequence[float], count: int, micro_batches: int, send: Send
) -> list[int]:
    bounds = [0, *places, len(spent)]
    layers = np.array([spent[first:last].sum() for first, last in itertools.pairwise(bounds)])
    nothing = np.zeros((len(layers), 1, 1))
    table = additive_stages(layers[:, None, None], nothing, nothing)
    sent = np.array([2 * send(crossing[end - 1]) for end in places])
    problem = PipelineProblem(table, (1,), count, micro_batches, sent, use_all=True)
    solution = cut_pipeline(problem)
    assert solution.cut is not None, solution.explanation
    return [bounds[stage.last + 1] for stage in solution.cut[:-1]]


def cut_by_owner(
    whole: Plan, owners: Mapping[str, Sequence[int]], count: int, pricer: Pricer
) -> tuple[list[int], tuple[tuple[Stage, Plan], ...]]:
    """As `best_cut`, so that each stage reads the parameters that it holds already (`owners`: parameter -> stages) and
    as little crosses as can. Raises NotCut where the order of the model lets no cut do so.
    """
    order, crossing = forward_order(whole.graph), _crossing(whole.graph)
    held = parameters_read(whole.graph)
    at, first, last = 0, [len(order)] * count, [-1] * count
    for place, node in enumerate(order):
        for name in held.get(node.name, ()):
            at = next((stage for stage in owners[name] if stage >= at), -1)
            if at < 0:
                raise NotCut(f"{node.source or node.name}: {name} is read here, and an earlier stage holds it")
            first[at], last[at] = min(first[at], place), place
    ends: list[int] = []
    for cut in range(count - 1):
        low = max([*(last[: cut + 1]), *(end - 1 for end in ends)]) + 1
        high = min([*first[cut + 1 :], len(order) - (count - 1 - cut)])
        legal = sorted(range(max(low, 1), high + 1), key=lambda end: crossing[end - 1])
        found = next((end for end in legal if end not in ends and _is_legal(whole, end, pricer)), None)
        if found is None:
            raise NotCut(
                f"the model has no place for the cut between stages {cut} and {cut + 1}, which hold its weights"
            )
        ends.append(found)
    return ends, in_stages(whole, ends, pricer)
