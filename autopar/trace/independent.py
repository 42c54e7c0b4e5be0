"""Whether what forward computes, and leaves outside of its modules, hangs on what earlier calls have left there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar._compat import FakeTensor, FakeTensorMode
from autopar.errors import TraceError
from autopar.trace.closures import parts_of
from autopar.trace.left import Left
from autopar.trace.modules import HOOKS, REGISTERED
from autopar.trace.reads import refuse
from autopar.trace.values import Change, held_in, is_of_torch, own_names

MOST = 10_000  # objects that hooks lead to are looked at, at most
Again = Callable[[], tuple[Left, torch.export.ExportedProgram, Change | None]]


def hangs_on_nothing(
    left: Left,
    modules: Mapping[str, nn.Module],
    mode: FakeTensorMode,
    exported: torch.export.ExportedProgram,
    again: Again,
) -> None:
    """Find it out, by a second trace (`again`) with something there that an earlier call may have left. Where it is the
    same, guards need not look at it; where it is not, each state has a program of its own. `modules`: of the model,
    whose containers and objects are as they were behind that. `mode`: of fake tensors.

    Raises TraceError where each call would leave another state.
    """
    with mode:
        values = left.as_before()
    is_first = left.is_first(modules)
    undo = [write.as_it_is(modules) for write in left.writes]
    for write, value in zip(left.writes, values, strict=True):
        write.make_often(value, modules)
    counter, error = None, None
    try:
        writes, other, changed = again()
    except Exception as raised:  # whatever it is: without what is left there was none
        reads_it, error = True, raised
    else:
        left.is_independent = left.told() == writes.told()
        counter = left.counted(writes) if left.is_independent else None
        taken = other.graph_signature.inputs_to_lifted_tensor_constants.values()
        reads_it = changed is not None or any(isinstance(other.constants[name], FakeTensor) for name in taken)
        reads_it = reads_it or (left.is_independent and str(other.graph) != str(exported.graph))
    finally:
        for take_back in reversed(undo):
            take_back()
    left.is_independent = left.is_independent and not reads_it
    if counter is None and reads_it and left.has_constants_alone():
        counter = left.writes[0]
    if counter is not None:
        refuse(Change(counter.called))
    if reads_it and not is_first:
        raise left.refused() from error


def refuse_fakes(model: nn.Module) -> None:
    """Raise TraceError where a hook has left a traced tensor in what nobody saw, and a script would find it."""
    left: list[Any] = [hook for part in model.modules() for kind in HOOKS for hook in getattr(part, kind).values()]
    looked: dict[int, Any] = {}
    while left and len(looked) < MOST:
        value = left.pop()
        if isinstance(value, FakeTensor):
            raise TraceError(
                "a hook of a submodule keeps a tensor in an object that a compiled step cannot write to: keep it in a "
                "dict, in a list, or as an attribute of an object of a class without __slots__"
            )
        if id(value) not in looked:
            looked[id(value)] = value
            left += _held_by(value)


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        return [held for name, held in vars(value).items() if name not in REGISTERED]
    if (parts := parts_of(value) or held_in(value)) or is_of_torch(type(value)):
        return parts
    return [*(own_names(value) or {}).values()]
