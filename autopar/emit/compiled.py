"""An emitted function, compiled by inductor at its first call.

Emitted code has operators that inductor knows too little of. It keeps what a collective of torch's reads until that is
waited for; of one of ours it would lend the memory to others meanwhile, and the peer would get what they write. So it
would with what is being copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.emit import moves
from autopar.emit.at_once import at_once
from autopar.emit.sends import arrived, begun, peers

assert moves  # imported for what it registers

C10D, OURS = torch.ops._c10d_functional, torch.ops.autopar
SENDS = {getattr(OURS, send).default: send for send in ("shift", "mirror")}


def compiled(
    function: fx.GraphModule, backend: Any = "inductor", *, one_at_a_time: bool, fullgraph: bool = False
) -> Callable[..., Any]:
    """The function, in which sends and copies are such that nobody writes to what they read.

    `one_at_a_time`: as `emit` has made it; so it stays.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(function.graph, {}))
    for node in graph.find_nodes(op="call_function", target=C10D.all_reduce_.default):
        # What writes in place torch makes functional by itself, of ATen alone. Inductor puts it back in place.
        node.target = C10D.all_reduce.default
    for node in graph.find_nodes(op="call_function", target=OURS.store.default):
        node.target = OURS.store_copied.default
    if one_at_a_time:
        at_once(graph)
    for target in SENDS:
        for node in graph.find_nodes(op="call_function", target=target):
            _send(node)
    graph.lint()
    made = fx.GraphModule(function, graph, class_name=type(function).__name__)
    return torch.compile(made, backend=backend, fullgraph=fullgraph)


def _send(node: fx.Node) -> None:
    """As torch's all-to-all, to and from the peers that this rank has."""
    value, group = node.args
    assert isinstance(value, fx.Node) and isinstance(group, str)
    send, waits = SENDS[node.target], [*node.users]  # pyright: ignore[reportArgumentType]
    assert all(wait.target is C10D.wait_tensor.default for wait in waits), waits
    node.target, node.args = begun, (value, group, *peers(send, group))
    for wait in waits:
        wait.target, wait.args = arrived, (node, value)
