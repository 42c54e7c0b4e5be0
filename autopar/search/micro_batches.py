"""In how many micro-batches a step runs, where the search decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autopar.errors import Infeasible, NoAnswerInTime, NotCut
from autopar.ir.graph import Graph, batch_size
from autopar.plan import Plan
from autopar.search.problems import Stop, never

AUTO = "auto"
GUESSED = "guessed"  # a fact of a search: micro-batches that nobody asked for, of a step that nobody takes
P = TypeVar("P")


def counts_of(graph: Graph) -> list[int]:
    """1, 2, 4 and so on, as far as they divide the batch."""
    batch, found = batch_size(graph), [1]
    while batch and batch % (2 * found[-1]) == 0:
        found.append(2 * found[-1])
    return found


def counts_in_stages(graph: Graph, stages: int) -> list[int]:
    """1, 2, 4 and 8 times as many as pipeline stages, as far as they divide the batch: the bubble shrinks with them."""
    batch = batch_size(graph)
    return [times * stages for times in (1, 2, 4, 8) if batch and batch % (times * stages) == 0]


def best_plan(graph: Graph, find: Callable[[int], Plan]) -> Plan:
    """`best_count`, of plans."""
    return best_count(graph, find, lambda plan: plan.predicted_seconds)


def best_count(graph: Graph, find: Callable[[int], P], seconds: Callable[[P], float], stop: Stop = never) -> P:
    """The answer of the number of micro-batches that is the quickest, from one on, as long as twice as many are quicker
    than half of them, or nothing fits yet. `find`: count -> answer, which takes `seconds` a step. Raises what the last
    one tried without any answer did.

    More of them need less memory, and so less is recomputed, offloaded or split; each is smaller work, and pays again
    for what is fetched and summed.
    """
    best: P | None = None
    why: Exception | None = None
    for count in counts_of(graph):
        if best is not None and stop():
            break
        try:
            found = find(count)
        except (Infeasible, NoAnswerInTime) as error:
            why = error
            if best is not None:
                break
            continue
        except NotCut:
            break
        if best is not None and seconds(found) >= seconds(best):
            break
        best = found
    if best is None:
        assert why is not None
        raise why
    return best


def count_near(graph: Graph, wanted: int) -> int:
    """Micro-batches of a step of this batch, where so many are wanted: as many, or as few more as divide it."""
    batch = batch_size(graph)
    return next((count for count in range(wanted, batch + 1) if batch % count == 0), 1)
