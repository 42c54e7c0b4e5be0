"""What goes wrong on one rank is told on all, and leaves nothing half done."""

from __future__ import annotations

import copy
import importlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar import PlanMismatch
from tests.processes.compare import adamw, same_state, same_steps
from tests.processes.errors import refused
from tests.processes.launch import COLLECTIVE_S
from tests.processes.models import batch, net
from tests.processes.worker import Ranks
from tests.support.machines import FAST

tensors: Any = importlib.import_module("autopar.attach.tensors")


def check_too_little_memory_for_the_pieces_of_one_rank(ranks: Ranks) -> None:
    """Laying parameters out fails in the middle: on all ranks, and the next call does it."""
    for count in (1, 3):
        plain = net()
        parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST)
        optimizer = adamw(parallel.parameters())
        piece_of, made = tensors.piece_of, list[int]()

        def too_much(*args: Any, count: int = count, made: list[int] = made, piece_of: Any = piece_of) -> Tensor:
            made.append(1)
            if len(made) == count and ranks.rank == 1:
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
            return piece_of(*args)

        tensors.piece_of = too_much
        try:
            refused(torch.OutOfMemoryError, "Tried to allocate 2.00 GiB", lambda p=parallel: p(**batch()))
        finally:
            tensors.piece_of = piece_of
        assert len(made) == count
        same_state(plain, parallel)
        same_steps(plain, parallel, batch(), (adamw(plain.parameters()), optimizer), steps=3)


def check_rank_zero_may_plan_for_longer_than_the_group_waits(ranks: Ranks) -> None:
    planner: Any = importlib.import_module("autopar.planner")
    find, group, waits_s = planner.answer, dist.group.WORLD, 3.0
    assert group is not None

    def slow(*args: Any, **wanted: Any) -> Any:
        time.sleep(1.5 * waits_s)
        return find(*args, **wanted)

    plain = net()
    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST, patience_s=waits_s)
    planner.answer = slow
    group.set_timeout(timedelta(seconds=waits_s))
    try:
        same_steps(plain, parallel, batch(), steps=2)
    finally:
        planner.answer = find
        group.set_timeout(timedelta(seconds=COLLECTIVE_S))


def check_ordinary_scripts_are_left_alone(ranks: Ranks) -> None:
    """What takes longer than the patience, and is no fault."""
    patience_s, plain = 3.0, net()

    def writes() -> None:
        if ranks.rank == 0:
            time.sleep(1.5 * patience_s)

    parallel = autopar.compile(plain, ranks.mesh(), hardware=FAST, patience_s=patience_s)
    optimizers = adamw(plain.parameters()), adamw(parallel.parameters())
    writes()  # before the first step
    same_steps(plain, parallel, batch(), optimizers, steps=2)
    parallel.full_state_dict()
    writes()
    same_steps(plain, parallel, batch(), optimizers, steps=2)
    copy.deepcopy(parallel).full_state_dict()
    with torch.no_grad():
        plain(**batch(2)), parallel(**batch(2))
    writes()
    same_steps(plain, parallel, batch(), optimizers, steps=2)
    time.sleep(1.5 * patience_s)  # a long step of all
    same_steps(plain, parallel, batch(), optimizers, steps=1)
    refused(PlanMismatch, "layout sparse_coo", lambda: parallel(**{k: as_sparse(v) for k, v in batch().items()}))
    loss = autopar.compile(plain, ranks.mesh(), hardware=FAST, patience_s=patience_s)(**batch())
    time.sleep(2.0)  # its module is gone, and backward comes
    loss.backward()
    same_steps(plain, parallel, batch(), optimizers, steps=1)


def as_sparse(value: Any) -> Any:
    return value.to_sparse() if isinstance(value, Tensor) and value.is_floating_point() else value
