"""What capture keeps and what it refuses: ties, buffers, inputs and outputs of any shape, modes, the user's model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import TraceError
from autopar.ir.graph import Graph
from autopar.trace import capture, lower, normalise
from tests.support.check import difference, mesh_of
from tests.support.families import Case, family
from tests.support.plans import PlanSampler


def graph_of(model: nn.Module, *args: Any, **kwargs: Any) -> Graph:
    return normalise(lower(capture(model, args, kwargs)))


def sources(graph: Graph, op: str) -> list[str]:
    return [node.target for node in graph.nodes if node.op == op]


def results(graph: Graph, kind: str) -> dict[str, bool]:
    """target -> whether there is a value"""
    return {result.target: result.ref is not None for result in graph.results if result.kind == kind}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).square().mean()


def test_a_tied_weight_is_one_parameter_with_one_gradient_under_its_first_name() -> None:
    case = Case(Tied(), {"ids": torch.randint(0, 20, (4, 6))})
    assert sources(case.graph, "parameter") == ["embed.weight"]
    assert results(case.graph, "gradient") == {"embed.weight": True}
    assert difference(PlanSampler(case.wide_graph, mesh_of(2)).best(), case)[0] <= 1e-12


def test_a_module_under_two_names_is_one_module() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)
            self.two = self.one

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(x))).sum()

    case = Case(Twice(), {"x": torch.randn(4, 8)})
    assert sources(case.graph, "parameter") == ["one.weight", "one.bias"]
    assert results(case.graph, "gradient") == {"one.weight": True, "one.bias": True}
    assert difference(PlanSampler(case.wide_graph, mesh_of(2)).best(), case)[0] <= 1e-12


def test_a_shared_buffer_that_is_written_is_one_buffer() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.BatchNorm1d(8)
            self.two = self.one

        def forward(self, x: Tensor) -> Tensor:
            return (self.two(x) * x).sum()

    case = Case(Shared().train(), {"x": torch.randn(4, 8)})
    assert sorted(sources(case.graph, "buffer")) == ["one.num_batches_tracked", "one.running_mean", "one.running_var"]
    assert difference(PlanSampler(case.wide_graph, mesh_of(2)).best(), case)[0] <= 1e-12


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.two.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x)).square().sum()

    case = Case(Frozen(), {"x": torch.randn(4, 8)})
    gradients = results(case.graph, "gradient")
    assert {name for name, there in gradients.items() if there} == {"one.weight", "one.bias"}
    assert difference(PlanSampler(case.wide_graph, mesh_of(2)).best(), case)[0] <= 1e-12


def test_a_buffer_that_forward_writes_is_a_result_and_one_that_it_reads_is_not() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.weight = nn.BatchNorm1d(8), nn.Parameter(torch.randn(8))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("table", torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return (self.norm(x * self.weight) * self.table).square().sum()

    case = Case(Counting().train(), {"x": torch.randn(4, 8)})
    written = {"steps", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert results(case.graph, "buffer") == dict.fromkeys(written, True)
    assert set(sources(case.graph, "buffer")) >= {"table", "steps"}
    assert difference(PlanSampler(case.wide_graph, mesh_of(2)).best(), case)[0] <= 1e-12
    trained = {node.op for node in case.graph.nodes}
    asleep = {node.op for node in normalise(lower(capture(case.model.eval(), (), case.inputs))).nodes}
    assert trained != asleep, "train and eval mode are different programs"


class Several(nn.Module):
    """Nested inputs of several kinds, and a dictionary of outputs: a tuple in it, a number, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair: tuple[Tensor, Tensor], scale: float, *, flag: bool, more: dict[str, Any]) -> dict[str, Any]:
        x = self.linear(pair[0]) * scale + pair[1]
        if flag:
            x = x + more["shift"]
        return {"loss": x.square().mean(), "parts": (x, more["ids"] + 1), "count": 3, "nothing": more["none"]}


def test_inputs_and_outputs_of_any_structure() -> None:
    more = {"shift": torch.randn(8), "ids": torch.arange(4), "none": None}
    inputs = {"pair": (torch.randn(4, 8), torch.randn(4, 8)), "scale": 0.5, "flag": True, "more": more}
    case = Case(Several(), inputs)
    assert len(sources(case.graph, "input")) == 4
    assert results(case.graph, "gradient") == {"linear.weight": True, "linear.bias": True}
    kinds = results(case.graph, "output")
    assert sorted(index for index, there in kinds.items() if there) == ["0", "1", "2"]
    other = graph_of(Several(), **(inputs | {"flag": False}))
    assert other.digest != case.graph.digest, "a flag is part of the program"
    plan = PlanSampler(case.graph, mesh_of(2)).best()
    assert difference(plan, case)[0] <= 1e-5


