"""What a program is given and gives, as autograd wants it of a function's forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from autopar._compat import is_batched, is_wanted
from autopar.ir.graph import Result
from autopar.ir.layout import Layout


def versions(saved: Sequence[Tensor | None], places: Sequence[int]) -> list[tuple[int, int]]:
    """(place, version now) of these saved values, for backward to see that nobody changed them."""
    held = ((place, saved[place]) for place in places) if saved else ()
    return [(place, one._version) for place, one in held if isinstance(one, Tensor) and not one.is_inference()]


def check_saved(saved: Sequence[Any] | None, before: Sequence[tuple[int, int]]) -> None:
    """Raises RuntimeError where what forward has saved is gone, or something else by now. `before`: as `versions`."""
    if saved is None:
        raise RuntimeError(
            "backward ran a second time through the same forward, what it needs is gone, and in micro-batches nothing "
            "is kept: pass retain_graph=True the first time, or call the module again, with a detach() of arguments "
            "that an earlier call has changed in place"
        )
    if any(saved[place]._version != version for place, version in before):
        raise RuntimeError(
            "an output or a buffer of the module was changed in place between forward and backward, which needs what "
            "it was: change a copy (output.clone()), or call backward first"
        )


def refuse_batches(ranks: int, *gradients: Tensor | None, of_parameters: Iterable[Any] = ()) -> None:
    """Raises RuntimeError where one of them stands for a batch of gradients, and meets other ranks, or parameters
    (`of_parameters`: functions of autograd), which are DTensors. Elsewhere a program can run on such.
    """
    if not any(gradient is not None and is_batched(gradient) for gradient in gradients):
        return
    if ranks > 1 or any(map(is_wanted, of_parameters)):
        raise RuntimeError(
            "gradients of a parallel module are taken in a batch (is_grads_batched=True, or vectorize=True of "
            "torch.autograd.functional), which works on one process, for arguments: take them one by one, by "
            "torch.autograd.grad(y[i], x, retain_graph=True) in a loop, or without vectorize"
        )


def told_apart(
    told: Sequence[tuple[Result, Layout]],
    results: Sequence[Tensor | None],
    differentiable: Set[str],
    packed: Set[int],
) -> tuple[tuple[Tensor | None, ...], list[Tensor]]:
    """(results, those of them that have no gradient): where one tensor is both (`loss` and `loss.detach()`), what has
    no gradient looks at it. So does a view (`h.detach()[-1]`): autograd gives views the history of what they look at.
    `packed`: outputs without gaps in the model, which a program may have made in another order of dims.
    """
    results = [
        value.contiguous() if value is not None and one.kind == "output" and int(one.target) in packed else value
        for value, (one, _) in zip(results, told, strict=True)
    ]
    has = [result.kind == "output" and result.target in differentiable for result, _ in told]
    with_gradient = {id(value) for value, one in zip(results, has, strict=True) if one}
    made = tuple(
        value.detach() if value is not None and not one and (id(value) in with_gradient or value._is_view()) else value
        for value, one in zip(results, has, strict=True)
    )
    return made, [value for value, one in zip(made, has, strict=True) if value is not None and not one]


def own(value: Tensor | None, inputs: tuple[Tensor, ...], alone: bool) -> Tensor | None:
    """An output that is an input itself becomes a tensor of its own, as autograd wants it. `alone`: it lies where
    nothing else does. Where it is a view (of what nobody has) it becomes none: those must not be changed in place.
    """
    if value is None:
        return None
    if any(value is one for one in inputs):
        return value.clone()
    return value.data if alone and value._is_view() else value


def apart_from(saved: Sequence[Any], results: Sequence[Tensor | None]) -> list[Any]:
    """What backward reads, where a result is looked at: the result itself leads to the function that holds this, and
    would keep it until Python looks for circles.
    """
    given = {id(value) for value in results if value is not None}
    return [one.detach() if isinstance(one, Tensor) and id(one) in given else one for one in saved]


def behind_a_function(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Parameters behind a function, of which torch tells whether a backward will run it: not so of leaves."""
    training = [one for one in given if one.requires_grad]
    apart = iter(_Apart.apply(*training))  # type: ignore[no-untyped-call]
    return tuple(next(apart) if one.requires_grad else one for one in given)


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients
