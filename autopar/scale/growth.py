"""How a graph grows: for each dim of each value the sizes that it is made of, and where those come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import Graph, Ref, TensorType, batch_size
from autopar.rules.notation import Rule
from autopar.scale.sizes import Size, value_of

BATCH, SEQUENCE = "batch", "sequence"


class CannotGrow(ValueError):
    """A graph does not say how it would be at other sizes; `names` are the sizes that cannot grow."""

    def __init__(self, message: str, names: set[str]) -> None:
        super().__init__(message)
        self.names = names


@dataclass(frozen=True)
class Growth:
    """How the graph grows.

    `base`: the present values of what grows. `dims`: the size of every dim of every value. `factors`: node -> factor of
    its rule -> size. `sources`: name -> the dims of inputs that were given this name. `assumed`: dims of which an
    operator's arguments, and nothing else, tell the size, and what they are taken for.
    """

    graph: Graph
    base: Mapping[str, int]
    dims: Mapping[Ref, tuple[Size, ...]]
    factors: Mapping[str, Mapping[str, Size]]
    rules: Mapping[str, Rule]
    sources: Mapping[str, tuple[tuple[str, int], ...]]
    assumed: tuple[tuple[Ref, int, Size], ...]

    def type_at(self, ref: Ref, values: Mapping[str, Any]) -> TensorType:
        return TensorType(tuple(value_of(size, values) for size in self.dims[ref]), self.graph.type_of(ref).dtype)


Sources = Mapping[str, Sequence[tuple[str, int]]]  # name -> (target of an input, dim)


def usual_sources(graph: Graph) -> dict[str, tuple[tuple[str, int], ...]]:
    """Batch: the leading dim of the inputs that have the most frequent leading size. Sequence: dim 1 of the integer
    inputs among them, if there it is of one size.
    """
    inputs = [(node.target, node.outputs[0]) for node in graph.nodes if node.op == "input"]
    batch = batch_size(graph)
    rows = [(name, type) for name, type in inputs if type is not None and type.shape and type.shape[0] == batch]
    found = {BATCH: tuple((name, 0) for name, _ in rows)} if rows else {}
    texts = [(name, type.shape[1]) for name, type in rows if "int" in type.dtype and len(type.shape) > 1]
    if texts and len({length for _, length in texts}) == 1:
        found[SEQUENCE] = tuple((name, 1) for name, _ in texts)
    return found
