"""Where a model may be cut: of layers that train by a few added parameters, too; and what is said of schedules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.attach.staging import Staged
from autopar.errors import NotCut
from autopar.ir.mesh import Mesh
from autopar.rewrite.cast_once import in_rounds_of_stages
from autopar.search import answer, ask
from autopar.search.cuts import cut_by_owner
from autopar.search.orders import SCHEDULES, orders_of
from autopar.search.pipeline import Pipeline
from autopar.search.pipelines import find_pipeline
from autopar.trace import capture, graph_of
from tests.search.test_pipelines import ALONE
from tests.support.machines import FAST


class Added(nn.Module):
    """A frozen linear layer and two small matrices beside it that train (LoRA)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.norm_2, self.grow, self.shrink = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)
        self.requires_grad_(False)
        self.qkv = Added(nn.Linear(width, 3 * width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.shrink(nn.functional.gelu(self.grow(self.norm_2(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.norm, self.head = (one.requires_grad_(False) for one in (nn.LayerNorm(16), nn.Linear(16, 32)))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def test_each_stage_gets_one_layer_where_each_layer_trains_two_matrices() -> None:
    """The first places between what trains cannot be taken together; those where least crosses can."""
    ids, labels = torch.randint(32, (2, 8, 8))
    graph = graph_of(capture(Blocks(), (ids, labels), {}))
    found = find_pipeline(graph, Mesh(("pipe",), (2,)), FAST, 4, ALONE, schedule="zb-v")
    trains = [
        {result.target for result in plan.graph.results if result.kind == "gradient" and "blocks" in result.target}
        for plan in found.plans
    ]
    assert len(trains) == 4 and all(len(one) == 2 for one in trains) and len(set().union(*trains)) == 8


@pytest.mark.parametrize(("name", "stages"), [("1f1b", 2), ("zb-v", 3), ("gpipe", 4)])
def test_a_refusal_names_only_what_can_be_asked_for(name: str, stages: int) -> None:
    with pytest.raises(
        ValueError, match=f"^{name} has .* and {stages} are asked for; take one of .* for that$"
    ) as told:
        orders_of(name, 2, 4, stages)
    named = str(told.value).split("take one of ")[1].removesuffix(" for that").split(", ")
    assert {*named} <= {*SCHEDULES} and all(orders_of(one, 2, 4, stages) for one in named)
    assert ("zb-v" in named) == (stages == 2)


class Regression(nn.Module):
    """Two layers, and a loss that is made in many steps of little; `loss`: of which kind."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.first, self.last, self.loss = nn.Linear(16, 32), nn.Linear(32, 16), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.last(nn.functional.gelu(self.first(x)))
        if self.loss == "cosine":
            return nn.functional.cosine_embedding_loss(h, y, (y[:, 0] > 0) * 2 - 1)
        weight = self.last.weight
        return nn.functional.mse_loss(h, y) + 0.01 * torch.logdet(weight @ weight.T + torch.eye(16))


@pytest.mark.parametrize("loss", ["cosine", "logdet"])
def test_two_layers_are_two_stages_whatever_the_loss(loss: str) -> None:
    """Where least crosses lies behind all that trains; and a graph with a constant that is no number reads back."""
    graph = graph_of(capture(Regression(loss), (torch.randn(8, 16), torch.randn(8, 16)), {}))
    found = find_pipeline(graph, Mesh(("pipe",), (2,)), FAST, 2, ALONE)
    assert all(any(result.kind == "gradient" for result in plan.graph.results) for plan in found.plans)
    assert Pipeline.loads(found.dumps(), "here").dumps() == found.dumps()


class Tied(nn.Module):
    """Words, and layers, and the words again."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("rows", [1, 3])
def test_another_batch_is_cut_where_the_parameters_lie_though_the_first_stage_has_a_tied_one_alone(rows: int) -> None:
    graphs = [graph_of(capture(Tied(), (*torch.randint(32, (2, count, 6)),), {})) for count in (8, rows)]
    first = Staged.of(find_pipeline(graphs[0], Mesh(("pipe", "data"), (2, 1)), FAST, 2, ALONE, stages_per_rank=3))
    assert [*first.owners["words.weight"]] == [0, 5]
    asked = ask(in_rounds_of_stages(graphs[1], 1), Mesh(("data",), (1,)), FAST)
    ends, _ = cut_by_owner(answer(asked, ALONE), first.owners, 6, asked.pricer)
    assert len(ends) == 5 and ends[0] <= 2
    with pytest.raises(NotCut, match=r"read here, and an earlier stage holds it.* compile the model with a call"):
        cut_by_owner(answer(asked, ALONE), {**first.owners, "layers.2.1.weight": (0,)}, 6, asked.pricer)
