"""Over what a batch norm takes its statistics: the whole batch, or each of G equal consecutive parts of it.

"global" is what one process computes. "local" is what DDP computes on G ranks: each rank normalises its part by the
statistics of that part, and running statistics are those of rank 0. The parts are in the graph (`IN_PARTS`), so they
are the same whatever a plan splits. `autopar.trace.local_norm` writes them there.
"""

from __future__ import annotations

from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh

GLOBAL, LOCAL = "global", "local"
STATISTICS = (GLOBAL, LOCAL)

# (x, weight?, bias?, running_mean?, running_var?, momentum, eps, parts) -> y, and [parts, channels] of the mean, of
# 1 / sqrt(variance + eps), and of both running statistics. These are [channels], or [parts, channels] where they come
# from another such norm.
IN_PARTS = "autopar.batch_norm_in_parts"
# (grad, x, weight?, mean, rstd, eps, parts, mask) -> dx, dweight, dbias
IN_PARTS_BACKWARD = "autopar.batch_norm_in_parts_backward"

# The operators that normalise by the statistics of what they are given, if the argument at that place says so.
TRAINING = {"aten._native_batch_norm_legit_functional.default": 5, "aten._native_batch_norm_legit.no_stats": 3}
BACKWARD = "aten.native_batch_norm_backward.default"


def parts_of(statistics: str, mesh: Mesh) -> int:
    """How many parts of the batch have statistics of their own. Raises ValueError for a word that is not known."""
    if statistics not in STATISTICS:
        raise ValueError(f"batch_norm {statistics!r} is not known; choose {' or '.join(STATISTICS)}")
    return mesh.ranks if statistics == LOCAL else 1


def takes_statistics(node: Node) -> bool:
    """Whether it is a norm over all rows that it is given; with a single row (instance norm) it is not over a batch."""
    place = TRAINING.get(node.op)
    out = node.outputs[0]
    return place is not None and bool(node.args[place]) and out is not None and out.shape[0] > 1


def leads_to_outputs(graph: Graph, buffer: str) -> bool:
    """Whether outputs are made of what a buffer holds: not of the running statistics that a norm writes alone."""
    reached = {node.name for node in graph.nodes if node.op == "buffer" and node.target == buffer}
    for node in graph.nodes:
        alone = node.args[3:5] if node.op == IN_PARTS or (node.op in TRAINING and node.args[TRAINING[node.op]]) else ()
        if any(ref.name in reached for ref in node.operands if ref not in alone):
            reached.add(node.name)
    return any(one.kind == "output" and one.ref is not None and one.ref.name in reached for one in graph.results)


def statistics_of(graph: Graph) -> tuple[str, ...]:
    """Which of `STATISTICS` the batch norms of a graph take: none, one, or first LOCAL, then GLOBAL, which are those of
    SyncBatchNorm.
    """
    found = {LOCAL for node in graph.nodes if node.op == IN_PARTS}
    found |= {GLOBAL for node in graph.nodes if takes_statistics(node)}
    return tuple(what for what in (LOCAL, GLOBAL) if what in found)


def told(graph: Graph) -> str:
    """The statistics in words; "" without a batch norm that takes any."""
    match statistics_of(graph):
        case ():
            return ""
        case ("global",):
            return "statistics of the whole batch"
        case ("local",):
            return "statistics of each rank's part of the batch, as DDP"
        case _:
            return "statistics of each rank's part of the batch, as DDP; SyncBatchNorm: of the whole batch"
