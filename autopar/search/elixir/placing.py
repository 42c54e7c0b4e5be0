"""Elixir's search for a traced model: what it needs to know is read off the graph, and its answer is a residence.

It checkpoints every layer, so a step runs each layer forward, and in backward forward again and then back. Where a
parameter lives is its answer; the blocks that cache chunks have no counterpart in a program of autopar, where each
phase fetches what lies on the host once and holds it from its first reader to its last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

from autopar.ir.graph import Graph
from autopar.ir.work import VIEWS
from autopar.propose.repeated_blocks import block_of, blocks_of
from autopar.rewrite import RECOMPUTE, SAVE, narrowed, widened
from autopar.search.elixir.chunks import Parameter
from autopar.search.elixir.residence import Training
from autopar.search.elixir.search import DRIVER_BYTES, ElixirPlan, elixir_search

HALVES: Mapping[str, Literal["fp16", "bf16"]] = {"float16": "fp16", "bfloat16": "bf16"}


def placed(graph: Graph, memory: float, *, ranks: int, batch: int, optimizer: str) -> ElixirPlan:
    """What Elixir decides for `memory` bytes of each rank's device, its authors' machine in mind.

    `memory` is what a plan may use, so the 2 GiB that Elixir leaves to the driver are beside it. `batch`: over which
    dim sizes activations are split, if it divides. Raises DoesNotFit.
    """
    parameters, steps = parameters_and_steps(graph)
    blocks, numel_of = blocks_of(graph), {one.name: one.numel for one in parameters}
    layers: dict[str, int] = defaultdict(int)
    for name, numel in numel_of.items():
        layers[block_of(name.rpartition(".")[0], blocks)] += numel
    layers.pop("", None)
    nbytes: dict[str, int] = defaultdict(int)
    for node in graph.nodes:
        if node.op == "parameter" and (type := node.outputs[0]) is not None:
            nbytes[type.dtype] += type.nbytes
    return elixir_search(
        parameters,
        steps,
        capacity_bytes=memory + DRIVER_BYTES,
        activation_bytes=activation_bytes(graph) / (ranks if batch % ranks == 0 else 1),
        buffer_bytes=sum(type.nbytes for node in graph.nodes if node.op == "buffer" for type in node.outputs if type),
        ranks=ranks,
        training=Training(
            HALVES.get(max(nbytes, key=lambda dtype: nbytes[dtype], default=""), "fp32"),
            "adam" if optimizer.startswith("adam") else "sgd",
        ),
        checkpoint_elements=max(layers.values(), default=0),
    )


def parameters_and_steps(graph: Graph) -> tuple[list[Parameter], list[tuple[str, ...]]]:
    """Parameters in the order of first use, modules as they run, those of one module by name; and what each step uses:
    forward, then backward layer by layer, each forward once more and back. A tied one is used by several modules.
    """
    weights = _weights(graph)
    users: dict[str, dict[str, None]] = defaultdict(dict)  # parameter -> modules that use it
    runs: dict[str, None] = {}  # owners, as they run
    for node in graph.nodes:
        if node.phase == "forward" and node.name not in weights:
            for name in (name for ref in node.operands for name in weights.get(ref.name, ())):
                users[name][node.module] = None
                runs[name.rpartition(".")[0]] = None
    held: dict[str, list[str]] = defaultdict(list)
    numel_of: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "parameter" and (type := node.outputs[0]) is not None:
            held[node.target.rpartition(".")[0]].append(node.target)
            numel_of[node.target] = type.numel
    order = [name for owner in dict.fromkeys((*runs, *held)) for name in sorted(held[owner])]
    parameters = [Parameter(name, numel_of[name], tied=len(users[name]) > 1) for name in order]
    tied = {one.name for one in parameters if one.tied}
    modules = {owner: tuple(name for name in sorted(held[owner]) if name not in tied) for owner in runs}
    modules = {owner: names for owner, names in modules.items() if names}
    blocks = blocks_of(graph)
    steps = [*modules.values()]
    layers = [(layer, list(owners)) for layer, owners in groupby(modules, lambda owner: block_of(owner, blocks))]
    for layer, owners in reversed(layers):
        steps += [modules[owner] for owner in (*(owners if layer else ()), *reversed(owners))]
    return parameters, steps


def activation_bytes(graph: Graph) -> int:
    """The most bytes of anything but parameters, what is made of them alone, their gradients and buffers, where every
    layer is checkpointed.
    """
    again = widened(graph, offload=False).again.values()
    runs = narrowed(graph, {one.origin: RECOMPUTE if RECOMPUTE in one.modes else SAVE for one in again})
    weights = _weights(runs)
    left_out = {result.ref.name for result in runs.results if result.kind == "gradient" and result.ref is not None}
    left_out |= weights.keys() | {node.name for node in runs.nodes if node.op in ("buffer", "constant")}
    ends: dict[str, int] = {}
    below: dict[str, Sequence[str]] = {}
    for at, node in enumerate(runs.nodes):
        storages = [name for ref in node.operands for name in below[ref.name]]
        below[node.name] = storages if node.op in VIEWS else [node.name]
        ends |= dict.fromkeys((*storages, *below[node.name]), at)
    ends |= dict.fromkeys((s for r in runs.results if r.ref is not None for s in below[r.ref.name]), len(runs.nodes))
    change = [0] * (len(runs.nodes) + 2)
    for at, node in enumerate(runs.nodes):
        if node.op not in VIEWS and node.name not in left_out:
            nbytes = sum(type.nbytes for type in node.outputs if type is not None)
            change[at] += nbytes
            change[ends[node.name] + 1] -= nbytes
    now = most = 0
    for more in change:
        now += more
        most = max(most, now)
    return most


def _weights(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Node -> the parameters of which alone it is made."""
    found: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        if node.op == "parameter":
            found[node.name] = (node.target,)
        elif node.operands and all(ref.name in found for ref in node.operands):
            found[node.name] = tuple(dict.fromkeys(name for ref in node.operands for name in found[ref.name]))
    return found
