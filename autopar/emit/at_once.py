"""Collectives of compiled code that are over where they are begun, one after the other as they are written.

On gloo no two may be in flight (docs/design/0018). Inductor moves a wait to the first use of what comes: four gathers,
each waited for where it is launched, are in flight together. Here a launch and its wait are one operator, and each
takes what the one before has made, a tensor of no elements, so that nothing changes their order either.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from autopar._compat import functional_collectives
from autopar.emit import sends

assert functional_collectives and sends  # imported for what they register

C10D, OURS = torch.ops._c10d_functional, torch.ops.autopar
_TAKE = {
    C10D.all_gather_into_tensor.default: "int ranks, str group",
    C10D.all_reduce.default: "str op, str group",
    C10D.reduce_scatter_tensor.default: "str op, int ranks, str group",
    C10D.all_to_all_single.default: "int[] taken, int[] given, str group",
    OURS.shift.default: "str group",
    OURS.mirror.default: "str group",
}


def _runs(collective: Callable[..., Tensor], x: Tensor, after: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    return C10D.wait_tensor(collective(x, *args)), x.new_empty(0)


def _is_like(collective: Callable[..., Tensor], x: Tensor, after: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    return collective(x, *args), x.new_empty(0)


def _operator(collective: Any, takes: str) -> Any:
    name = f"{collective.overloadpacket.__name__}_at_once"
    torch.library.define(f"autopar::{name}", f"(Tensor x, Tensor? after, {takes}) -> (Tensor, Tensor)")
    torch.library.impl(f"autopar::{name}", "CompositeExplicitAutograd")(partial(_runs, collective))
    torch.library.register_fake(f"autopar::{name}")(partial(_is_like, collective))
    return getattr(OURS, name).default


AT_ONCE = {collective: _operator(collective, takes) for collective, takes in _TAKE.items()}


def at_once(graph: fx.Graph) -> None:
    """Make every collective of a graph, each waited for where it is launched, one operator with its wait."""
    after: fx.Node | None = None
    for launch in [node for node in graph.nodes if node.target in AT_ONCE]:
        wait = launch.next
        assert wait.target is C10D.wait_tensor.default and [*launch.users] == [wait], launch
        value, *args = launch.args
        with graph.inserting_before(launch):
            both = graph.call_function(AT_ONCE[launch.target], (value, after, *args))
            came, after = (graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
        wait.replace_all_uses_with(came)
        graph.erase_node(wait)
        graph.erase_node(launch)
