"""The arguments of a call, flat and without values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar._compat import FakeTensorMode, pytree
from autopar.trace.calls import first_places, flatten_inputs
from autopar.trace.counted import is_counted
from autopar.trace.precision import compute_dtype

Leaves = Sequence[tuple[str, Any]]  # path and value of each


@dataclass(frozen=True)
class FlatInputs:
    """The flat inputs as fake tensors: in their own dtypes, and `cast` to those that the model computes in."""

    fakes: list[Any]
    cast: list[Any]
    spec: pytree.TreeSpec

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for the model, in containers of their own, which it may change."""
        return pytree.tree_unflatten(self.cast, self.spec)

    def to_cast(self) -> list[Any]:
        """Those that are cast; None in the place of others."""
        pairs = zip(self.fakes, self.cast, strict=True)
        return [fake if isinstance(fake, torch.Tensor) and fake.dtype != cast.dtype else None for fake, cast in pairs]


def fake_inputs(
    leaves: Leaves, spec: pytree.TreeSpec, mode: FakeTensorMode, device: str, precision: MixedPrecisionPolicy | None
) -> FlatInputs:
    """Fake tensors of `mode` for those leaves, on `device`."""
    casts = precision if precision is not None and precision.cast_forward_inputs else None
    with mode, torch.device(device):
        fakes = [fake_of(leaf, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves]
        cast = [
            fake_of(leaf, compute_dtype(leaf, casts))
            if isinstance(leaf, torch.Tensor) and not is_counted(path)
            else leaf
            for (path, _), leaf in zip(leaves, fakes, strict=True)
        ]
    if device == "cpu":  # as for parameters
        requiring_grad(cast, leaves)
    return FlatInputs(fakes, cast, spec)


def fake_of(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One of the same shape."""
    return torch.empty(like.shape, dtype=dtype)


def requiring_grad(fakes: list[Any], leaves: Leaves) -> list[Any]:
    """The flat inputs, of which those require grad that do: the joint graph gives their gradients, too."""
    for fake, (_, leaf) in zip(fakes, leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            fake.requires_grad_()
    return fakes


def same_in(leaves: Leaves) -> dict[str, str]:
    """Path of each tensor that a call passes again -> the path where it passes it first."""
    tensors = {path: leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
    paths = [*tensors]
    firsts = [paths[place] for place in first_places(tensors.values())]
    return {path: first for path, first in zip(paths, firsts, strict=True) if path != first}


def as_given(
    args: tuple[Any, ...], kwargs: dict[str, Any], same: Mapping[str, str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with one tensor where the caller has passed one (`same`: `same_in`): forward may ask that."""
    if not same:
        return args, kwargs
    leaves, spec = flatten_inputs(args, kwargs)
    held = dict(leaves)
    return pytree.tree_unflatten([held[same.get(path, path)] for path, _ in leaves], spec)