def test_a_loss_outside_the_model_gives_the_output_a_tangent() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
    graph = graph_of(model, torch.randn(4, 8))
    assert sources(graph, "tangent") == ["0"]
    assert graph.by_name[next(n.name for n in graph.nodes if n.op == "tangent")].outputs[0].shape == (4, 6)  # type: ignore[union-attr]
    assert all(results(graph, "gradient").values())


def test_where_a_scalar_loss_exists_only_it_is_differentiated() -> None:
    assert sources(family("gpt2").graph, "tangent") == ["0"]
    assert all(
        type is not None and type.shape == ()
        for n in family("gpt2").graph.nodes
        if n.op == "tangent"
        for type in n.outputs
    )


def test_a_model_on_the_meta_device_gives_the_same_graph() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))

    with torch.device("meta"):
        empty = make()
    assert graph_of(empty, torch.randn(4, 8)).digest == graph_of(make(), torch.randn(4, 8)).digest
    assert all(parameter.is_meta for parameter in empty.parameters())


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that hangs on the modules, by identity; tensors also by value."""
    seen: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            inside = dict(value) if isinstance(value, dict) else {"": value}
            for key, part in inside.items():
                plain = isinstance(part, (bool, int, float, str))
                seen[f"{path}.{name}.{key}"] = part if plain else id(part)
    return seen


@pytest.mark.parametrize("name", ["cnn", "gpt2", "t5"])
def test_capture_leaves_the_model_as_it_is(name: str) -> None:
    case = family(name)
    model = copy.deepcopy(case.model)
    before = snapshot(model)
    tensors = {n: (t, t.detach().clone()) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    capture(model, (), case.inputs)
    assert snapshot(model) == before
    for n, t in [*model.named_parameters(), *model.named_buffers()]:
        assert t is tensors[n][0] and t.equal(tensors[n][1]) and t.grad is None


def test_control_flow_on_values_is_refused_with_its_line() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            while y.sum() > 0:  # refused
                y = -y
            return y.sum()

    with pytest.raises(TraceError) as refused:
        capture(Branching(), (torch.randn(4, 8),), {})
    told = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(told, 1) if text.strip().startswith("while y.sum()"))
    assert f"test_capture.py:{line} " in str(refused.value), str(refused.value)
    assert "Leave what is asked a tensor (torch.where" in str(refused.value)


def test_an_error_of_the_model_itself_names_its_line() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, torch.ones(3, 5))  # shapes do not fit

    with pytest.raises(TraceError, match=r"test_capture\.py:\d+"):
        capture(Wrong(), (torch.randn(4, 8),), {})


def test_values_that_are_read_twice_are_shared_and_equal_work_is_done_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return (torch.sin(y) + torch.cos(y) + torch.sin(y)).sum()

    graph = graph_of(Twice(), torch.randn(4, 8))
    assert len([n for n in graph.nodes if n.op == "aten.sin.default" and n.phase == "forward"]) == 1
    shared = [n for n in graph.nodes if n.op == "autopar.share" and n.phase == "forward"]
    assert shared, "the product is read by two nodes"


def test_a_product_with_a_dim_of_size_one_that_a_view_took_away():
    """A regression head: [b, 1] squeezed to [b]; its backward multiplies what a view gave a dim of size one."""

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = torch.nn.Linear(6, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.out(x).squeeze(1), y)

    graph = normalise(lower(capture(Head(), (), {"x": torch.randn(4, 6), "y": torch.randn(4)})))
    assert not [node.op for node in graph.nodes if node.op.startswith(("aten.mm", "aten.addmm"))]


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_tf32_of_convolutions_alone_does_not_keep_a_model_from_being_traced(precision: str) -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    try:
        cudnn.conv.fp32_precision = precision
        apart = cudnn.rnn.fp32_precision
        capture(nn.Conv1d(4, 4, 3), (torch.randn(2, 4, 8),), {})
        assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == (precision, apart)
    finally:
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before


class Skipping(nn.Module):
    """Layers that a draw skips while training, as in many a model of transformers."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.layers, self.chance = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]), chance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.chance:
                continue
            x = layer(x)
        return x.square().mean()


def test_a_layer_that_is_skipped_with_no_chance_at_all_is_not_control_flow() -> None:
    x = torch.randn(4, 6)
    for chance in (0.0, 0):
        graph = normalise(lower(capture(Skipping(chance), (x,), {})))
        products = [node for node in graph.nodes if node.op == "autopar.einsum"]
        assert len(products) == 3 + 3 + 2  # forward, gradients of the weights, gradients between the layers
    graph = normalise(lower(capture(Skipping(0.1), (x,), {})))
    assert any(node.op == "aten.where.self" for node in graph.nodes)  # as each draw says
