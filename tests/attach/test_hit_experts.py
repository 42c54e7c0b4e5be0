"""Loops over the experts that tokens have hit, as `nonzero` lists them: over all in a program."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from autopar import TraceError
from autopar.errors import CheckFailed
from tests.processes.compare import both_backward, same_gradients

WIDTH, EXPERTS = 6, 4
Loop = Callable[["Layer", Tensor, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """`mask` has a place more than there are experts, for tokens that go to none, as DBRX has it."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.gate, self.loop = nn.Linear(WIDTH, EXPERTS), loop
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        scores, chosen = torch.topk(self.gate(x).softmax(-1), 2)
        with torch.no_grad():
            mask = functional.one_hot(chosen + more, EXPERTS + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
        return self.loop(self, x, hit, mask, scores).square().mean()


def by_index(layer: Layer, x: Tensor, hit: Tensor, mask: Tensor, scores: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in hit:
        expert = expert[0]
        places, tokens = torch.where(mask[expert])
        made = x[tokens] @ layer.weights.view(-1, WIDTH, WIDTH)[expert]
        out.index_add_(0, tokens, made * scores[tokens, places, None])
    return out


def first_of_them(layer: Layer, x: Tensor, hit: Tensor, mask: Tensor, scores: Tensor) -> Tensor:
    first = None
    for expert in hit:
        _, tokens = torch.where(mask[expert[0]])
        first = x[tokens] if first is None else first
    assert first is not None
    return first.sum() + scores


def counted(layer: Layer, x: Tensor, hit: Tensor, mask: Tensor, scores: Tensor) -> Tensor:
    counts = dict[str, int]()
    for _ in hit:
        counts["all"] = counts.get("all", 0) + 1
    return scores * counts["all"]


def steps_alike(plain: Layer, parallel: nn.Module, rows: int) -> None:
    x = torch.randn(rows, WIDTH, dtype=torch.float64)
    plain.zero_grad(), parallel.zero_grad()
    both_backward(plain, parallel, x, torch.tensor(0), within=1e-12)
    same_gradients(plain, parallel)


def test_a_place_beyond_the_experts_is_asked_for_in_no_call(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Layer(by_index).double()
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for rows in (1, 1, 5):  # of few tokens some experts are not hit
        steps_alike(plain, parallel, rows)
    with pytest.raises(CheckFailed, match=r"IndexError at .*: index 4 is out of range for dim 0, which has 4 elements"):
        parallel(torch.randn(5, WIDTH).double(), torch.tensor(1))


@pytest.mark.parametrize("loop", [first_of_them, counted])
def test_what_all_turns_would_leave_is_refused(one: DeviceMesh, loop: Loop) -> None:
    parallel = autopar.compile(Layer(loop).double(), one)
    with pytest.raises(TraceError, match=r"a loop over them .of which nothing may stay but writes to rows: "):
        parallel(torch.randn(2, WIDTH).double(), torch.tensor(0))
