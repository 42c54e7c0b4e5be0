"""What forward asks its arguments: of the whole batch, whoever has which rows of it, and with stages on ranks."""

from __future__ import annotations

import copy

import torch

import autopar
from tests.processes.compare import near, same_gradients
from tests.processes.worker import Ranks
from tests.support.ragged import BATCH, FORMS, LENGTHS, Asking, batch

SMALL, NEAR = 1e-12, 1e-9


def _trains(ranks: Ranks, plain: Asking, parallel: torch.nn.Module, *, local: bool) -> None:
    count = BATCH // ranks.count
    rows = slice(count * ranks.rank, count * (ranks.rank + 1)) if local else slice(None)
    for seed, lengths in enumerate(LENGTHS):
        x, given = batch(lengths, seed)
        wanted, found = plain(x, given), parallel(x[rows], given[rows])
        near(found, wanted, NEAR, "loss", SMALL)
        wanted.backward()
        found.backward()
        same_gradients(plain, parallel)


def check_all_ranks_have_one_answer(ranks: Ranks) -> None:
    for name in ("longest", "branches", "pairs", "each_that_is_there", "as_it_is_packed"):
        plain = Asking(FORMS[name])
        _trains(ranks, plain, autopar.compile(copy.deepcopy(plain), ranks.mesh()), local=False)


def check_rows_of_each_rank_are_asked_together(ranks: Ranks) -> None:
    for name in ("longest", "of_items", "branches", "each_that_is_there"):
        plain = Asking(FORMS[name])
        parallel = autopar.compile(copy.deepcopy(plain), ranks.mesh(), inputs="local")
        _trains(ranks, plain, parallel, local=True)
        assert len(parallel._autopar.prepared()) == 2


def check_stages_ask_too(ranks: Ranks) -> None:
    plain = Asking(FORMS["longest"])
    mesh = autopar.init_mesh("cpu", pipe=2, data=ranks.count // 2)
    parallel = autopar.compile(copy.deepcopy(plain), mesh, micro_batches=2)
    _trains(ranks, plain, parallel, local=False)
