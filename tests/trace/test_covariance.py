"""`torch.cov` and `torch.corrcoef` in forward, beside torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace import capture, graph_of
from autopar.trace.covariance import corrcoef, cov

VALUES = {
    "rows": torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    "one variable": torch.tensor([1.0, 4.0, -2.0, 0.5]),
    "complex": torch.randn(2, 5, dtype=torch.complex128, generator=torch.Generator().manual_seed(1)),
    "integers": torch.tensor([[1, 2, 9], [4, -5, 6]]),
}


@pytest.mark.parametrize("name", VALUES)
def test_they_are_torchs(name: str) -> None:
    value = VALUES[name]
    torch.testing.assert_close(corrcoef(value), torch.corrcoef(value))
    for correction in (0, 1, 2):
        torch.testing.assert_close(cov(value, correction=correction), torch.cov(value, correction=correction))


class Model(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.linear, self.given = nn.Linear(4, 4), given

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x).T
        return rows.cov(**self.given).square().sum() + torch.corrcoef(rows).sum()


def test_they_are_traced_but_with_weights() -> None:
    assert any(node.op == "autopar.einsum" for node in graph_of(capture(Model(), (torch.randn(8, 4),), {})).nodes)
    weights = torch.arange(1, 9)
    with pytest.raises(TraceError, match=r"torch.cov at .* with weights asks how large their sum is"):
        capture(Model(fweights=weights), (torch.randn(8, 4),), {})
