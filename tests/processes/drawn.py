"""What forward draws from Python's and numpy's own generators is what rank 0 draws, whatever the others would."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn

import autopar
from tests.attach.test_drawn import CALLS, FORMS, WIDTH, Layer
from tests.processes.compare import near, same_gradients
from tests.processes.worker import Ranks

ROWS = 8


def _trains(ranks: Ranks, plain: nn.Module, parallel: Any, *, local: bool = False) -> None:
    count = ROWS // ranks.count
    own = slice(count * ranks.rank, count * (ranks.rank + 1)) if local else slice(None)
    for seed in range(CALLS):
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for model, rows, start in ((plain, slice(None), 0), (parallel, own, ranks.rank)):
            random.seed(100 * start + seed), np.random.seed(100 * start + seed)
            model.zero_grad()
            loss = model(x[rows])
            loss.backward()
            if model is plain:
                wanted = loss.detach()
        near(loss, wanted, 1e-12, "loss", 1e-12)
        same_gradients(plain, parallel)


def check_all_ranks_have_what_rank_zero_draws(ranks: Ranks) -> None:
    for name, form in FORMS.items():
        plain = Layer(form).double()
        _trains(ranks, plain, autopar.compile(copy.deepcopy(plain), ranks.mesh()))
        if name != "mixed":  # whose rows go anywhere
            _trains(ranks, plain, autopar.compile(copy.deepcopy(plain), ranks.mesh(), inputs="local"), local=True)


def check_stages_have_it(ranks: Ranks) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(FORMS[name]) for name in ("scaled", "in_a_method", "of_arrays", "skips"))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer.form(layer, x)
            return x.square().mean()

    plain = Deep().double()
    _trains(ranks, plain, autopar.compile(copy.deepcopy(plain), autopar.init_mesh("cpu", pipe=2)))
