"""The graph that was traced can be had of every graph that runs, whatever was decided."""

from __future__ import annotations

import random

import pytest

from autopar.ir.graph import Graph
from autopar.ir.work import FETCH, STORE
from autopar.rewrite import DROP, gathered_once, kept_whole, narrowed, plain, widened
from tests.support.families import FAMILIES, family

QUICK = ("mlp", "block", "cnn", "gpt2")  # to be traced


def decided(graph: Graph, draw: random.Random) -> Graph:
    """With what backward reads saved, run again or offloaded, and parameters on the host, as they are drawn."""
    again = widened(graph).again.values()
    modes = {one.origin: draw.choice(found) for one in again if (found := [m for m in one.modes if m != DROP])}
    hosted = [node.target for node in graph.nodes if node.op == "parameter" and draw.random() < 0.5]
    return narrowed(graph, modes, hosted)


@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES]
)
def test_whatever_was_decided_the_traced_graph_is_given_back(name: str) -> None:
    graph, draw = family(name).graph, random.Random(name)
    seen: set[str] = set()
    for made in (graph, gathered_once(graph), kept_whole(graph)):
        for _ in range(3):
            runs = decided(made, draw)
            seen |= {node.op for node in runs.nodes if node.op in (STORE, FETCH)}
            seen |= {"again" for node in runs.nodes if node.target and not node.is_source}
            assert plain(runs).digest == graph.digest
        assert plain(made).digest == graph.digest
    assert seen == {STORE, FETCH, "again"}
    assert plain(graph) is graph
