"""Outputs that look at one storage: a value and a view of it, what is detached from it, a parameter.

AOTAutograd lets such outputs be views again of what its program gives, behind the program, so that the joint graph has
no gradient of theirs (torch 2.11 to 2.13: `OutputType.alias_of_intermediate`, `alias_of_input`). What autopar runs is
the joint graph alone. So all but one of them become values of their own here, as soon as one has a gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.trace.sharing import has_storage, storage_of


def keep_apart(module: torch.fx.GraphModule) -> None:
    """Change an exported module so that no output with a gradient shares its storage with another one, or with a
    parameter or an input.
    """
    pass_outputs(module, _apart, [node for node in module.graph.nodes if node.op in ("placeholder", "get_attr")])


def pass_outputs(module: torch.fx.GraphModule, through: Callable[..., list[Any]], *others: Any) -> None:
    """Let an exported module give what `through` makes of the list of its outputs, and of other nodes."""
    (output,) = module.graph.find_nodes(op="output")
    leaves = list(output.args[0])
    with module.graph.inserting_before(output):
        made = module.graph.call_function(through, (leaves, *others))
        output.args = (tuple(module.graph.call_function(operator.getitem, (made, i)) for i in range(len(leaves))),)
    module.recompile()


def _apart(values: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """What is run in the place of the outputs. One that is returned twice stays one."""
    given = {storage_of(one) for one in sources if has_storage(one)}
    tensors = {id(one): one for one in values if has_storage(one)}
    trained = {storage_of(one): one for one in reversed(tensors.values()) if one.requires_grad}  # its first, of each
    made = dict(tensors)
    for key, one in tensors.items():
        storage = storage_of(one)
        if one.requires_grad and one._is_view() and sum(one is other for other in values) > 1:
            made[key] = one.clone()  # two views of one base to AOTAutograd, which it makes behind the program
            continue
        if storage not in trained or (one is trained[storage] and storage not in given):
            continue
        if one.requires_grad or storage not in given:
            made[key] = one.clone()
    return [made.get(id(one), one) for one in values]
