"""Buffers that forward writes to, where something wants what they were before.

A module that keeps a queue of keys (MoCo) multiplies by the queue, and then puts its new keys in. Backward needs the
queue as it was: such a module multiplies by a clone, or sets the attribute to a new tensor. A program's operators give
new values, so that no clone is one to it; but the new values of buffers are written where the old ones lie, behind
forward and in front of backward.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.ir.graph import Graph, Node, Ref, reading
from autopar.ir.work import VIEWS
from autopar.trace.sharing import copy_of

COPY = torch.ops.aten.copy_.default
NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)


def read_before_assigned(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The exported module, in which what is read of buffers that are assigned, and what norms write to ahead of such a
    copy, are clones of them.

    torch.export makes `self.buffer = new` a copy at the end of forward, into what autograd may have saved by then.
    """
    (output,) = module.graph.find_nodes(op="output")
    last = output.prev
    while last.op == "call_function" and last.target is COPY and last.args[0].op == "get_attr":
        buffer = last.args[0]
        readers = [user for user in buffer.users if user is not last]
        if readers:
            with module.graph.inserting_after(buffer):
                clone = module.graph.call_function(torch.ops.aten.clone.default, (buffer,))
            for reader in readers:
                reader.replace_input_with(buffer, clone)
        last = last.prev
    for node in [node for norm in NORMS for node in module.graph.find_nodes(op="call_function", target=norm)]:
        _on_clones(node)
    module.recompile()
    return module


def _on_clones(norm: torch.fx.Node) -> None:
    """Have a norm, which keeps its running statistics for backward, write to clones of those that somebody else writes
    to behind it: the same norm in a branch by values.
    """
    for running in norm.args[3:5]:
        if isinstance(running, torch.fx.Node) and any(
            user.target is COPY and user.args[0] is running and user > norm for user in running.users
        ):
            with norm.graph.inserting_before(norm):
                clone = norm.graph.call_function(torch.ops.aten.clone.default, (running,))
            norm.replace_input_with(running, clone)
            with norm.graph.inserting_after(norm):
                norm.graph.call_function(COPY, (running, clone))


def kept_as_it_was(graph: Graph) -> Graph:
    """The graph with a copy of each buffer that forward writes to, where backward or an output wants what it was."""
    copies = {
        name: copy_of(graph, Ref(name), f"{name}_before") for name in graph.written if _is_wanted_behind(name, graph)
    }
    if not copies:
        return graph
    instead = {Ref(name): Ref(copy.name) for name, copy in copies.items()}
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.append(reading(node, instead))
        if node.name in copies:
            nodes.append(copies[node.name])
    results = [
        replace(result, ref=instead.get(result.ref, result.ref)) if result.ref is not None else result
        for result in graph.results
    ]
    return replace(graph, nodes=tuple(nodes), results=tuple(results))


def _is_wanted_behind(buffer: str, graph: Graph) -> bool:
    """Whether something reads it, or a view of it, once the forward has written to it."""
    looks = {buffer}
    for node in graph.nodes:
        if any(ref.name in looks for ref in node.operands):
            if node.phase == "backward":
                return True
            if node.op in VIEWS:
                looks.add(node.name)
    return any(
        result.kind != "buffer" and result.ref is not None and result.ref.name in looks for result in graph.results
    )
