"""The models that the command line is shown with: they are built without memory, have the right sizes, and trace."""

from collections.abc import Callable
from typing import Any

import pytest

from autopar.trace import capture, graph_of
from examples import gpt2, llama, mlp


@pytest.mark.parametrize(
    ("factory", "millions"),
    [
        (gpt2.build, 124.4),
        (gpt2.build_xl, 1557.6),
        (llama.build_1b, 1235.8),
        (llama.build_8b, 8030.3),
        (mlp.build, 537.0),
    ],
)
def test_a_factory_gives_shapes_of_the_published_size(factory: Callable[[], tuple[Any, ...]], millions: float) -> None:
    model, args, *kwargs = factory()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(value.is_meta for value in (*args, *(kwargs[0].values() if kwargs else ())))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize(
    ("example", "inputs"),
    [
        (lambda: gpt2.build(layers=2, width=32, heads=2, vocabulary=50, batch=4, sequence=16), 2),
        (lambda: llama.build(layers=2, width=64, hidden=96, vocabulary=50, batch=4, sequence=16), 2),
        (lambda: mlp.build(layers=2, width=16, hidden=32, batch=8), 2),
    ],
    ids=["gpt2", "llama", "mlp"],
)
def test_a_small_variant_traces_to_a_training_step(example: Callable[[], tuple[Any, ...]], inputs: int) -> None:
    model, args, *kwargs = example()
    graph = graph_of(capture(model, args, kwargs[0] if kwargs else {}))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {result.target for result in graph.results if result.kind == "gradient"} == trained
    assert sum(node.op == "input" for node in graph.nodes) == inputs
