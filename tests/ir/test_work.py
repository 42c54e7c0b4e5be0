"""The arithmetic of operators, counted from the calls that tracing finds."""

import pytest
import torch
from torch import nn

from autopar.ir.attention import ATTENTION, ATTENTION_BACKWARD, OPERANDS_OF_ATTENTION
from autopar.ir.graph import Node, Ref, TensorType
from autopar.ir.work import flops_of
from autopar.propose.strategies import operand_types
from autopar.trace import capture, graph_of

BATCH, HEADS, SEQUENCE, HEAD = 2, 4, 8, 16


class Attention(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.mix = nn.Linear(HEAD, HEAD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(x)
        return nn.functional.scaled_dot_product_attention(y, y, y, is_causal=self.is_causal).sum()


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_causal_mask_halves_attention_forward_and_backward(is_causal):
    graph = graph_of(capture(Attention(is_causal), (torch.randn(BATCH, HEADS, SEQUENCE, HEAD),), {}))
    one = 2.0 * BATCH * HEADS * SEQUENCE * SEQUENCE * HEAD
    found = {
        "backward" in node.op: flops_of(node, operand_types(node, graph.by_name))
        for node in graph.nodes
        if node.op in OPERANDS_OF_ATTENTION
    }
    share = 0.5 if is_causal else 1.0
    assert found == {False: (2 * one * share, "attention"), True: (5 * one * share, "attention")}


def test_attention_counts_keys_and_values_by_their_own_widths():
    """Two products forward, five backward: of q and k (twice more for their gradients), and of what v is made with."""

    def flops(op: str, *more: TensorType) -> float:
        q, k, v = (TensorType(shape, "bfloat16") for shape in ((2, 8, 16, 32), (2, 2, 24, 32), (2, 2, 24, 48)))
        grad = [TensorType((2, 8, 16, 48), "bfloat16")] if more else []
        types = (*grad, q, k, v, *more)
        refs = [Ref(f"x{place}") for place in range(len(types))]
        first = len(grad) + 3
        args = (*refs[:first], None, *refs[first:], *([None] if more else []), False, 1.0, 0.0, False)
        return flops_of(Node("a", op, args, (), ()), types)[0]

    one = 2.0 * 2 * 8 * 16 * 24
    more = TensorType((2, 8, 16, 48), "bfloat16"), TensorType((2, 8, 16), "float32")
    assert flops(ATTENTION) == one * (32 + 48)
    assert flops(ATTENTION_BACKWARD, *more) == one * (3 * 32 + 2 * 48)


def test_complex_numbers_take_the_arithmetic_of_their_parts():
    def flops(op: str, *args: object, shape: tuple[int, ...] = (6, 10)) -> tuple[float, str]:
        return flops_of(Node("x", op, args, (), (TensorType(shape, "complex64"),)), (TensorType((6, 8), "complex64"),))

    product = Node("mm", "aten.mm.default", (Ref("a"), Ref("b")), (), (TensorType((6, 10), "complex64"),))
    types = TensorType((6, 8), "complex64"), TensorType((8, 10), "complex64")
    assert flops_of(product, types) == ((4 + 4) * 6 * 8 * 10, "matmul")  # a sum for every product
    assert flops("aten.mul.Tensor", Ref("a"), 2) == (6 * 60, "elementwise")
    assert flops("aten.add.Tensor", Ref("a"), 2) == (2 * 60, "elementwise")
