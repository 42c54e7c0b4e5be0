"""Models and inputs without values: fake tensors, as which everything is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar._compat import FakeTensorMode
from autopar.trace.modules import computed_tensors, with_tensors
from autopar.trace.precision import compute_dtype


def fake_copy(
    model: nn.Module,
    mode: FakeTensorMode,
    precision: MixedPrecisionPolicy | None = None,
    device: str = "cpu",
    originals: dict[int, Any] | None = None,
    left: Sequence[torch.Tensor] = (),
) -> nn.Module:
    """The model with fake tensors of the same shapes on `device`, whatever device (or meta) the real ones are on.
    `originals`: as of `with_tensors`. `left`: fake tensors that are there already.

    With a precision, parameters have the dtype they compute in. On another device than the CPU none requires grad.
    """
    fakes: dict[int, torch.Tensor] = {id(value): value for value in left}
    with mode, torch.device(device):
        for parameter in model.parameters():
            dtype = compute_dtype(parameter, precision)
            empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype)
            fakes[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad and device == "cpu")
        for buffer in model.buffers():
            is_dense = buffer.layout is torch.strided  # forward may not read others
            strides = buffer.stride() if is_dense else torch.empty(buffer.shape, device="meta").stride()
            fakes[id(buffer)] = torch.empty_strided(buffer.shape, strides, dtype=buffer.dtype)
        for value in computed_tensors(model):
            fakes[id(value)] = torch.empty(value.shape, dtype=value.dtype)
    return with_tensors(model, fakes, originals)
