"""Parameters as a parallel module holds them: until there is a plan, and when another takes the place of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.attach.tensors import as_dtensor, as_stored, by_piece, is_elsewhere, piece_as, refuse_pieces_of_others
from autopar.ir import layout as plain
from autopar.trace.modules import noted_on


def whole_parameter(parameter: nn.Parameter, device_mesh: DeviceMesh) -> nn.Parameter:
    """The parameter as a replicated DTensor over its own storage: what stands in a module until there is a plan.

    A DTensor from the start, so that the plan's layout can take its place inside the same Python object, which an
    optimizer may hold already. Values on the CPU stay there: a device gets its piece, once it is known which.
    """
    value = as_stored(parameter.detach())
    value = value if value.is_meta or value.device.type == "cpu" else value.to(device_mesh.device_type)
    made = as_dtensor(value.contiguous(), value.shape, (plain.REPLICATE,) * device_mesh.ndim, device_mesh)
    whole = nn.Parameter(made, requires_grad=parameter.requires_grad)
    # Whoever writes to it has to copy it first; who writes to the model's own is told (`is_written`).
    whole.borrowed = None if value.is_meta else (value, _version_of(value))  # type: ignore[attr-defined]
    carry(parameter, whole)
    return whole


def _version_of(value: Tensor) -> int:
    """How often its storage was written to."""
    return 0 if value.is_inference() else value._version


def is_written(held: nn.Parameter) -> bool:
    """Whether the model that was compiled got new values, while this parameter of the parallel module has the same."""
    borrowed = getattr(held, "borrowed", None)
    return borrowed is not None and _version_of(borrowed[0]) != borrowed[1]


def become(held: nn.Parameter, made: nn.Parameter) -> None:
    """`held` gets the value and the layout of `made`, both DTensors of one shape, and stays the object that it is:
    whoever holds it sees the new one, through weak references and with its hooks too.
    """
    if not isinstance(held, DTensor):
        raise RuntimeError(
            "the first call of a parallel module lays its parameters out, and comes through "
            "torch.func.functional_call with plain tensors in their place: call the module by itself first, or give "
            "example_inputs= to autopar.compile"
        )
    assert isinstance(made, DTensor)
    if held.device == made.device:
        held._local_tensor, held._spec = made._local_tensor, made._spec
        held.borrowed = None  # type: ignore[attr-defined]
        if isinstance(held.grad, DTensor) and held.grad.device_mesh == made.device_mesh:  # set before the first call
            held.grad = held.grad.redistribute(placements=made.placements)
    else:  # a parameter of a device that lies on the host from now on
        torch.utils.swap_tensors(held, made)


def carry(source: Tensor, target: Tensor) -> None:
    """Let a parameter have the hooks of the one whose place it takes, in the same dicts, so that handles stay valid,
    and what users have noted on it (`weight.no_decay = True`).

    With one tensor for both, hooks that `torch.utils.swap_tensors` left behind are registered again.
    """
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(source, kind, None):
            if kind == "_backward_hooks":
                hooks.update({number: giving_pieces(hook) for number, hook in hooks.items()})
            setattr(target, kind, hooks)
    vars(target).update(noted_on(source))


class giving_pieces:
    """A hook of a gradient whose result is laid out as the gradient is, where it is a plain whole tensor: a mask is
    one, and what a DTensor gives with it.
    """

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook: Any = hook.hook if isinstance(hook, giving_pieces) else hook
        self.__name__ = getattr(self.hook, "__name__", type(self.hook).__name__)  # in torch's errors

    def __call__(self, gradient: Tensor) -> Tensor | None:
        if not isinstance(gradient, DTensor) or any(one.is_partial() for one in gradient.placements):
            return self.hook(gradient)
        outside = by_piece.set(True)
        try:
            made = self.hook(gradient)
        finally:
            by_piece.reset(outside)
        if isinstance(made, DTensor):  # it may be a sum of which ranks hold terms
            return made if made.placements == gradient.placements else made.redistribute(placements=gradient.placements)
        return piece_as(made, gradient) if isinstance(made, Tensor) and made.shape == gradient.shape else made


def take_plain_tensors(module: nn.Module) -> None:
    """From now on `load_state_dict` of each submodule takes whole tensors too, of which a rank keeps its piece."""
    for part in module.modules():
        part.register_load_state_dict_pre_hook(_cut_to_layouts)


def _cut_to_layouts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a load: parameters stop sharing storage with the user's model, and values become what
    parameters are: whole tensors DTensors like them, DTensors whole tensors where parameters are plain.
    """
    for name, held in module._parameters.items():
        value = state_dict.get(prefix + name)
        refuse_pieces_of_others(prefix + name, value, held)
        if isinstance(value, DTensor) and not isinstance(held, DTensor):
            state_dict[prefix + name] = value.full_tensor()
        if not isinstance(held, DTensor) or not isinstance(value, Tensor):
            continue
        if is_elsewhere(held):  # whose ranks take it
            if value.shape == held.shape:
                state_dict[prefix + name] = held.detach()
            continue
        if getattr(held, "borrowed", None) is not None:
            become(held, nn.Parameter(held.detach().clone(), requires_grad=held.requires_grad))
        if not isinstance(value, DTensor) and value.shape == held.shape:
            state_dict[prefix + name] = piece_as(value, held)
