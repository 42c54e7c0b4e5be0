"""Whether what forward computes, and leaves outside of its modules, hangs on what earlier calls have left there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from autopar._compat import FakeTensor, FakeTensorMode
from autopar.trace.left import Left
from autopar.trace.reads import refuse
from autopar.trace.values import Change

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
