"""A plain model and its parallel module side by side: same inputs in, same numbers out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar import ParallelModule
from autopar._compat import pytree
from cost_models.steps import axes_of
from tests.support.wide import as_double

MakeOptimizer = Callable[..., torch.optim.Optimizer]

# float32: sums of a few hundred terms in another order.
LOSS, GRADIENT, ZERO = 1e-5, 1e-4, 1e-6
# After five steps of 1e-3 each; what the optimizer divides by is kept away from rounding noise with a larger eps.
PARAMETER = 1e-4


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, eps=1e-6, **options)


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-2, momentum=0.9, **options)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def loss_of(output: Any) -> Tensor:
    leaves, _ = pytree.tree_flatten(output)
    return next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim == 0)


def step_alike(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], inputs: Mapping[str, Any], near: float
) -> None:
    """A step of two models, with clipping: their losses and norms are near, relatively."""
    found, wanted = (loss_of(one(**inputs)) for one in models)
    found.backward()
    wanted.backward()
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=near, atol=0)
    norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5) for one in models]
    torch.testing.assert_close(norms[0], norms[1], rtol=near, atol=0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def near(ours: Tensor, wanted: Tensor, relative: float, what: str, least: float = 0.0) -> None:
    """Every entry within `relative` of the largest one, or within `least`."""
    ours, wanted = whole(ours.detach()), whole(wanted.detach())
    assert ours.shape == wanted.shape and ours.dtype == wanted.dtype, f"{what}: {ours.dtype}{list(ours.shape)}"
    if not wanted.numel():
        return
    ours, wanted = as_double(ours), as_double(wanted)
    off, size = (ours - wanted).abs().max().item(), wanted.abs().max().item()
    assert off <= relative * size + least, f"{what} is off by {off:.3g}, its largest entry is {size:.3g}"


def both_backward(plain: nn.Module, parallel: nn.Module, *args: Any, within: float = LOSS) -> None:
    """Losses of one call are near, and backward of both has run."""
    ours, wanted = parallel(*args), plain(*args)
    near(ours, wanted, within, "loss")
    ours.backward()
    wanted.backward()


def same_calls(plain: nn.Module, parallel: nn.Module, calls: int, batch: Callable[[int], Tensor]) -> None:
    """Calls in double precision, each with backward from no gradients: losses, gradients and buffers are the same.
    `batch`: what a call is given, drawn by its number.
    """
    for number in range(calls):
        torch.manual_seed(number)
        plain.zero_grad(), parallel.zero_grad()
        both_backward(plain, parallel, batch(number), within=1e-12)
        same_gradients(plain, parallel)
        for (_, buffer), (_, wanted) in zip(parallel.named_buffers(), plain.named_buffers(), strict=True):
            torch.testing.assert_close(buffer, wanted, rtol=1e-12, atol=1e-12)


def same_gradients(plain: nn.Module, parallel: nn.Module) -> None:
    for name, parameter in plain.named_parameters():
        ours = parallel.get_parameter(name).grad
        assert (ours is None) == (parameter.grad is None), f"gradient of {name}"
        if parameter.grad is not None:
            near(ours, parameter.grad, GRADIENT, f"gradient of {name}", ZERO)


def same_state(plain: nn.Module, parallel: nn.Module, within: float = PARAMETER) -> None:
    ours, wanted = parallel.state_dict(), plain.state_dict()
    assert list(ours) == list(wanted)
    for name, value in wanted.items():
        near(ours[name], value, within if value.is_floating_point() or value.is_complex() else 0.0, name, 0.1 * within)


def same_steps(
    plain: nn.Module,
    parallel: nn.Module,
    inputs: Mapping[str, Any],
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer] | None = None,
    *,
    make: MakeOptimizer = adamw,
    steps: int = 5,
    clip: float | None = 1.0,
) -> list[float]:
    """Train both: losses, gradients and gradient norms equal at every step, parameters and buffers at the end; nothing
    is traced again behind the first step.
    """
    theirs, ours = optimizers or (make(plain.parameters()), make(parallel.parameters()))
    losses, programs = list[float](), 0
    for step in range(steps):
        if step == 1:
            programs = len(parallel._autopar.prepared())
        wanted, loss = loss_of(plain(**inputs)), loss_of(parallel(**inputs))
        near(loss, wanted, LOSS, f"loss of step {step}")
        wanted.backward()
        loss.backward()
        same_gradients(plain, parallel)
        if clip is not None:
            norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), clip) for model in (parallel, plain)]
            near(*norms, LOSS * 10, f"gradient norm of step {step}")
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(wanted.item())
    assert steps < 2 or len(parallel._autopar.prepared()) == programs, "traced again"
    same_state(plain, parallel)
    return losses


def splits(parallel: ParallelModule) -> None:
    """The plan really works on every axis of its mesh."""
    axes = {axis for (_, at), nbytes in parallel.plan.comm_bytes.items() if nbytes for axis in axes_of(at)}
    assert axes == set(parallel.plan.mesh.names), f"only {axes or 'nothing'} is used: {parallel.plan.comm_bytes}"
