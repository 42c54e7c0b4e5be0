"""Batch norms by hand as DDP has them: a model whose norms take each of G equal parts of the batch by itself."""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.ir.graph import Graph
from autopar.trace import graph_of
from tests.support.families import Case, Reference, doubled, reference
from tests.support.wide import Wide

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def in_parts(model: nn.Module, parts: int) -> nn.Module:
    """A copy whose BatchNorm modules normalise each part by its own statistics; part 0 makes the running ones."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module) in NORMS:
            module.forward = types.MethodType(lambda self, x: _norm(self, x, parts), module)
    return model


def _norm(self: nn.BatchNorm1d, x: Tensor, parts: int) -> Tensor:
    if not self.training and self.track_running_stats:
        return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0, self.eps)
    assert x.shape[0] % parts == 0
    momentum = self.momentum
    if self.track_running_stats:
        self.num_batches_tracked += 1
        momentum = 1 / self.num_batches_tracked.item() if momentum is None else momentum
    made: list[Tensor] = []
    for rank, piece in enumerate(x.chunk(parts)):
        running = (self.running_mean, self.running_var)
        if rank and self.track_running_stats:  # those of the other ranks are thrown away
            running = (self.running_mean.clone(), self.running_var.clone())
        made.append(functional.batch_norm(piece, *running, self.weight, self.bias, True, momentum, self.eps))
    return torch.cat(made)


@dataclass
class InParts(Case):
    """A case whose batch norms are local to each of so many parts, and what they give by hand."""

    parts: int = 2

    @cached_property
    def graph(self) -> Graph:
        return graph_of(self.captured, parts=self.parts)

    @cached_property
    def reference(self) -> Reference:
        return reference(in_parts(self.model, self.parts), self.inputs, self.seed)

    @cached_property
    def wide_reference(self) -> Reference:
        with Wide():
            return reference(in_parts(self.model, self.parts).double(), doubled(self.inputs), self.seed)
