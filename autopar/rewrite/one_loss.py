"""Whether a training step can run backward before its caller does, as it has to in micro-batches and in stages."""

from __future__ import annotations

from autopar.ir.graph import Graph

WITHOUT_ROUNDS, WITHOUT_PIPE = "leave micro_batches= out", "a mesh without `pipe`"


def why_not_played(graph: Graph, count: int, instead: str = WITHOUT_ROUNDS) -> str | None:
    """Why backward of a step in so many micro-batches cannot begin with a gradient of 1 for the loss, which is
    multiplied by the caller's when that arrives; None where it can. `instead`: what else the user may do.
    """
    how = "in micro-batches" if instead == WITHOUT_ROUNDS else "in pipeline stages"
    how = f"{how} ({count})" if count > 1 else how
    tangents = [node for node in graph.nodes if node.op == "tangent"]
    if len(tangents) == 1 and tangents[0].outputs[0] is not None and not tangents[0].outputs[0].shape:
        return None
    told = ", ".join(f"output {node.target} ({node.outputs[0]})" for node in tangents) or "none"
    return (
        f"a step {how} runs backward by itself, from one loss that forward returns; backward of this model begins at "
        f"{told}: return the loss from forward, under the name `loss` (a key, or a field) where there are several "
        f"scalars, or the others with .detach(); or {instead}"
    )


def why_not_cut(graph: Graph, count: int, instead: str = WITHOUT_ROUNDS) -> str | None:
    """The same of a step that may have no backward, which then need not begin anywhere; and why a batch cannot be cut
    whatever the model is.
    """
    for node in graph.nodes:
        if node.op == "input" and node.outputs[0] is not None and node.outputs[0].shape[:1] == (0,):
            return f"argument {node.target} has no rows, and {count} micro-batches need one each: leave it out"
    has_backward = any(node.op == "tangent" for node in graph.nodes)
    return why_not_played(graph, count, instead) if has_backward else None
