"""Regions: values that may be recomputed from one another. What leaves a region is saved, or offloaded.

A chain of recomputed values needs all of them at once, from where the first is wanted; so it must end somewhere. It
ends where people put checkpoints: at the borders of repeated layers. What lies outside them, or a model without layers,
is cut into about as many regions as the square root of its products (Chen et al. 2016, section 4.1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import isqrt

from autopar.ir.graph import Graph, Node
from autopar.ir.work import flops_of
from autopar.propose.repeated_blocks import block_of, blocks_of
from autopar.propose.strategies import operand_types
from cost_models.steps import MATRIX_KINDS

Region = tuple[str, int]  # the layer (a module's path; "" outside all of them), and the stretch of it


def regions(graph: Graph) -> dict[str, Region]:
    """Forward operator -> its region."""
    nodes = [node for node in graph.nodes if node.phase == "forward" and not node.is_source]
    blocks = blocks_of(graph)
    of_layer: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        of_layer[block_of(node.module, blocks)].append(node)
    found: dict[str, Region] = {}
    for layer, members in of_layer.items():
        for number, stretch in enumerate([members] if layer else _stretches(graph, members)):
            found |= {node.name: (layer, number) for node in stretch}
    return found


def _stretches(graph: Graph, nodes: Sequence[Node]) -> list[list[Node]]:
    """Parts of the sequence with about equally many products each."""
    node_of = graph.by_name
    ends = [i for i, node in enumerate(nodes) if flops_of(node, operand_types(node, node_of))[1] in MATRIX_KINDS]
    parts = max(1, isqrt(len(ends)))
    cuts = [0, *(ends[len(ends) * part // parts] for part in range(1, parts)), len(nodes)]
    return [list(nodes[start:end]) for start, end in pairwise(cuts)]
