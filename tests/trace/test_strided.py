"""What counts places in memory becomes views of values, whatever the layout that a plan gives these values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import TraceError
from autopar.trace import capture, lower
from autopar.trace.strided import MADE, READ, WRITE, in_memory
from tests.support.check import difference, mesh_of
from tests.support.families import Case
from tests.support.plans import PlanSampler


class LastChannels(nn.Module):
    """A layer norm over channels leaves them last in memory; torch then pools by as_strided, forth and back."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 12, 3, padding=1), nn.LayerNorm(12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1)).square().mean()


class Window(nn.Module):
    """Frames of 6 that overlap by 4, of a signal that lies transposed in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(5, 12), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.into(x).transpose(0, 1)  # [12, 4], in memory [4, 12]
        return self.head(y.as_strided((4, 4, 6), (12, 2, 1))).square().mean()


def worst(case: Case) -> float:
    sampler = PlanSampler(case.wide_graph, mesh_of(2))
    return max(difference(plan, case)[0] for plan in (sampler.best(), *(sampler.draw(seed) for seed in range(5))))


def test_pooling_of_last_channels_is_views() -> None:
    case = Case(LastChannels(), {"x": torch.randn(4, 3, 6, 6)})
    traced = {str(node.target) for node in case.captured.joint.graph.nodes}
    assert {READ, WRITE} <= traced, "torch pools otherwise by now: this test has nothing to test"
    assert not {READ, WRITE} & {node.op for node in case.graph.nodes}
    assert worst(case) <= 1e-12


def test_overlapping_windows_read_a_copy_that_lies_as_in_the_trace() -> None:
    case = Case(Window(), {"x": torch.randn(4, 5)})
    assert READ in {node.op for node in case.graph.nodes}
    assert worst(case) <= 1e-12


class Made(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        fresh = torch.empty_strided((6, 4), (1, 6), dtype=x.dtype).copy_(x)
        return (x.new_empty_strided((6, 4), (1, 6)).copy_(fresh) * x).sum()


def test_what_is_made_with_strides_is_made_without() -> None:
    case = Case(nn.Sequential(nn.Linear(4, 4), Made()), {"input": torch.randn(6, 4)})
    traced = {str(node.target) for node in case.captured.joint.graph.nodes}
    assert set(MADE) <= traced and not any("strided" in node.op for node in case.graph.nodes)
    assert worst(case) <= 1e-12


class Beyond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[2:].as_strided((2, 4), (4, 1), 0).sum() + x.sum()


def test_what_reaches_beyond_its_operand_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Beyond())
    with pytest.raises(TraceError, match=r"as_strided with sizes \(2, 4\) and strides \(4, 1\) reaches beyond"):
        lower(capture(model, (torch.randn(4, 4),), {}))


@pytest.mark.parametrize(
    ("size", "stride", "order"),
    [
        ((2, 3, 4), (12, 4, 1), (0, 1, 2)),
        ((2, 3, 4), (12, 1, 3), (0, 2, 1)),
        ((2, 1, 4), (4, 99, 1), (1, 0, 2)),
        ((2, 3), (0, 1), None),
        ((2, 3), (4, 1), None),
        ((3, 3), (1, 1), None),
    ],
)
def test_the_order_in_memory(size: tuple[int, ...], stride: tuple[int, ...], order: tuple[int, ...] | None) -> None:
    assert in_memory(size, stride) == order
