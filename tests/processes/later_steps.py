"""Steps of a pipeline behind its first: traced again, of other batches, with other layers that train."""

from __future__ import annotations

import unittest
import unittest.mock

import torch

import autopar
from autopar.measure.memory import LiveBytes
from tests.processes.pipelines import Blocks, mesh_of
from tests.processes.worker import Ranks


class Labelled(Blocks):
    """`label` is read, and means nothing."""

    label = "before"

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y if self.label else x)


def check_stages_that_are_traced_again_keep_their_plans(ranks: Ranks) -> None:
    """What they run again or move for want of memory among it."""
    parallel = autopar.compile(Labelled().double(), mesh_of(ranks))
    x, y = torch.rand(2, 8, 8, dtype=torch.float64)
    wanted = parallel(x, y)
    wanted.backward()
    parallel.label = "after"
    with unittest.mock.patch("autopar.attach.staging.answer", side_effect=AssertionError("searched again")):
        loss = parallel(x, y)
    loss.backward()
    assert float(loss) == float(wanted)
    assert len(parallel._autopar.prepared()) == 2


def check_later_steps_hold_no_more_than_they_may(ranks: Ranks) -> None:
    """Of a batch that is smaller, or with a layer frozen; one that cannot be had in so much is refused."""
    x, y = torch.rand(2, 2048, 8)
    most = autopar.compile(Blocks(), mesh_of(ranks), micro_batches=2, example_inputs=(x, y)).pipeline.peak_bytes
    limit = 0.8 * most
    parallel = autopar.compile(Blocks(), mesh_of(ranks), micro_batches=2, memory=int(limit), example_inputs=(x, y))

    def held(batch: int) -> None:
        parallel(x[:batch], y[:batch]).backward()
        live = LiveBytes()
        live.watch([*parallel.parameters(), x, y])
        with live:
            parallel(x[:batch], y[:batch]).backward()
        assert live.peak <= 1.02 * limit, (batch, live.peak, limit)

    held(2048)
    held(2000)
    parallel.layers[1][0].requires_grad_(False)
    held(2048)
    with unittest.TestCase().assertRaisesRegex(autopar.Infeasible, "no pipeline .* fits in .* per rank"):
        parallel(torch.rand(16384, 8), torch.rand(16384, 8))
