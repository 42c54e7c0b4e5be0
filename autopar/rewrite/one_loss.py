"""Whether a training step can run backward before its caller does, as it has to in micro-batches and in stages."""

from __future__ import annotations

from autopar.ir.graph import Graph

WITHOUT_ROUNDS, WITHOUT_PIPE = "leave micro_batches= out", "a mesh without `pipe`"


def why_not_played(graph: Graph, count: int, instead: str = WITHOUT_ROUNDS) -> str | None:
    """Why backward of a step in so many micro-batches cannot begin with a gradient of 1 for the loss, which is
    multiplied by the caller's when that arrives; None where it can, or where there is no backward. `instead`: what else
    the user may do.
    """
    tangents = [node for node in graph.nodes if node.op == "tangent"]
    if not tangents:
        return None
    if len(tangents) == 1 and tangents[0].outputs[0] is not None and not tangents[0].outputs[0].shape:
        return None
    told = ", ".join(f"output {node.target} ({node.outputs[0]})" for node in tangents)
    how = "in micro-batches" if instead == WITHOUT_ROUNDS else "in pipeline stages"
    how = f"{how} ({count})" if count > 1 else how
    return (
        f"a step {how} runs backward by itself, from one loss that forward returns; backward of this model begins at "
        f"{told}: return the loss from forward, under the name `loss` (a key, or a field) where there are several "
        f"scalars, or the others with .detach(); or {instead}"
    )
