"""Gradients in the place of what forward gives: those of a backward with `create_graph=True`, which is a program of its
own, with a backward of its own, and gradients of that in turn.

    outputs ── gradients of some of them, by arguments and parameters ── gradients of some of those ── ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar._compat import pytree
from autopar.errors import TraceError
from autopar.trace.calls import Call, flatten_inputs

TANGENTS = "tangents_"  # of forward, in a trace: of each derivative the gradients that it begins with


class Derivative(NamedTuple):
    """Gradients of some of the `leaves` of what there is before, by their number, by arguments (paths), by gradients
    that earlier ones began with (paths, too), and by parameters (names). They are given in this order.
    """

    leaves: int
    outputs: tuple[int, ...]
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]


def derived(call: Call, derivative: Derivative, tangents: Sequence[Tensor]) -> Call:
    """The call that gives these gradients of what `call` gives, from `tangents` on, of each of its outputs."""
    known = call.kwargs.get(TANGENTS, [])
    kwargs = {**call.kwargs, TANGENTS: [*known, [*tangents]]}
    derivatives = (*call.derivatives, derivative)
    told = tuple((one.shape, one.dtype, one.requires_grad) for one in tangents)
    leaves, _ = flatten_inputs(call.args, kwargs)
    return replace(
        call, kwargs=kwargs, key=(call.key, derivative, told), shape=(call.shape, derivative, told),
        tensors=tuple(leaf for _, leaf in leaves if isinstance(leaf, Tensor)), derivatives=derivatives,
    )  # fmt: skip


def gradients_of(
    model: nn.Module, derivatives: Sequence[Derivative], returned: Any, arguments: Mapping[str, Any]
) -> list[Tensor]:
    """What a traced forward gives in the place of what it has returned, and keeps. `arguments`: by path, `TANGENTS`
    among them.
    """
    found: list[Any] = pytree.tree_leaves(returned)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for number, one in enumerate(derivatives):
        by = [*(arguments[path] for path in one.inputs), *(parameters[name] for name in one.parameters)]
        tangents = [arguments[f"['{TANGENTS}'][{number}][{place}]"] for place in range(len(one.outputs))]
        if len(found) != one.leaves:
            raise TraceError(
                f"forward gives and keeps {len(found)} values where gradients with create_graph=True are taken, and "
                f"gave {one.leaves} before; call the module again, then backward"
            )
        of = [found[place] for place in one.outputs]
        for place, value in zip(one.outputs, of, strict=True):
            if not isinstance(value, Tensor) or not value.requires_grad:
                raise TraceError(
                    f"gradients with create_graph=True begin at output {place}, which has none where second "
                    "derivatives are traced (under an autocast of a device, say); put the model and what takes the "
                    "gradient into one module, and compile that"
                )
        found = [*torch.autograd.grad(of, by, tangents, create_graph=True, allow_unused=True)]
    return found
