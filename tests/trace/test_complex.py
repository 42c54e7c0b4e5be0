"""Complex numbers in a graph: nothing is marked as conjugate, and products see the dims of what is conjugated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.graph import Graph
from autopar.trace import capture, lower, normalise
from tests.support.families import family

MARKS = ("aten._conj.", "aten._neg_view.", "aten.resolve_conj.", "aten.resolve_neg.", "aten._conj_copy.")


class Weighted(nn.Module):
    def __init__(self, forward: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.made, self.weight = forward, nn.Parameter(torch.randn(shape, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return self.made(self.weight, x).abs().sum()


def graph_of(model: nn.Module, *args: Tensor) -> Graph:
    return normalise(lower(capture(model, args, {})))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.cfloat)


@pytest.mark.parametrize("name", ["rotary", "fno", "parts"])
def test_nothing_is_marked_as_conjugate_or_negative(name: str) -> None:
    ops = [node.op for node in lower(family(name).captured).nodes]
    assert any(op.startswith(MARKS) for op in ops)
    made = [node.op for node in family(name).graph.nodes]
    assert "aten.conj_physical.default" in made and not [op for op in made if op.startswith(MARKS)]


def test_the_backward_of_a_product_conjugates_the_other_operand() -> None:
    """Behind the views that merge its dims: batch and sequence stay apart."""
    graph = graph_of(Weighted(lambda w, x: x @ w, 8, 6), numbers(4, 3, 8))
    (product,) = (node for node in graph.nodes if node.phase == "backward" and node.op == "autopar.einsum")
    conjugate = graph.by_name[product.operands[0].name]
    assert conjugate.op == "aten.conj_physical.default" and graph.by_name[conjugate.operands[0].name].target == "[0]"
    assert graph.type_of(product.operands[0]).shape == (4, 3, 8)


def test_a_conjugate_of_a_conjugate_is_the_tensor_itself() -> None:
    model = Weighted(lambda w, x: w.conj().reshape(6, 8).mT.conj() * x, 8, 6)
    forward = [node.op for node in graph_of(model, numbers(8, 6)).nodes if node.phase == "forward"]
    assert "aten.conj_physical.default" not in forward


def test_an_imaginary_part_of_a_conjugate_is_a_negative() -> None:
    model = Weighted(lambda w, x: w.conj().imag * x, 8, 6)
    assert "aten.neg.default" in [node.op for node in graph_of(model, numbers(8, 6)).nodes if node.phase == "forward"]


def test_a_conjugated_gradient_belongs_to_backward() -> None:
    """torch does not mark what it does last as backward."""
    graph = graph_of(Weighted(lambda w, x: torch.fft.hfft(w) * x.real, 4, 6), numbers(4, 10))
    (gradient,) = (result.ref for result in graph.results if result.kind == "gradient")
    assert gradient is not None and graph.by_name[gradient.name].op == "aten.conj_physical.default"
    assert graph.by_name[gradient.name].phase == "backward"


def test_a_conjugated_number_is_a_tensor_without_dims() -> None:
    graph = graph_of(Weighted(lambda w, x: (2 - 1j) * w * x, 4, 6), numbers(4, 6))
    made = [(node.args[0], str(node.outputs[0])) for node in graph.nodes if node.op == "aten.scalar_tensor.default"]
    assert made == [(2 + 1j, "complex128[]")]


def test_what_is_written_over_all_of_a_tensor_is_its_source() -> None:
    """And a tensor made like another is made without it: the gradient of a transform reads no other values."""
    ops = {node.op for node in family("fno").graph.nodes}
    assert not ops & {"aten.copy.default", "aten.new_empty_strided.default", "aten.new_zeros.default"}
