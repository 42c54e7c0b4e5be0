"""trace: a model and example inputs become a `Graph`. The only stage before emit that needs torch."""

from collections.abc import Sequence
from typing import Any

from autopar.ir.graph import Graph
from autopar.ir.outside import Rules
from autopar.trace.alignment import aligned
from autopar.trace.calls import flatten_inputs
from autopar.trace.capture import Captured
from autopar.trace.local_norm import local_statistics
from autopar.trace.lower import lower
from autopar.trace.normalise import normalise
from autopar.trace.outputs import memory_of
from autopar.trace.precision import casts_in_place, reduce_after_cast
from autopar.trace.sharing import in_memory_of_its_own
from autopar.trace.traces import capture
from autopar.trace.written import kept_as_it_was

__all__ = ["Captured", "capture", "flatten_inputs", "graph_of", "lower", "normalise", "reduce_after_cast"]


def graph_of(captured: Captured, precision: Any = None, *, parts: int = 1, rules: Sequence[Rules] = ()) -> Graph:
    """The plain graph that is planned: lowered, normalised, with casts in their place, with gradients summed where
    `precision` wants it, and on GPUs with products aligned. `parts`: batch norms take the statistics of each of so many
    equal parts of the batch. `rules`: of users' packages, with which it is planned.

    Raises TraceError where the batch has no such parts.
    """
    graph = local_statistics(normalise(lower(captured)), parts, captured.synced)
    graph = in_memory_of_its_own(graph, dict(memory_of(captured.out_spec).groups))
    if precision is not None:
        graph = casts_in_place(graph)
        if precision.reduce_dtype is not None:
            graph = reduce_after_cast(graph)
    if captured.device_type == "cuda":
        graph = aligned(graph)
    return kept_as_it_was(graph).under(rules)
