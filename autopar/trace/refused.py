"""Functions of torch that a program does not have: each is refused with the line that calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.errors import TraceError
from autopar.trace.lines import caller, line_here
from autopar.trace.modules import name_of_layout
from autopar.trace.values import is_torchs

DATA: Any = torch.Tensor.data
GRAD: Any = torch.Tensor.grad
LOOKS: Any = torch.Tensor.shape, torch.Tensor.dtype, torch.Tensor.device
# What of a sparse tensor is that of a dense one.
ABOUT = (*(one.__get__ for one in LOOKS), torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel)


def refuse_sparse(func: Any, taken: Sequence[tuple[str, torch.layout]]) -> None:
    """Raises TraceError for what looks into these buffers: name and layout."""
    if taken and func not in ABOUT and not is_torchs(caller(2)):
        name, layout = taken[0]
        raise TraceError(
            f"forward reads the buffer {name}{line_here()}, whose layout is {name_of_layout(layout)}, and a program "
            "computes with dense tensors: register it dense (.to_dense())"
        )


def refuse(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], of_parameter: bool) -> None:
    """Raises TraceError. `of_parameter`: the first argument is one."""
    if func in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook):
        raise TraceError(
            f"forward registers a hook on a tensor{line_here()}, which a program would never call; scale or change "
            "gradients in a torch.autograd.Function"
        )
    if func == GRAD.__get__ and of_parameter and not is_torchs(caller(2)):
        raise TraceError(
            f"forward reads .grad of a parameter{line_here()}, which a program does not have: look at gradients "
            "behind backward, outside of forward"
        )
    if func is torch.Tensor.retain_grad:
        raise TraceError(
            f"forward has a tensor retain its gradient{line_here()}, and a program gives gradients of parameters "
            "and arguments alone: leave it out, or make that tensor an argument"
        )
    if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
        raise TraceError(
            f"forward draws from a torch.Generator{line_here()}, which a program cannot go on with: leave "
            "generator= out, or make what is to be the same in each call a buffer"
        )
    if func is nn.functional.multilabel_margin_loss:
        raise TraceError(
            f"torch traces multilabel_margin_loss{line_here()} as something else where labels end with -1 (its "
            "decomposition counts what stands behind): compute that loss of what the parallel module gives"
        )
    if func == DATA.__set__:
        of_first = "; where the first batch initialises them, call the plain model once before it is compiled"
        raise TraceError(
            f"forward sets .data of a {'parameter' if of_parameter else 'tensor'}{line_here()}, which a program does "
            "not do: assign the new tensor to the attribute (self.name = new), or change parameters outside of forward"
            f"{of_first * of_parameter}"
        )
