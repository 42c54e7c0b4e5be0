"""Parameters that do not train and that forward writes to: as on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import autopar
from autopar.errors import TraceError
from tests.processes.compare import near, same_gradients
from tests.support.teachers import HOW, Contrast, follow


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def same_values(parallel: nn.Module, plain: nn.Module, told: str) -> None:
    ours, theirs = parallel.state_dict(), plain.state_dict()
    assert [*ours] == [*theirs]
    for name, right in theirs.items():
        near(whole(ours[name]), right, 1e-5, f"{told}: {name}")


@pytest.mark.parametrize("how", HOW)
def test_a_teacher_and_a_queue_follow_as_on_one_process(how: str, one: DeviceMesh) -> None:
    """Also where calls without gradients, which leave them alone, come in between."""
    torch.manual_seed(0)
    plain = Contrast(how)
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (parallel, plain)]
    for step in range(7):
        x, y = torch.randn(2, 8, 8)
        for model, optimizer in zip((parallel, plain), optimizers, strict=True):
            model.train(step != 3)
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()
        same_gradients(plain, parallel)
        same_values(parallel, plain, f"step {step}")
    assert len(parallel._autopar.prepared()) == 2
    assert not any(held.requires_grad for held in parallel.key.parameters())


def test_one_that_trains_again_is_another_program_and_refused(one: DeviceMesh) -> None:
    parallel: Any = autopar.compile(Contrast("mul_"), one)
    inputs = torch.randn(2, 8, 8).unbind()
    parallel(*inputs)
    parallel.key.requires_grad_(True)
    with pytest.raises(TraceError, match="which trains"):
        parallel(*inputs)


def test_what_was_read_before_it_was_set_is_refused(one: DeviceMesh) -> None:
    class GoesOn(Contrast):
        @torch.no_grad()
        def follow(self) -> None:
            (teacher, *_), (student, *_) = self.key.parameters(), self.query.parameters()
            old = teacher.data
            follow("data =", teacher, student)
            self.change = (teacher.data - old).square().sum()

    with pytest.raises(TraceError, match="goes on with what it has read"):
        autopar.compile(GoesOn(), one)(*torch.randn(2, 8, 8).unbind())


def test_with_another_precision_it_is_refused(one: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(TraceError, match=r"parameter key\.\d\.\w+, which with precision= is stored"):
        autopar.compile(Contrast("lerp_"), one, precision=policy)(*torch.randn(2, 8, 8).unbind())
