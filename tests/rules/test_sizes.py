"""What a body holds beside operands and results, by hand; `harness.py` compares its sizes with those of tensors."""

from __future__ import annotations

import pytest

from autopar.ir.graph import Node, Ref, TensorType
from autopar.rules.sizes import body_bytes

F, H = "float32", "bfloat16"


def softmax(op: str, dtype: str, count: int = 1) -> tuple[Node, tuple[TensorType, ...], tuple[TensorType, ...]]:
    refs = tuple(Ref(f"x{place}") for place in range(count))
    type = TensorType((8, 4), dtype)
    return Node("y", op, (*refs, 1, False), (), (type,), "forward", "", ""), (type,) * count, (type,)


# In bytes: a tensor of 8 x 4 is 128 in float32 and 64 in bfloat16, a row sum 32.
@pytest.mark.parametrize(
    ("body", "op", "dtype", "count", "held"),
    [
        ("log_softmax", "aten._log_softmax.default", F, 1, 128 + 128 + 32 - 128),  # shifted, raised, sums; then y
        ("log_softmax", "aten._log_softmax.default", H, 1, 128 + 128 + 32 - 64),  # all of it in float32
        ("softmax", "aten._softmax.default", F, 1, 128 + 128 + 32 - 128),
        ("log_softmax_backward", "aten._log_softmax_backward_data.default", F, 2, 128 + 128 + 32 - 128),
        ("log_softmax_backward", "aten._log_softmax_backward_data.default", H, 2, 3 * 128 + 32 - 64),
    ],
)
def test_softmax_over_a_split_dim_holds_what_stands_beside_each_other(
    body: str, op: str, dtype: str, count: int, held: int
) -> None:
    node, operands, outputs = softmax(op, dtype, count)
    assert body_bytes(body, node, operands, outputs) == held


def test_what_makes_less_than_its_result_holds_nothing_more() -> None:
    ids, table, rows = TensorType((6,), "int64"), TensorType((4, 64), F), TensorType((6, 64), F)
    node = Node("y", "aten.embedding.default", (Ref("w"), Ref("i")), (), (rows,), "forward", "", "")
    held = body_bytes("masked_lookup", node, (table, ids), (rows,))
    assert held == 6 * 64 * 4 + 6  # rows before those of others are blanked, and which those are
