"""What forward draws from Python's and numpy's own generators is what rank 0 draws, whatever the others would."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

import autopar
from tests.attach import test_drawn_in_branches, test_drawn_known
from tests.attach.test_drawn import CALLS, FORMS, WIDTH, Layer
from tests.attach.test_drawn_in_branches import Layers
from tests.processes.compare import near, same_gradients
from tests.processes.worker import Ranks

ROWS = 8
SHAPE = test_drawn_in_branches.ROWS, test_drawn_in_branches.WIDTH


def _trains(ranks: Ranks, plain: nn.Module, parallel: Any, *, local: bool = False, shape: Any = (ROWS, WIDTH)) -> None:
    count = ROWS // ranks.count
    own = slice(count * ranks.rank, count * (ranks.rank + 1)) if local else slice(None)
    for seed in range(CALLS):
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
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


def check_all_ranks_go_the_way_that_rank_zero_draws(ranks: Ranks) -> None:
    """Also ways, places and sizes; and in branches, of which each rank would take another one."""
    for form in (*test_drawn_in_branches.FORMS, *test_drawn_known.FORMS):
        plain = Layers(form).double()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the model is traced and planned for the")
            _trains(ranks, plain, autopar.compile(copy.deepcopy(plain), ranks.mesh()), shape=SHAPE)


def check_generators_that_are_alike_stay_alike(ranks: Ranks) -> None:
    for form in (test_drawn_in_branches.at_each_layer, test_drawn_known.of_modules, test_drawn_known.until_it_fits):
        plain, behind = Layers(form), []
        for model in (plain, autopar.compile(copy.deepcopy(plain), ranks.mesh())):
            random.seed(3), np.random.seed(3)
            for seed in range(3):
                model(torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)))
            behind.append((random.random(), float(np.random.rand())))
        assert behind[0] == behind[1], form.__name__


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
