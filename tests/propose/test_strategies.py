"""Every way to run a node: what divides, what is one strategy, and what each performs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.graph import Graph, Node
from autopar.ir.layout import REPLICATE, Partial, Shard
from autopar.measure.twin import traced
from autopar.plan.fit import check_rules
from autopar.propose.strategies import Strategy, operand_types, propose, signature_of
from autopar.search import Request, search
from cost_models.hardware import Hardware
from cost_models.steps import Compute, unrolled
from tests.support.check import mesh_of

R, SUM = REPLICATE, Partial("sum")


class Squares(nn.Module):
    """Products of a value with itself, and with another one of the same type, in both orders."""

    def __init__(self, other_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.other_first = other_first

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = x @ self.weight, y @ self.weight
        first, second = (x * y, x * x) if self.other_first else (x * x, x * y)
        return (first + second.sin()).sum()


def graph_of(model: nn.Module, *inputs: Tensor) -> Graph:
    return traced(model, inputs, {})


def products(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "aten.mul.Tensor" and node.phase == "forward"]


def moved(strategy: Strategy) -> float:
    (step,) = strategy.steps
    assert isinstance(step, Compute)
    return step.nbytes


@pytest.mark.parametrize("other_first", [True, False])
def test_a_value_that_stands_twice_is_read_once_whichever_product_comes_first(other_first: bool) -> None:
    graph = graph_of(Squares(other_first), torch.randn(8, 8), torch.randn(8, 8))
    found, _ = propose(graph, mesh_of(2))
    square, product = products(graph)
    if other_first:
        square, product = product, square
    assert len(set(square.operands)) == 1 and len(set(product.operands)) == 2
    nbytes = 8 * 8 * 4
    whole = [one for one in (*found[square.name], *found[product.name]) if one.takes == ((R,), (R,))]
    assert [moved(one) for one in whole] == [2 * nbytes, 3 * nbytes]
    for policy in (None, "data-parallel"):  # a plan is what its rules make, as it is read back
        check_rules(search(graph, mesh_of(2), Hardware.load("h100-sxm"), Request(policy=policy)))


def test_nodes_of_one_signature_share_their_strategies_whatever_their_operands_are_called() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x * y).sin() * (y * x).cos() + x * x

    x, y = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    graph = graph_of(Twice(), x, y)
    found, without = propose(graph, mesh_of(2))
    by_signature: dict[object, list[tuple[Strategy, ...]]] = {}
    for node in products(graph):
        key = signature_of(node, operand_types(node, graph.by_name))
        by_signature.setdefault(key, []).append(found[node.name])
    assert not without and sorted(map(len, by_signature.values())) == [1, 3]
    assert all(one is options[0] for options in by_signature.values() for one in options)


def test_a_product_splits_what_divides_and_takes_partial_sums() -> None:
    graph = graph_of(nn.Linear(6, 4, bias=False), torch.randn(8, 6))
    (node,) = [node for node in graph.nodes if node.op == "autopar.einsum" and node.phase == "forward"]
    for ranks, split in ((2, {"rows", "in", "out"}), (4, {"rows", "out"}), (3, {"in"}), (5, set[str]())):
        found, _ = propose(graph, mesh_of(ranks))
        gives = {(strategy.takes, strategy.gives[0]) for strategy in found[node.name]}
        told = {
            "rows": (((Shard(0),), (R,)), (Shard(0),)),
            "in": (((Shard(1),), (Shard(1),)), (SUM,)),
            "out": (((R,), (Shard(0),)), (Shard(1),)),
        }
        assert {name for name, one in told.items() if one in gives} == split
        assert (((R,), (R,)), (R,)) in gives, "nothing split"
        assert (((SUM,), (R,)), (SUM,)) in gives and (((R,), (SUM,)), (SUM,)) in gives, "linear in either"
        flops = {
            strategy.roles: sum(s.flops for s in unrolled(strategy.steps) if isinstance(s, Compute))
            for strategy in found[node.name]
        }
        whole = 2 * 8 * 6 * 4
        for roles, took in flops.items():
            is_split = bool(roles[0]) and not roles[0].startswith("+")
            assert took == (whole / ranks if is_split else whole)
