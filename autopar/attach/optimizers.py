"""Optimizers that would do something else than they say: of the wrong model, whole matrices, another rank's states; and
those that end in what DTensors cannot do.

DistributedDataParallel shares its parameters with the model that it wraps, so scripts written for it may make the
optimizer before. A parallel module has parameters of its own: such an optimizer would train nothing, without a word.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Optimizer, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar._compat import with_torch_function, without_torch_function
from autopar.attach.over_stages import pipe_among
from autopar.attach.tensors import is_elsewhere, piece_as, refuse_pieces_of_others
from autopar.attach.whole import Whole

# Parameter of a plain model -> its name, and the parallel module beside that model.
_BESIDE: Any = WeakIdKeyDictionary()

# Parameter that came into a parallel module -> its name, and that module, in which a DTensor took its place.
_REPLACED: Any = WeakIdKeyDictionary()

# Optimizer -> its states as they were looked at, and how its first parameter lay: loading puts others in their place,
# and planning lays parameters out.
_LOOKED_AT: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()


def refuse_optimizers_of(model: nn.Module, parallel: nn.Module) -> None:
    """From now on the step of an optimizer raises RuntimeError where all that it holds of `model` is without gradients
    while `parallel` has them.
    """
    held = weakref.ref(parallel)
    for name, parameter in model.named_parameters():
        _BESIDE[parameter] = name, held


def refuse_optimizers_with(replaced: nn.Parameter, name: str, parallel: nn.Module) -> None:
    """From now on the step of an optimizer raises RuntimeError where it holds this parameter, which has no gradient,
    while the one that stands in its place in `parallel` has.
    """
    _REPLACED[replaced] = name, weakref.ref(parallel)


def _refuse_replaced(optimizer: Optimizer) -> None:
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        name, held = _REPLACED.get(parameter, ("", None))
        parallel = None if held is None or parameter.grad is not None else held()
        now = None if parallel is None else dict(parallel.named_parameters(remove_duplicate=False)).get(name)
        if now is not None and now.grad is not None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} holds {name} as it was before the parallel module laid it out: its "
                "step would not train it. Make the optimizer from the parallel module's own parameters "
                "(parallel.parameters(), parallel.named_parameters()), or behind the first call with the new part"
            )


def lay_out_states(optimizer: Optimizer) -> None:
    """Have states that came since the last step lie as their parameters do."""
    first = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
    seen = optimizer.state, getattr(first, "_spec", None)
    known = _LOOKED_AT.get(optimizer, (None, None))
    if known[0] is not seen[0] or known[1] is not seen[1]:
        _look_at_states(optimizer)
        _LOOKED_AT[optimizer] = seen


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _refuse_whole_matrices(optimizer)
    if _REPLACED:
        _refuse_replaced(optimizer)
    lay_out_states(optimizer)
    found: list[tuple[str, nn.Module]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return
            name, held = _BESIDE.get(parameter, ("", None))
            if held is not None and (parallel := held()) is not None:
                found.append((name, parallel))
    for name, parallel in found:
        if parallel.get_parameter(name).grad is not None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} holds {name} and {len(found) - 1} more parameters of the plain model "
                "that have no gradient, while the parallel module has them: its step would train nothing. Make the "
                "optimizer behind autopar.compile, from the parallel module's parameters"
            )


def _refuse_whole_matrices(optimizer: Optimizer) -> None:
    """torch's optimizers that fail inside of DTensor where a parameter is split (torch 2.11 to 2.13)."""
    held = [one for group in optimizer.param_groups for one in group["params"]]
    if isinstance(optimizer, LBFGS) and pipe_among(held) is not None:
        raise RuntimeError(
            "LBFGS strings all gradients into one vector, which is not built for parameters in pipeline stages; take "
            "another optimizer, or a mesh without `pipe`"
        )
    if not isinstance(optimizer, (Adafactor, Rprop)):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor) and not all(where.is_replicate() for where in parameter.placements):
                name = type(optimizer).__name__
                raise RuntimeError(_on_whole_copies(name, f"torch.optim.{name}"))


def _on_whole_copies(name: str, called: str) -> str:
    return (
        f"{name} does not run on parameters that are split; step it on whole copies: "
        f"autopar.optim.Whole(parallel.parameters(), {called}, lr=...)"
    )


def _look_at_states(optimizer: Optimizer) -> None:
    """What was loaded into an optimizer is refused where it is another rank's, and laid out as the parameter where it
    is whole, or was made or loaded before there was a plan. The count of steps, which has no dims, stays as it is.
    """
    if isinstance(optimizer, Whole):  # its states are of whole copies, and stay whole
        return
    for parameter, states in optimizer.state.items():
        for name, value in list(states.items()) if isinstance(states, MutableMapping) else ():
            refuse_pieces_of_others(f"{name} of an optimizer", value, parameter)
            if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            if not isinstance(value, DTensor):
                states[name] = value if name == "step" else piece_as(value, parameter)
            elif value.device_mesh != parameter.device_mesh:
                if not is_elsewhere(value) and all(one.is_replicate() for one in value.placements):
                    states[name] = piece_as(value.to_local(), parameter)  # whole, from before there were stages
            elif value.placements != parameter.placements:
                states[name] = value.redistribute(placements=parameter.placements)


def _says_what_to_do(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step of an optimizer class: where it ends in what DTensors cannot do, it says how the optimizer runs."""

    @functools.wraps(step)
    def told(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with without_torch_function():  # what it cannot do in pieces, `Whole` can (`mixed`)
                return step(optimizer, *map(_outside, args), **{name: _outside(one) for name, one in kwargs.items()})
        except Exception as error:
            held = [one for group in optimizer.param_groups for one in group["params"]]
            if not any(isinstance(one, DTensor) for one in held) or not _is_of_dtensors(error):
                raise
            name = type(optimizer).__name__
            why = str(error).partition("\n")[0] or f"{type(error).__name__} without a word"
            raise RuntimeError(f"{_on_whole_copies(name, name)}. torch says: {why}") from error

    return told


def _outside(given: Any) -> Any:
    """A closure, which computes a loss as if no optimizer called it."""
    if not callable(given):
        return given

    def closure(*args: Any, **kwargs: Any) -> Any:
        with with_torch_function():
            return given(*args, **kwargs)

    return closure


def _is_of_dtensors(error: BaseException) -> bool:
    """Whether torch raised it for what an operator takes, and not the optimizer for what it was given."""
    if "optim.Whole" in str(error):  # told already, by the step inside
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = "" if last is None else str(last.tb_frame.f_globals.get("__name__"))
    return any(one in str(error) for one in ("DTensor", "device mesh")) or where.startswith("torch.distributed.tensor")


def _advising(hooked: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any]:
    """`torch.optim.Optimizer.profile_hook_step`, by which each class of optimizers gets its step when it is used
    first.
    """

    @functools.wraps(hooked)
    def of_class(step: Callable[..., Any]) -> Callable[..., Any]:
        return hooked(_says_what_to_do(step))

    return of_class


register_optimizer_step_pre_hook(_refuse)
Optimizer.profile_hook_step = staticmethod(_advising(Optimizer.profile_hook_step))  # type: ignore[assignment]
