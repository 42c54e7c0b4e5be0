"""Checks of parameters stored in more pieces than micro-batches of stages read them in (ZeRO-1), on 4 ranks."""

# pyright: basic

from __future__ import annotations

import contextlib
import copy
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.attach import rows
from tests.processes.compare import loss_of, step_alike
from tests.processes.pipelines import NEAR, STEPS, doubled, mesh_of
from tests.processes.worker import Ranks
from tests.support.machines import machine


def check_parameters_are_stored_in_more_pieces(ranks: Ranks) -> None:
    """ZeRO-1 under AdamW and clipping; what is gathered and scattered once a step are the bytes of the plan. With a
    smaller eps a step goes by the sign of gradients that are none but for the rounding of the loss in float32.
    """
    for name, schedule in (("gpt2", "1f1b"), ("llama", "zb-h1")):
        model, inputs = doubled(name)
        plain = copy.deepcopy(model)
        parallel = autopar.compile(
            model, mesh_of(ranks), hardware=machine(1e10, flops=1e10), schedule=schedule, micro_batches=2,
            memory="4GiB", time_limit_s=10,
        )  # fmt: skip
        ours, theirs = (torch.optim.AdamW(one.parameters(), 1e-3, eps=1e-4) for one in (parallel, plain))
        for _ in range(STEPS):
            with _received() as received:
                step_alike((parallel, plain), (ours, theirs), inputs, NEAR)
            plan = parallel.pipeline.plans[dist.get_rank() // 2]
            apart = {node.target for node in plan.graph.nodes if plan.choices[node.name].stored}
            assert apart, f"{name}: no parameter is stored in more pieces than it is read in"
            once = [comm for comm in plan.comms() if comm.once]
            for kind, found in received.items():
                assert found == sum(comm.nbytes for comm in once if comm.collective == kind), (name, kind)
            for one in apart:
                held = parallel.get_parameter(one)
                assert held.to_local().numel() * 2 <= held.numel()
                (state,) = (ours.state[p]["exp_avg"] for p in ours.state if p is held)
                assert state.to_local().shape == held.to_local().shape
        state, right = parallel.full_state_dict(rank0_only=False), plain.state_dict()
        for key, value in state.items():
            assert torch.allclose(value, right[key], rtol=NEAR, atol=1e-8), f"{name}: {key}"
        with torch.no_grad():
            for one in parallel.parameters():
                one.mul_(1.5)
        parallel.load_state_dict(state)
        torch.testing.assert_close(loss_of(parallel(**inputs)), loss_of(plain(**inputs)), rtol=NEAR, atol=0)
        parallel.eval()
        with torch.no_grad():
            torch.testing.assert_close(loss_of(parallel(**inputs)), loss_of(plain.eval()(**inputs)), rtol=NEAR, atol=0)


@contextlib.contextmanager
def _received() -> Iterator[dict[str, int]]:
    """Bytes of what is gathered, and of what is scattered, once a step."""
    found = {"all_gather": 0, "reduce_scatter": 0}

    def gathered(*args: Any) -> torch.Tensor:
        made = gather(*args)
        found["all_gather"] += made.nbytes
        return made

    def scattered(value: torch.Tensor, *args: Any) -> torch.Tensor:
        found["reduce_scatter"] += value.nbytes
        return scatter(value, *args)

    gather, scatter, patched = rows.gathered, rows.scattered, unittest.mock.patch.object
    with patched(rows, "gathered", gathered), patched(rows, "scattered", scattered):
        yield found
