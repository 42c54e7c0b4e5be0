"""A plan against a model, its inputs and a mesh: the first difference is named, with both values."""

import pytest
import torch
from torch import nn

from autopar.errors import PlanMismatch
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.plan.store import check, dumps
from autopar.search import search
from tests.plan.nets import MESH, Net, net_graph, trace
from tests.support.machines import FAST


def message(plan, graph: Graph, mesh: Mesh = MESH, **options) -> str:
    with pytest.raises(PlanMismatch) as caught:
        check(plan, graph, mesh, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def graph_of(model: nn.Module, batch: int = 16, length: int = 8) -> Graph:
    ids = torch.zeros(batch, length, dtype=torch.int64)
    return trace(model, ids=ids, labels=ids)


def test_a_plan_fits_what_it_was_made_for(plan, graph):
    check(plan, graph, MESH)
    check(plan, net_graph(), MESH, outputs="sharded")
    check(Plan.loads(dumps(plan), "a plan"), graph, MESH)


def test_another_batch_is_told(plan):
    assert message(plan, net_graph(batch=32)) == (
        "the plan was made for input ['ids'] int64[16, 8], this call passes int64[32, 8]; pass what it was made for, "
        "or run `python -m autopar.search` again to make a new plan"
    )


def test_another_mesh_is_told(plan, graph):
    told = message(plan, graph, Mesh(("data", "tensor"), (2, 4)), origin="plan.json")
    assert told.startswith("plan.json was made for mesh data=4,tensor=2, this mesh is data=2,tensor=4; ")
    assert "this mesh is dp=4,tp=2" in message(plan, graph, Mesh(("dp", "tp"), (4, 2)))


def test_other_outputs_are_told(plan, graph):
    assert "outputs='sharded', this call asks for outputs='global'" in message(plan, graph, outputs="global")


def test_another_width_names_the_parameter(plan):
    told = message(plan, net_graph(width=32))
    assert "parameter embed.weight float32[96, 64], this model has float32[96, 32]" in told


def test_a_missing_parameter_is_told(plan):
    model = Net()
    model.layers[1].up.bias = None
    assert "parameter layers.1.up.bias float32[256], this model has none of that name" in message(plan, graph_of(model))


def test_a_renamed_parameter_is_told_with_a_new_one(plan):
    class Renamed(Net):
        def __init__(self):
            super().__init__()
            self.out = self.head
            del self.head

        def forward(self, ids, labels):
            object.__setattr__(self, "head", self.out)
            return super().forward(ids, labels)

    told = message(plan, graph_of(Renamed()))
    assert "parameter head.weight float32[96, 64], this model has none of that name, but parameter out.weight" in told


def test_a_new_parameter_is_told(plan):
    model = Net()
    model.layers[2].down.bias = nn.Parameter(torch.zeros(64))
    assert "parameters without layers.2.down.bias, this model has layers.2.down.bias float32[64]" in message(
        plan, graph_of(model)
    )


def test_another_precision_is_told(plan):
    assert "this model has float64[96, 64]" in message(plan, graph_of(Net().double()))


def test_another_buffer_is_told(plan):
    model = Net()
    model.closed = torch.zeros(1, 96, dtype=torch.bool)
    assert "buffer closed bool[96], this model has bool[1, 96]" in message(plan, graph_of(model))


def test_a_new_input_is_told(plan):
    class More(Net):
        def forward(self, ids, labels, scale):
            return super().forward(ids, labels) * scale.sum()

    ids = torch.zeros(16, 8, dtype=torch.int64)
    told = message(plan, trace(More(), ids=ids, labels=ids, scale=torch.ones(3)))
    assert "2 inputs without ['scale'], this call passes ['scale'] float32[3]" in told


def test_a_frozen_parameter_is_told(plan):
    model = Net()
    model.layers[0].up.weight.requires_grad_(False)
    assert "a model with a gradient for parameter layers.0.up.weight, this model has none" in message(
        plan, graph_of(model)
    )


def test_another_operator_is_told_with_its_line(plan):
    told = message(plan, graph_of(Net(act=torch.relu)))
    assert told.startswith("the plan was made for another model: ")
    assert "now the model (nets.py:" in told and "x = self.act(x)) is aten.relu.default" in told


def test_another_argument_is_told(graph, plan):
    model = Net()
    model.layers[1].norm.eps = 1e-3
    told = message(plan, graph_of(model))
    assert "layers.1.norm" in told and "1e-05" in told and "0.001" in told


def test_names_of_operators_do_not_count(plan, graph):
    from dataclasses import replace

    from autopar.ir.graph import Ref, map_refs

    def new(name: str) -> str:
        return f"other_{name}"

    def moved(ref: Ref) -> Ref:
        return Ref(new(ref.name), ref.index)

    nodes = tuple(
        replace(n, name=new(n.name), args=map_refs(n.args, moved), kwargs=map_refs(n.kwargs, moved))
        for n in graph.nodes
    )
    results = tuple(replace(r, ref=r.ref and moved(r.ref)) for r in graph.results)
    check(plan, Graph(nodes, results), MESH)


def test_results_that_are_other_values_are_told(plan, graph):
    from dataclasses import replace

    ends = list(graph.results)
    a, b = (i for i, r in enumerate(ends) if r.target in ("layers.0.norm.weight", "layers.0.norm.bias"))
    ends[a], ends[b] = replace(ends[a], ref=ends[b].ref), replace(ends[b], ref=ends[a].ref)
    assert "was another value than" in message(plan, Graph(graph.nodes, tuple(ends)))


class Branches(nn.Module):
    """Goes over names in an order of its own, as a set of them has in every process."""

    def __init__(self, *order: str) -> None:
        super().__init__()
        self.order = order
        self.parts = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

    def forward(self, x):
        made = {name: torch.tanh(self.parts[name](x * (1 if name == "a" else 2))) for name in self.order}
        return (made["a"] - made["b"]).square().mean()


class Swapped(Branches):
    def forward(self, x):
        made = {name: torch.tanh(self.parts[name](x * (1 if name == "b" else 2))) for name in self.order}
        return (made["a"] - made["b"]).square().mean()


def test_the_order_of_operators_that_do_not_need_each_other_is_of_no_account():
    one, other = (trace(Branches(*order), x=torch.zeros(16, 8)) for order in ("ab", "ba"))
    assert one.digest != other.digest
    plan = search(one, MESH, FAST)
    check(plan, other, MESH)
    assert "another model" in message(plan, trace(Swapped("a", "b"), x=torch.zeros(16, 8)))
