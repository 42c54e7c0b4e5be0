"""Covariances as programs have them: torch's own ask the values whether there are enough rows."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.errors import TraceError
from autopar.trace.lines import line_here


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """As `torch.cov`: [variables, rows] -> [variables, variables]. Raises TraceError for weights, whose sums torch asks
    for.
    """
    if fweights is not None or aweights is not None:
        raise TraceError(
            f"torch.cov{line_here()} with weights asks how large their sum is, and a program does not know values: "
            "weigh the rows, and divide by what is right for them"
        )
    rows = torch.atleast_2d(input)
    rows = rows - rows.sum(1, keepdim=True) / rows.shape[1]
    return (rows @ rows.mH / max(rows.shape[1] - correction, 0)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """As `torch.corrcoef`."""
    found = cov(input)
    if not found.ndim:
        return found / found
    deviations = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    found = found / deviations.unsqueeze(1) / deviations
    if found.is_complex():
        return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1))
    return found.clip(-1, 1)
