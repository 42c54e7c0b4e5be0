"""Which dims grow: followed through the graph, and compared with what the model traces to at another size."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.ir.graph import Graph, Ref
from autopar.scale import CannotGrow, Growth, growth_of, growth_where_possible, usual_sources
from autopar.scale.sizes import Part, are_equal, told
from autopar.trace import capture, graph_of
from tests.scale.retrace import TEXTS, growth, retraced
from tests.support.families import FAMILIES

QUICK = ("mlp", "block", "cnn", "gpt2")


def graph(model: nn.Module, *inputs: torch.Tensor) -> Graph:
    return graph_of(capture(model, (), dict(zip("xy", inputs, strict=False))))


def sizes(found: Growth, name: str, index: int = 0) -> list[str]:
    return [told(size) for size in found.dims[Ref(name, index)]]


def cases():
    for name in FAMILIES:
        marks = () if name in QUICK else (pytest.mark.slow,)
        yield pytest.param(name, "batch", 2, marks=marks)
        yield pytest.param(name, "batch", 5, marks=(pytest.mark.slow,))
        if name in TEXTS:
            yield pytest.param(name, "sequence", 2, marks=marks)


@pytest.mark.parametrize("name, which, times", [*cases()])
def test_shapes_are_those_of_a_trace_at_the_other_size(name, which, times):
    found, there = growth(name), retraced(name, which, times)
    values = {**found.base, which: found.base[which] * times}
    assert len(there.nodes) == len(found.graph.nodes)
    for ours, theirs in zip(found.graph.nodes, there.nodes, strict=True):
        assert ours.op == theirs.op
        for index, type in enumerate(theirs.outputs):
            if type is not None:
                assert found.type_at(Ref(ours.name, index), values) == type, f"%{ours.name} {ours.source}"


@pytest.mark.slow
def test_a_convolution_over_the_batch_is_refused():
    """The second derivative of one has the batch for its channels."""
    with pytest.raises(CannotGrow, match=r"convolution.* makes a size from batch in a way that is not known here"):
        growth("penalty")


class Apart(nn.Module):
    """Its positions are expanded to the batch, and never meet it again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        places = torch.arange(x.shape[1]).float()
        wide = places.expand(x.shape[0], -1)
        return self.linear(x + places[:, None]).square().mean() * (1 + wide.square().mean())


def test_what_only_an_argument_tells_is_listed():
    found = growth_of(graph(Apart(), torch.randn(6, 12, 8)), {"batch": [("['x']", 0)], "sequence": [("['x']", 1)]})
    assert [(ref.name, dim, told(size)) for ref, dim, size in found.assumed] == [("expand", 0, "batch")]
    assert growth("cnn").assumed == growth("mlp").assumed == growth("gpt2").assumed == ()


class Heads(nn.Module):
    """As many heads as there are sequences, and as long each as they are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        b, s, w = x.shape
        q = self.linear(x).view(b, s, 4, 8).transpose(1, 2)
        return functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(b * s, w).square().mean()


def test_a_size_is_known_by_where_it_comes_from_not_by_its_value():
    found = growth_of(graph(Heads(), torch.randn(4, 8, 32)), {"batch": [("['x']", 0)], "sequence": [("['x']", 1)]})
    attention = next(node for node in found.graph.nodes if "attention" in node.op and node.phase == "forward")
    assert sizes(found, attention.name) == ["batch", "4", "sequence", "8"]
    merged = [
        node.name for node in found.graph.nodes if node.outputs[0] is not None and node.outputs[0].shape == (32, 32)
    ]
    assert ["batch * sequence", "32"] in [sizes(found, name) for name in merged]  # and the weight has the same shape
    assert ["32", "32"] in [sizes(found, name) for name in merged]


class Positions(nn.Module):
    """A learnt vector for each position: it cannot see longer sequences."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(6, 10))

    def forward(self, x):
        return (x + self.positions).square().mean()


class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, stride=2)

    def forward(self, x):
        return self.conv(x).square().mean()


class Halves(nn.Module):
    def forward(self, x):
        return (x.view(2, -1, 10) * 3.0).square().mean()


SEQUENCE = {"batch": [("['x']", 0)], "sequence": [("['x']", 1)]}


def test_a_parameter_with_a_place_for_each_position_is_refused_with_its_line():
    given = graph(Positions(), torch.randn(4, 6, 10))
    with pytest.raises(
        CannotGrow, match=r"takes a size of 6 for sequence and for 6|takes a size of 6 for 6 and for seq"
    ):
        growth_of(given, SEQUENCE)
    found, why = growth_where_possible(given, SEQUENCE)
    assert [*found.base] == ["batch"] and "test_grow.py" in why["sequence"]


def test_a_size_that_no_rule_tells_is_refused():
    sources = {"batch": [("['x']", 0)], "sequence": [("['x']", 2)]}
    found, why = growth_where_possible(graph(Strided(), torch.randn(6, 4, 11)), sources)
    assert [*found.base] == ["batch"]
    assert "conv" in why["sequence"] and "makes a size from sequence in a way that is not known" in why["sequence"]


def test_a_batch_that_is_cut_in_the_middle_is_refused():
    found, why = growth_where_possible(graph(Halves(), torch.randn(8, 10)), {"batch": [("['x']", 0)]})
    assert not found.base and "makes a size from batch" in why["batch"]


def test_a_batch_of_one_is_refused():
    _, why = growth_where_possible(graph(Heads(), torch.randn(1, 8, 32)), SEQUENCE)
    assert "batch is 1 in this plan (dim 0 of ['x'])" in why["batch"]


def test_dims_that_are_not_there_are_refused():
    given = graph(Heads(), torch.randn(4, 8, 32))
    with pytest.raises(ValueError, match="no input 'z'; this plan has"):
        growth_of(given, {"batch": [("z", 0)]})
    with pytest.raises(ValueError, match="it has no dim 3"):
        growth_of(given, {"batch": [("['x']", 3)]})
    with pytest.raises(ValueError, match="dim 0 of \\['x'\\] is both batch and rows"):
        growth_of(given, {"batch": [("['x']", 0)], "rows": [("['x']", 0)]})
    with pytest.raises(ValueError, match="batch is 4 in one input and 8 in dim 1"):
        growth_of(given, {"batch": [("['x']", 0), ("['x']", 1)]})


def test_the_usual_sources():
    def dims(name: str) -> dict[str, list[tuple[str, int]]]:
        return {key: [*value] for key, value in usual_sources(growth(name).graph).items()}

    assert dims("cnn") == {"batch": [("['labels']", 0), ("['x']", 0)]}
    text = [("['input_ids']", 0), ("['labels']", 0)]
    assert dims("gpt2") == {"batch": text, "sequence": [(target, 1) for target, _ in text]}


def test_sizes_are_told_and_compared_as_products():
    size = (Part("batch", 0), Part("sequence", 1), Part("", 64))
    assert told(size) == "batch * (sequence + 1) * 64" and told(()) == "1"
    assert are_equal(size, (Part("", 8), Part("sequence", 1), Part("batch", 0), Part("", 8)))
    assert not are_equal(size, size[:2])
