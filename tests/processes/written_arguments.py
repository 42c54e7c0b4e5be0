"""Arguments that forward changes in place are on each rank what the plain model makes of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.attach.test_written_arguments import FORMS, ROWS, WIDTH, Layer, given, outcome
from tests.processes.compare import near, same_gradients
from tests.processes.worker import Ranks


def _steps(plain: nn.Module, parallel: Any) -> None:
    for number in range(2):
        found: list[list[Tensor]] = []
        for model in (plain, parallel):
            model.zero_grad()
            found.append(outcome(model, *given(number)))
        for place, (wanted, ours) in enumerate(zip(*found, strict=True)):
            if wanted.dtype != torch.bool:
                near(ours, wanted, 1e-12, f"value {place}", 1e-12)
        same_gradients(plain, parallel)


def check_whole_batches(ranks: Ranks) -> None:
    for form in FORMS:
        for outputs in ("auto", "sharded"):
            plain = Layer(form).double()
            _steps(plain, autopar.compile(copy.deepcopy(plain), ranks.mesh(), outputs=outputs))


def check_rows_of_each_rank(ranks: Ranks) -> None:
    """Each rank's own are changed, also by what hangs on all rows, and where a plan cuts no rows."""
    count = ROWS // ranks.count
    own = slice(count * ranks.rank, count * (ranks.rank + 1))
    for form in FORMS:
        plain = Layer(form).double()
        parallel = autopar.compile(copy.deepcopy(plain), ranks.mesh(), inputs="local")
        for number in range(2):
            (x, y), (mine, labels) = given(number), (one[own].clone() for one in given(number))
            plain(x, y), parallel(mine, labels)
            near(mine, x[own], 1e-12, form.__name__, 1e-12)
            assert torch.equal(labels, y[own]), form.__name__


def check_in_stages_and_micro_batches(ranks: Ranks) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x *= 2
            y += 1
            for layer in self.layers:
                x = layer(x).tanh()
            return (x * y.unsqueeze(-1)).square().mean()

    plain = Deep().double()
    _steps(plain, autopar.compile(copy.deepcopy(plain), ranks.mesh(), micro_batches=2))
    stages = init_device_mesh("cpu", (ranks.count,), mesh_dim_names=("pipe",))
    _steps(plain, autopar.compile(copy.deepcopy(plain), stages, micro_batches=2))
