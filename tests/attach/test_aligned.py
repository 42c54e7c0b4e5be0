"""Products along an odd dim, padded as they are on GPUs: the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from autopar.attach import programs
from autopar.ir.graph import Graph
from autopar.trace import alignment, graph_of
from autopar.trace.alignment import aligned
from tests.processes.compare import same_gradients
from tests.support.check import mesh_of, worst_difference
from tests.support.families import Case
from tests.support.lockstep import run_all
from tests.support.plans import PlanSampler

WORDS, WIDTH = 101, 32


class Head(nn.Module):
    """A vocabulary of odd length, whose embedding is tied, and of which the logits are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(self.words(ids)).tanh())
        return {"loss": functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), "logits": logits}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_padded_product_gives_the_same_numbers(
    one: DeviceMesh, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    graphs: list[Graph] = []

    def on_a_gpu(*args: Any, **named: Any) -> Graph:
        graphs.append(aligned(graph_of(*args, **named)))
        return graphs[-1]

    monkeypatch.setattr(alignment, "LONG", 64)
    monkeypatch.setattr(alignment, "WORTH", 8)
    model = Head().to(dtype)
    ids, labels = torch.randint(0, WORDS, (2, 4, 16))
    wanted = autopar.compile(copy.deepcopy(model), one)
    before = wanted(ids, labels)
    monkeypatch.setattr(programs, "graph_of", on_a_gpu)
    parallel = autopar.compile(copy.deepcopy(model), one)
    made = parallel(ids, labels)
    padded = [node.name for node in graphs[0].nodes if node.op == "autopar.einsum" and 128 in node.outputs[0].shape]
    assert len(padded) == 2, "forward and the weight's gradient; the input's sums over it"
    assert [node.outputs[0].shape for node in graphs[0].nodes if node.op == "aten.constant_pad_nd.default"] == [
        (128, WIDTH), (4 * 16, 128), (128, WIDTH)
    ]  # fmt: skip
    for name in ("loss", "logits"):
        torch.testing.assert_close(made[name], before[name], rtol=0, atol=0)
    for out in (made, before):
        out["loss"].backward()
    same_gradients(wanted, parallel)


def test_short_even_and_exact_products_stay(one: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Head()
    ids, labels = torch.randint(0, WORDS, (2, 4, 16))
    graph = autopar.compile(model, one, example_inputs=(ids, labels)).plan.graph
    assert aligned(graph) is graph, "short"
    monkeypatch.setattr(alignment, "LONG", 64)
    monkeypatch.setattr(alignment, "WORTH", 8)
    assert aligned(graph) is graph, "float32"


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_any_legal_plan_of_a_padded_product_is_right(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    """All ranks in lockstep, in float64, against the model on one device."""
    for name, value in {"LONG": 64, "WORTH": 1, "HALVES": ("float64",)}.items():
        monkeypatch.setattr(alignment, name, value)
    ids, labels = torch.randint(0, WORDS, (2, 4, 16))
    case = Case(Head().requires_grad_(True), {"ids": ids, "labels": labels})
    graph = aligned(case.wide_graph)
    assert sum(node.op == alignment.PAD for node in graph.nodes) == 3
    sampler = PlanSampler(graph, mesh_of(*sizes))
    for seed in range(12):
        plan = sampler.draw(seed)
        ran, _ = run_all(plan, case.values(plan.graph), case.seed)
        off, where = worst_difference(ran, case.wide_reference)
        assert off <= 1e-9, f"seed {seed}: {where} is off by {off:.3g}"
