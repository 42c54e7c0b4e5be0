"""Lookups in tables as programs have them: with dense gradients, in tables that forward leaves as they are."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.errors import TraceError
from autopar.trace.lines import line_here

LOOKUPS = (functional.embedding, functional.embedding_bag)
SPARSE_AT = {torch.embedding: 4, torch.embedding_bag: 5}  # where torch takes `sparse`
NOTE = (
    "an embedding has sparse=True{line}; its gradient is dense here, with the same numbers: "
    "use an optimizer that takes dense gradients (SparseAdam does not)"
)


def dense_lookup(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which torch calls `func`, without sparse gradients; a warning tells of them. Raises TraceError
    for `max_norm`, with which forward writes to the table.
    """
    given = dict(kwargs)
    if func is torch.embedding_renorm_ or (func in LOOKUPS and given.get("max_norm") is not None):
        raise TraceError(
            f"an embedding with max_norm rescales rows of its table in forward{line_here()}, which a program does not: "
            "leave max_norm out and rescale them after optimizer.step()"
        )
    place = SPARSE_AT.get(func)
    is_sparse = given.get("sparse", place is not None and len(args) > place and args[place])
    if not is_sparse or (place is None and func not in LOOKUPS):
        return args, given
    warnings.warn(NOTE.format(line=line_here()), stacklevel=2)
    if "sparse" in given:
        given["sparse"] = False
    else:
        assert place is not None
        args = (*args[:place], False, *args[place + 1 :])
    return args, given


def one_hot(values: Tensor, num_classes: int = -1) -> Tensor:
    """As `functional.one_hot`, whose checks of the values a program does not have; those of scatter's kernels stay."""
    if num_classes == -1:
        raise TraceError(
            f"one_hot{line_here()} counts its classes in the values that it is given, and a program has one shape; say "
            "how many: one_hot(y, num_classes)"
        )
    if values.dtype != torch.int64:
        raise RuntimeError(f"one_hot takes indices of int64, not {values.dtype}")
    return values.new_zeros([*values.shape, num_classes]).scatter(-1, values.unsqueeze(-1), 1)
