"""Branches that are taken by values: by those of the whole batch, whoever has which rows of it, and with stages."""

from __future__ import annotations

import copy
from typing import Any

import autopar
from tests.processes.compare import near
from tests.processes.worker import Ranks
from tests.support import assigning, gathering
from tests.support.branching import FORMS, STEPS, TOKENS, Experts, alike, tokens

SMALL, NEAR = 1e-12, 1e-9


def _trains(ranks: Ranks, plain: Experts, parallel: Any, *, local: bool) -> None:
    count = TOKENS // ranks.count
    rows = slice(count * ranks.rank, count * (ranks.rank + 1)) if local else slice(None)
    for seed, used in enumerate(STEPS):
        x, bias = tokens(used, seed)
        wanted, found = plain(x, bias), parallel(x[rows], bias[rows])
        near(found, wanted, NEAR, "loss", SMALL)
        for model, loss in ((plain, wanted), (parallel, found)):
            model.zero_grad()
            loss.backward()
        alike(plain, parallel)


def check_experts_have_tokens_of_the_whole_batch(ranks: Ranks) -> None:
    for name in ("any_of_mask", "number_of_indices", "a_shaped_mask", "counted"):
        plain = Experts(FORMS[name]).double()
        _trains(ranks, plain, autopar.compile(copy.deepcopy(plain), ranks.mesh()), local=False)


def check_names_are_those_of_the_whole_batch(ranks: Ranks) -> None:
    forms = [form for name, form in assigning.FORMS.items() if not name.startswith("skips")]  # ranks draw other numbers
    for number, form in enumerate(forms):
        plain, local = Experts(form).double(), number % 2 == 1
        parallel = autopar.compile(copy.deepcopy(plain), ranks.mesh(), inputs="local" if local else "global")
        _trains(ranks, plain, parallel, local=local)


def check_lists_are_those_of_the_whole_batch(ranks: Ranks) -> None:
    for number, form in enumerate([*gathering.FORMS.values()][::4]):
        plain, local = Experts(form).double(), number % 2 == 1
        parallel = autopar.compile(copy.deepcopy(plain), ranks.mesh(), inputs="local" if local else "global")
        _trains(ranks, plain, parallel, local=local)


def check_an_expert_is_idle_that_no_rank_has_tokens_for(ranks: Ranks) -> None:
    for name in ("goes_on_where_none", "length_of_indices", "in_a_method"):
        plain = Experts(FORMS[name]).double()
        _trains(ranks, plain, autopar.compile(copy.deepcopy(plain), ranks.mesh(), inputs="local"), local=True)


def check_stages_have_idle_experts(ranks: Ranks) -> None:
    for name in ("any_of_mask", "number_of_indices"):
        plain = Experts(FORMS[name], depth=2).double()
        parallel = autopar.compile(copy.deepcopy(plain), autopar.init_mesh("cpu", pipe=2), micro_batches=2)
        _trains(ranks, plain, parallel, local=False)
