"""Matchings of predictions with targets (`scipy.optimize.linear_sum_assignment`; DETR and its like): what scipy finds
for a matrix of costs is as large as the matrix says, so that a program asks it in each call, on the host.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.trace.numbers import Number

_LIBRARY = torch.library.Library("autopar_host", "DEF")
_LIBRARY.define("linear_sum_assignment(Tensor cost, bool maximize) -> (Tensor, Tensor)")


def _assigned(cost: Tensor, maximize: bool) -> tuple[Tensor, Tensor]:
    from scipy.optimize import linear_sum_assignment  # which whoever calls this has

    made: Any = linear_sum_assignment(cost.detach().cpu().numpy(), maximize)
    rows, columns = (torch.as_tensor(one, dtype=torch.int64, device=cost.device) for one in made)
    return rows, columns


def _shapes(cost: Tensor, maximize: bool) -> tuple[Tensor, Tensor]:
    rows, columns = (cost.new_empty((min(cost.shape),), dtype=torch.int64) for _ in range(2))
    return rows, columns


_LIBRARY.impl("linear_sum_assignment", _assigned, "CompositeExplicitAutograd")
torch.library.register_fake("autopar_host::linear_sum_assignment", _shapes, lib=_LIBRARY)


@contextlib.contextmanager
def assigning() -> Iterator[None]:
    """Inside, scipy's function takes matrices of each call, and gives tensors for these. Modules may hold it by any
    name.
    """
    scipy: Any = sys.modules.get("scipy.optimize")
    if scipy is None:
        yield
        return
    original = scipy.linear_sum_assignment

    def linear_sum_assignment(cost_matrix: Any, maximize: bool = False) -> Any:
        cost = cost_matrix.tensor if isinstance(cost_matrix, Number) else cost_matrix
        if not isinstance(cost, Tensor):
            return original(cost, maximize)
        return torch.ops.autopar_host.linear_sum_assignment(cost.detach(), maximize)

    tables = [vars(module) for module in [*sys.modules.values()] if hasattr(module, "__dict__")]
    places = [(table, name) for table in tables for name, held in [*table.items()] if held is original]
    for table, name in places:
        table[name] = linear_sum_assignment
    try:
        yield
    finally:
        for table, name in places:
            table[name] = original
