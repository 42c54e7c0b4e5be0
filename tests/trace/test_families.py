"""What trace makes of real models: products over the dims of the model, a rule for every node, and the same values."""

import pytest
import torch
from torch import nn

from autopar.propose.strategies import propose
from autopar.trace import capture, graph_of
from tests.support.check import difference, mesh_of, worst_difference
from tests.support.families import FAMILIES, family
from tests.support.lockstep import run_all
from tests.support.plans import PlanSampler

PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.", "aten.linear.", "aten.matmul.")
HEADS = ("head", "lm_head", "cls.predictions.decoder", "classifier")  # what the loss reads


@pytest.mark.parametrize("name", FAMILIES)
def test_every_matrix_product_is_an_einsum(name: str) -> None:
    assert not [node.name for node in family(name).graph.nodes if node.op.startswith(PRODUCTS)]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_products_of_layers_see_batch_and_sequence_apart(name: str) -> None:
    """Forward and backward; not behind the loss, whose classes the model flattens to [batch * sequence, classes].

    OPT flattens its hidden states itself in front of the feed-forward layers, so it is not here;
    nor is `block`, whose last residual stream meets the loss with no norm between, and stays flat one product longer.
    """
    graph = family(name).graph
    merged = [
        f"{node.phase} {node.module}: {node.args[0]} {shapes}"
        for node in graph.nodes
        if node.op == "autopar.einsum" and node.module not in HEADS
        for shapes in [[graph.type_of(ref).shape for ref in node.operands]]
        if max(map(len, shapes)) == 2
    ]
    assert not merged
    assert {node.phase for node in graph.nodes if node.op == "autopar.einsum"} == {"forward", "backward"}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_node_has_a_rule(name: str) -> None:
    graph = family(name).graph
    _, without = propose(graph, mesh_of(2))
    assert not [f"%{name}: {graph.by_name[name].op}" for name in without]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_graph_on_one_rank_is_the_model(name: str) -> None:
    """float32: the same kernels, but products are cut otherwise and means divide last; 5e-6 of the largest entry.

    The CNN's biases in front of batch norm have a gradient of zero, and there rounding is all there is.
    """
    case = family(name)
    plan = PlanSampler(case.graph, mesh_of(1)).best()
    assert not plan.comm_bytes
    ran, _ = run_all(plan, case.values(case.graph))
    off, where = worst_difference(ran, case.reference)
    assert off <= (5e-6 if name != "cnn" else 1e-4), where
    off, where = difference(PlanSampler(case.wide_graph, mesh_of(1)).best(), case)
    assert off <= 1e-12, where


@pytest.mark.parametrize("name", FAMILIES)
def test_two_traces_are_one_program(name: str) -> None:
    case = family(name)
    again = graph_of(capture(case.model, (), case.inputs))
    assert again.digest == case.graph.digest


@pytest.mark.parametrize("name", FAMILIES)
def test_nodes_say_where_they_come_from(name: str) -> None:
    graph = family(name).graph
    told = [node for node in graph.nodes if not node.is_source and (node.module or node.source)]
    assert len(told) > 0.5 * sum(not node.is_source for node in graph.nodes)


def test_what_backward_sees_through_is_of_backward() -> None:
    """A view that a product of backward was given, of what forward had as another one, counted to forward (RG-LRU)."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(2, 8, 8)), nn.Parameter(torch.randn(2, 1, 8))
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.linear(x)
            blocks = hidden.reshape(-1, 2, 8).permute(1, 0, 2)
            gate = torch.baddbmm(self.bias, blocks, self.weight).transpose(0, 1).reshape(hidden.shape)
            return (gate.sigmoid() * hidden).square().mean()

    phases = [n.phase for n in graph_of(capture(Gated(), (torch.randn(4, 6, 16),), {})).nodes if not n.is_source]
    assert phases == sorted(phases, reverse=True)
