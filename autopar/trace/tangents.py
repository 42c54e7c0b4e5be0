"""Which outputs of an exported module are wanted, and have gradients: a loss, and what is looked at beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar._compat import pytree
from autopar.trace.apart import pass_outputs
from autopar.trace.outputs import Returned


@dataclass
class Beside:
    """What is found out about the outputs as a module runs: whether one is a scalar with a gradient, and which beside
    it (by index) have none any more.
    """

    has_loss: bool = False
    without_tangent: set[str] = field(default_factory=set[str])


def outputs_settled(
    module: torch.fx.GraphModule, exported: torch.export.ExportedProgram, every_tangent: bool, loss_alone: bool
) -> Beside:
    """Change an exported module so that its outputs are, and have the gradients, that are wanted."""
    if every_tangent and not loss_alone:
        return Beside()
    own, loss = _own_outputs(exported) if loss_alone else 0, None if every_tangent else _loss_by_name(exported)
    return _only_scalars_differentiable(module, own, loss, every_tangent)


def _only_scalars_differentiable(module: torch.fx.GraphModule, alone: int, loss: int | None, every: bool) -> Beside:
    """Where an output of an exported module is a scalar with a gradient, let the others have none: a tangent of zeros
    as large as the logits would flow through the whole backward pass. Of the first `alone` outputs those are left out.
    Where output `loss` is such a scalar, the others are what it is made of, or are looked at, and have none, too.
    `every`: what is not left out has a gradient.
    """
    found = Beside()

    def keep_scalar_gradients(values: list[Any]) -> list[Any]:
        found.has_loss = any(isinstance(v, torch.Tensor) and v.requires_grad and v.ndim == 0 for v in values)
        if not found.has_loss:
            return values
        large = {i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.ndim}
        given = {i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad}
        left_out = {i for i in large if i < alone}
        if every:
            return [None if i in left_out else value for i, value in enumerate(values)]
        beside = given & large if loss not in given - large else given - {loss}
        found.without_tangent.update(str(i) for i in beside - left_out)
        kept = [value.detach() if i in beside | large else value for i, value in enumerate(values)]
        return [None if i in left_out else value for i, value in enumerate(kept)]

    pass_outputs(module, keep_scalar_gradients)
    return found


def _own_outputs(exported: torch.export.ExportedProgram) -> int:
    """How many outputs are the model's own: the last leaves of a `Returned` are what forward keeps and checks."""
    leaves, returned = _returned(exported)
    return 0 if returned is None else len(leaves) - len(returned.beside)


def _loss_by_name(exported: torch.export.ExportedProgram) -> int | None:
    """Which output the model calls `loss`: by a key, or a field of a dataclass or a named tuple."""
    leaves, returned = _returned(exported)
    outputs = None if returned is None else returned.outputs
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return next((place for place, leaf in enumerate(leaves) if leaf is found), None)


def _returned(exported: torch.export.ExportedProgram) -> tuple[list[torch.Tensor], Returned | None]:
    """A tensor for each output, and the model's structure of them."""
    spec = exported.call_spec.out_spec
    leaves = [torch.empty(()) for _ in range(0 if spec is None else spec.num_leaves)]
    return leaves, None if spec is None else pytree.tree_unflatten(leaves, spec)
