"""What forward gives that lies in one memory with arguments, buffers or other outputs, and what does not."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.compare import near
from tests.support.handed import HandsOn


def leaves_of(given: Any) -> list[Tensor]:
    h, there, looks, (*detached, named), *apart = given
    return [h, *there, *looks, *detached, named["h"], *(one for part in apart for one in part)]


def test_what_lies_in_one_memory_is_what_does_in_the_model(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = HandsOn()
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    for call in range(3):
        found: list[list[Tensor]] = []
        for model in (plain, parallel):
            torch.manual_seed(call)
            x, mask = torch.randn(3, 4), torch.ones(2, dtype=torch.bool)
            leaves = leaves_of(model(x, mask))
            for one_of_them, held in zip(leaves[1:6], (x, mask, *model.buffers()), strict=True):
                assert one_of_them is held
            values = [*leaves, model.last, x, mask, *model.buffers()]
            with torch.no_grad():
                for place, value in enumerate(values):
                    value.logical_not_() if value.dtype == torch.bool else value.mul_(2).add_(place)
            found.append(values)
        ours, theirs = (
            [[a.untyped_storage()._cdata == b.untyped_storage()._cdata for b in of] for a in of] for of in found
        )
        assert ours == theirs
        for place, (mine, other) in enumerate(zip(*reversed(found), strict=True)):
            near(mine.double(), other.double(), 1e-5, f"value {place} of call {call}")


class Follows(nn.Module):
    """Sets a buffer to another tensor; who has the old one keeps that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before, h = self.mean, self.layer(x) - self.mean
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.count = self.count + 1
        return h, self.mean, before


def test_who_has_a_buffer_that_forward_sets_keeps_its_old_values(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Follows()
    parallel: Any = autopar.compile(copy.deepcopy(plain), one)
    had: list[list[Tensor]] = [[], []]
    for call in range(4):
        for model, held in zip((plain, parallel), had, strict=True):
            torch.manual_seed(call)
            state = model.state_dict()
            h, mean, before = model(torch.randn(3, 4))
            assert mean is model.mean
            held += [h, mean, before, state["mean"], state["count"]]
            model.mean.mul_(0.5)
    for place, (ours, theirs) in enumerate(zip(had[1], had[0], strict=True)):
        near(ours.double(), theirs.double(), 1e-5, f"value {place}")
    assert parallel.count.item() == 4 and len(parallel._autopar.prepared()) == 1
