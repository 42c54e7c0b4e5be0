"""Batch norms whose own forward cannot be traced, in operators that can: the same values.

`SyncBatchNorm` talks to its process group, which a trace of the whole batch has no use for. A cumulative average
(`momentum=None`) takes its share from a counter, as a Python number; here it stays a tensor.
"""

from __future__ import annotations

import types

import torch
from torch import Tensor, nn
from torch.nn import functional

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
PLAIN, SYNCED = nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward


def make_traceable(model: nn.Module) -> None:
    """Give such modules of `model`, which is a copy, another forward. A forward of the user's own stays."""
    for module in model.modules():
        if isinstance(module, KINDS) and type(module).forward in (PLAIN, SYNCED):
            if module.momentum is None and module.track_running_stats:
                module.forward = types.MethodType(_cumulative, module)
            elif isinstance(module, nn.SyncBatchNorm):
                module.forward = types.MethodType(PLAIN, module)


def synced(model: nn.Module) -> frozenset[str]:
    """Every name of every SyncBatchNorm: its statistics are those of the whole batch, whatever else is local."""
    named = model.named_modules(remove_duplicate=False)
    return frozenset(name for name, module in named if isinstance(module, nn.SyncBatchNorm))


def _cumulative(self: nn.modules.batchnorm.BatchNorm1d, x: Tensor) -> Tensor:
    """Running statistics are the mean of those of all batches so far: each batch's share is one over their number."""
    if not self.training:
        return PLAIN(self, x)
    self._check_input_dim(x)
    assert self.momentum is None  # which is read here, so that another one has another program
    assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
    self.num_batches_tracked.add_(1)
    mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    y = functional.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)
    for running, now in ((self.running_mean, mean), (self.running_var, var)):
        share = self.num_batches_tracked.to(running.dtype).reciprocal()
        running.mul_(1 - share).add_(now * share)
    return y
