"""The models of tests/support/families.py, traced again with larger inputs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from autopar.ir.graph import Graph
from autopar.scale import Growth, growth_of, usual_sources
from autopar.trace import capture, graph_of
from tests.support.families import family

TEXTS = ("block", "gpt2", "llama", "opt", "bert", "t5")  # have a sequence


def sources_of(name: str, graph: Graph) -> dict[str, Any]:
    found = usual_sources(graph)
    return {**found, "sequence": (("['x']", 1), ("['labels']", 1))} if name == "block" else found


@cache
def growth(name: str) -> Growth:
    graph = family(name).graph
    return growth_of(graph, sources_of(name, graph))


@cache
def retraced(name: str, which: str, times: int) -> Graph:
    """What the model traces to where one of its sizes is `times` as large."""
    case = family(name)
    at = {(target, dim) for target, dim in growth(name).sources[which]}
    larger: dict[str, torch.Tensor] = {}
    for key, value in case.inputs.items():
        shape = [n * times if (f"['{key}']", dim) in at else n for dim, n in enumerate(value.shape)]
        larger[key] = torch.empty(shape).to(value.dtype).requires_grad_(value.requires_grad)  # only shapes count
    return graph_of(capture(case.model, (), larger))
