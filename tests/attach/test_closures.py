"""Functions that a model holds, and that look at it: those of a copy look at the copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.trace.modules import with_tensors
from tests.processes.compare import near, same_gradients


def _decorated(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @wraps(call)
    def outer(x: Tensor) -> Tensor:
        return 2.0 * call(x)

    return outer


class Tied(nn.Module):
    """The last product reads the embedding through a function, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embedding, self.norm, self.way = nn.Embedding(11, 8), nn.LayerNorm(8), way
        blocks = [nn.Linear(8, 8) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)

        def straight(x: Tensor) -> Tensor:
            return x @ self.embedding.weight.t()

        def deep(x: Tensor) -> Tensor:
            return straight(sum((block(x) for block in blocks), start=x))

        def again(x: Tensor, times: int = 2) -> Tensor:
            return straight(x) if times == 0 else again(self.norm(x), times - 1)

        def given(weight: nn.Parameter, x: Tensor) -> Tensor:
            return x @ weight.t()

        weight = self.embedding.weight
        self.calls: dict[str, Any] = {
            "its parameter": lambda x: x @ weight.t(), "its parameter as default": lambda x, w=weight: x @ w.t(),
            "variable": straight, "through another": deep, "recursive": again, "decorated": _decorated(straight),
            "default": lambda x, of=self.embedding: x @ of.weight.t(), "partial": partial(given, self.embedding.weight),
            "method": self.read,
        }  # fmt: skip
        self.deep = {"heads": [straight]}
        self.head = self.calls.get(way)

    def read(self, x: Tensor) -> Tensor:
        return x @ self.embedding.weight.t()

    def forward(self, ids: Tensor) -> Tensor:
        head = self.head or self.deep["heads"][0]
        logits = head(self.norm(self.embedding(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


WAYS = (
    "in a list of a dictionary",
    "its parameter",
    "its parameter as default",
    "variable",
    "through another",
    "recursive",
    "decorated",
    "default",
    "partial",
    "method",
)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_reads_itself_through_a_function_trains(one: DeviceMesh, way: str) -> None:
    torch.manual_seed(0)
    plain = Tied(way)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    ids, same = torch.randint(0, 11, (4, 6)), Tied(way)
    same.load_state_dict(before)
    parallel = autopar.compile(plain, one)
    parallel(ids)
    with torch.no_grad():
        for value in plain.parameters():
            value.data = torch.full_like(value, 7.0)  # what the parallel one computes has to be its own
    ours, theirs = parallel(ids), same(ids)
    near(ours, theirs, 1e-6, way)
    ours.backward()
    theirs.backward()
    same_gradients(same, parallel)


def test_what_looks_at_nothing_of_the_model_stays_the_same_object() -> None:
    counted: list[int] = []
    model = nn.Linear(2, 2)
    model.count = lambda: counted.append(1)
    model.register_forward_hook(lambda *_: counted.append(2))
    made = with_tensors(model, {})
    assert made.count is model.count
    assert [*made._forward_hooks.values()] == [*model._forward_hooks.values()]


def test_functions_that_share_a_variable_share_it_in_the_copy() -> None:
    model = nn.Linear(2, 2)
    now = model

    def turn() -> None:
        nonlocal now
        now = nn.Identity()

    def look() -> nn.Module:
        return now

    model.turn, model.look = turn, look
    made: Any = with_tensors(model, {})
    assert made.look() is made and model.look() is model
    made.turn()
    assert isinstance(made.look(), nn.Identity) and model.look() is model
