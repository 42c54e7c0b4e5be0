"""Three and four stages, each on one rank or cut over two: every schedule trains as one process does."""

from __future__ import annotations

import copy

import torch

import autopar
from autopar.attach.tensors import is_elsewhere
from tests.processes.compare import whole
from tests.processes.pipelines import Skipping, doubled, take_equal_gradients, train_alike
from tests.processes.worker import Ranks
from tests.support.machines import machine

# In how many stages so many ranks run, and over how many ranks each is cut.
GRID = {3: (3, 1), 4: (4, 1), 6: (3, 2), 8: (4, 2)}
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "interleaved-zb", "zb-v")
ON_A_RANK = {"interleaved": 2, "interleaved-zb": 2, "zb-v": 2}
QUICK = machine(1e10, flops=1e10)  # links on which layers are cut in pieces


def _compiled(ranks: Ranks, model: torch.nn.Module, schedule: str, micro_batches: int) -> torch.nn.Module:
    stages, tensor = GRID[ranks.count]
    mesh = autopar.init_mesh("cpu", pipe=stages, **({"tensor": tensor} if tensor > 1 else {}))
    return autopar.compile(
        model, mesh, hardware=QUICK, schedule=schedule, micro_batches=micro_batches, memory="4GiB", time_limit_s=10
    )


def check_every_schedule(ranks: Ranks) -> None:
    """A weight of two stages, and a value that skips those between; gradients to 1e-10."""
    stages, _ = GRID[ranks.count]
    for schedule in SCHEDULES:
        plain = Skipping(layers=3 * stages).double()
        parallel = _compiled(ranks, copy.deepcopy(plain), schedule, 2 * stages)
        for _ in range(2):
            x, y = torch.randn(2, 8 * stages, 8, dtype=torch.float64)
            loss, right = parallel(x, y), plain(x, y)
            loss.backward()
            right.backward()
            torch.testing.assert_close(whole(loss.detach()), right.detach(), rtol=1e-10, atol=1e-12)
            take_equal_gradients(parallel, plain, schedule)
        made = parallel.pipeline.schedule
        assert made.name == schedule and len(made.rank_of) == stages * ON_A_RANK.get(schedule, 1)


def check_models(ranks: Ranks) -> None:
    """Tied embeddings, an encoder beside a decoder, patches; two layers in three stages or four."""
    stages, _ = GRID[ranks.count]
    for name, schedule in (("gpt2", "1f1b"), ("t5", "zb-h1"), ("vit", "1f1b")):
        model, inputs = doubled(name)
        plain = copy.deepcopy(model)
        parallel = _compiled(ranks, model, schedule, 2)
        train_alike(parallel, plain, inputs, name)
        held = [one for one in parallel.parameters() if not is_elsewhere(one)]
        assert 0 < len(held) < len([*plain.parameters()]) and len(parallel.pipeline.plans) == stages
