"""What looks at attention's result as it lies in memory: torch's kernels give it as queries lie, ours in one way."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import TraceError
from autopar.trace import capture
from tests.support.check import difference, mesh_of
from tests.support.families import Case
from tests.support.plans import PlanSampler

LENGTH, BATCH, WIDTH, HEADS = 8, 4, 16, 4
SIZES, STRIDES = (LENGTH, BATCH, WIDTH), (BATCH * WIDTH, WIDTH, 1)


class Attends(nn.Module):
    """Sequence first, as torch's own layers do it: behind a kernel of torch `contiguous` has nothing to copy."""

    def __init__(self, look: str) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.look = look
        self.register_buffer("mask", torch.randn(LENGTH, LENGTH))

    def around(self) -> AbstractContextManager[object]:
        """What torch exports as a graph inside of the graph."""
        if self.look == "without autocast":
            return torch.autocast("cpu", enabled=False)
        return torch.no_grad() if self.look == "without gradients" else nullcontext()

    def forward(self, x: Tensor) -> Tensor:
        q = self.into(x).view(LENGTH, BATCH * HEADS, -1).transpose(0, 1).view(BATCH, HEADS, LENGTH, -1)
        with self.around():
            made = functional.scaled_dot_product_attention(q, q, q, self.mask)
        made = made.permute(2, 0, 1, 3)
        if self.look == "a copy by strides":
            made = made.clone(memory_format=torch.contiguous_format).as_strided(SIZES, STRIDES)
        elif self.look == "strides":
            made = made.contiguous().as_strided(SIZES, STRIDES)
        else:
            made = made.contiguous().view(LENGTH * BATCH, WIDTH)
        return (self.out(made).view(SIZES) - x).square().mean()


@pytest.mark.parametrize("look", ["a view", "without autocast", "without gradients", "a copy by strides"])
def test_it_may_lie_otherwise_than_behind_torchs_kernels(look: str) -> None:
    case = Case(Attends(look), {"x": torch.randn(SIZES)})
    off, where = difference(PlanSampler(case.graph, mesh_of(2)).draw(0), case)
    assert off <= 1e-5, where


def test_strides_written_for_torchs_kernels_are_refused() -> None:
    with pytest.raises(TraceError, match=r"as_strided at .*test_attention_layout.py.*\(64, 16, 4, 1\).*clone"):
        capture(Attends("strides"), (torch.randn(SIZES),), {})
