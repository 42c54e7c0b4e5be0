"""How much arithmetic one operator does: flops as closed forms of its shapes, and the kind that picks the rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import NoneType
from typing import Any, NamedTuple

from autopar.ir import attention
from autopar.ir.attention import ATTENTION, ATTENTION_BACKWARD, CAUSAL_AT, DROPOUT_AT, OPERANDS_OF_ATTENTION
from autopar.ir.batch_norm import IN_PARTS, IN_PARTS_BACKWARD
from autopar.ir.equation import EINSUM, equation_of
from autopar.ir.graph import ITEMSIZE, Node, TensorType
from autopar.ir.outside import rule_in

# Operators whose result is another look at an operand's storage: they move nothing and hold nothing of their own.
VIEWS = (
    "aten.view.default",
    "aten.permute.default",
    "aten.expand.default",
    "aten.slice.Tensor",
    "aten.select.int",
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
    "aten.chunk.default",
    "aten.unbind.int",
    "aten.diagonal.default",
    "aten.view_as_real.default",
    "aten.view_as_complex.default",
    "autopar.share",
)


# Operators that draw numbers: running one again gives other values.
RANDOM = (
    "aten.native_dropout.default",
    "aten.rand",
    "aten.randn",
    "aten.randint",
    "aten.bernoulli",
    "aten.normal",
    "aten.multinomial",
    "aten._fused_dropout.",
    "aten._sample_dirichlet.",
    "aten._standard_gamma.",
    "aten.alpha_dropout.",
    "aten.binomial.",
    "aten.cauchy.",
    "aten.dropout.",
    "aten.exponential.",
    "aten.feature_alpha_dropout.",
    "aten.feature_dropout.",
    "aten.geometric.",
    "aten.log_normal.",
    "aten.poisson.",
    "aten.rrelu.",
    "aten.rrelu_with_noise.",
    "aten.rrelu_with_noise_functional.",
    "aten.uniform.",
)


def draws(node: Node) -> bool:
    """Whether the operator draws numbers; attention does where its probability of dropout is not zero, and dropout
    where it is asked for.
    """
    if node.op == "aten.native_dropout.default":
        return node.args[2] is not False and node.args[1] != 0
    if node.op == ATTENTION:
        return node.args[DROPOUT_AT[ATTENTION]] != 0.0
    return node.op.startswith(RANDOM)


# A value's way to the host and back: results of the first lie in the memory of the host.
STORE, FETCH = "autopar.store", "autopar.fetch"

# Lookups read as many rows of their table as they return, not the table: operator -> the table's place among operands.
LOOKUPS = {
    "aten.embedding.default": 0,
    "aten.index_select.default": 0,
    "aten.gather.default": 0,
    "aten.index.Tensor": 0,
}


# Products of groups of rows, each with a matrix of its own -> flops per entry of the left operand and column.
GROUPED = {
    "aten._grouped_mm.default": 2.0,
    "transformers.grouped_mm_fallback.default": 2.0,
    "transformers.grouped_mm_fallback_backward.default": 4.0,
}


# Products of rows with the matrices of their experts. They are sorted by expert before, and the results are put back.
EXPERTS = ("autopar.expert_mm.default", "autopar.expert_mm_weight.default")


def _widths(node: Node, operands: Sequence[TensorType]) -> tuple[int, int]:
    """How many numbers the rows have that meet, or that of which one is made of the other."""
    left, right, _ = operands
    return left.shape[2], right.shape[1 if node.op == EXPERTS[0] and node.args[3] else 2]


def _sorted_bytes(node: Node, operands: Sequence[TensorType]) -> int:
    """Bytes of all rows in the order of experts: those that are multiplied, and what is made of them or meets them."""
    return operands[2].numel * sum(_widths(node, operands)) * ITEMSIZE[operands[0].dtype]


class Loop(NamedTuple):
    """A recurrent layer, a step at a time. `weight`: place of its matrix; `products`: how often all rows of all steps
    meet it; `kernels`: that a step launches; `held`: numbers beside results while it runs, for each of a state.
    """

    weight: int
    products: int
    kernels: int
    held: int = 0


RECURRENT = {  # backward of a GRU makes its gates again, then gradients of both
    "autopar.lstm.default": Loop(3, 1, 7),
    "autopar.lstm_backward.default": Loop(4, 2, 6, 5),
    "autopar.gru.default": Loop(2, 1, 6),
    "autopar.gru_backward.default": Loop(3, 3, 4, 9),
    "autopar.rnn.default": Loop(2, 1, 2),
    "autopar.rnn_backward.default": Loop(2, 2, 3, 2),
}


def kernels_of(node: Node, operands: Sequence[TensorType]) -> int:
    """How many kernels an operator that computes something launches."""
    return RECURRENT[node.op].kernels * operands[0].shape[0] if node.op in RECURRENT else 1


def temporary_bytes(node: Node, operands: Sequence[TensorType]) -> int:
    """Bytes that an operator on these (local) operands holds beside its results while it runs: those that its program
    sees. What a kernel takes and gives back by itself is not known here.
    """
    if node.op in (IN_PARTS, IN_PARTS_BACKWARD) and _parts_here(node, operands) > 1:
        return operands[0].nbytes  # results of the parts, which are put together
    if node.op in OPERANDS_OF_ATTENTION:
        return attention.temporary_bytes(node, operands)
    if node.op in EXPERTS:
        return _sorted_bytes(node, operands) + 2 * operands[2].nbytes  # and their places, twice
    if node.op in RECURRENT:
        loop = RECURRENT[node.op]
        return (
            loop.held * math.prod(operands[0].shape[:2]) * operands[loop.weight].shape[1] * ITEMSIZE[operands[0].dtype]
        )
    if node.op == "aten.mse_loss.default" and not (len(node.args) > 2 and node.args[2] == 0):
        return operands[0].nbytes  # the mean is made in the storage of what it is the mean of
    return 0


def bytes_moved(node: Node, operands: Sequence[TensorType], outputs: Sequence[TensorType | None]) -> int:
    """Bytes that an operator reads and writes in device memory, of the given (local) operands and results.

    An operand that stands twice is read once; views move nothing.
    """
    if node.op in VIEWS:
        return 0
    if (outside := rule_in(node.outside, node.op)) is not None and outside.nbytes is not None:
        return _priced(outside.nbytes(node, operands, outputs), node, "nbytes")
    written = sum(out.nbytes for out in outputs if out is not None)
    table = LOOKUPS.get(node.op)
    read = {
        ref: written if place == table else type.nbytes
        for place, (ref, type) in enumerate(zip(node.operands, operands, strict=True))
    }
    if node.op in (IN_PARTS, IN_PARTS_BACKWARD) and _parts_here(node, operands) > 1:
        written += 2 * operands[0].nbytes  # the results of the parts, put together
    if node.op in EXPERTS:
        written += 2 * _sorted_bytes(node, operands)
    return sum(read.values()) + written


def _priced(found: Any, node: Node, what: str) -> Any:
    """What a rule from outside says that its operator costs. Raises ValueError where that is no cost."""
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if isinstance(found, (str, bool, NoneType)) or (is_number and not 0 <= found < math.inf):
        raise ValueError(f"the rule of {node.op} says {what} {found!r} of %{node.name}; give a number from 0")
    return found


def _parts_here(node: Node, operands: Sequence[TensorType]) -> int:
    """How many parts of the batch these (local) operands hold."""
    if node.op == IN_PARTS_BACKWARD:
        return next(type.shape[0] for type in operands[2:] if len(type.shape) == 2)  # of the mean
    y = node.outputs[0]
    assert y is not None
    return node.args[7] * operands[0].shape[0] // y.shape[0]


def flops_of(node: Node, operands: Sequence[TensorType]) -> tuple[float, str]:
    """(flops, kind) of the whole, unsplit operator. Kinds: matmul, attention, conv, elementwise.

    Attention forward is two products of 2*b*h*q*k*d, backward five of them (Dao 2023, section 3.1); with a causal mask,
    of half as much. A complex product is four real ones and two sums, a complex sum two. A Fourier transform counts as
    elementwise: it is memory that bounds it.
    """
    op = node.op
    if (outside := rule_in(node.outside, op)) is not None and outside.flops is not None:
        return _priced(outside.flops(node, operands), node, "flops"), outside.kind
    if op == EINSUM or op.startswith(("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.")):
        return (8.0 if _is_complex(operands[-1]) else 2.0) * _product_size(node, operands), "matmul"
    if op in OPERANDS_OF_ATTENTION:
        q, k, v = (type.shape for type in attention.operands_at(node, operands))
        scores = 2.0 * math.prod(q[:3]) * k[2] / (2 if node.args[CAUSAL_AT[op]] else 1)
        backward = op == ATTENTION_BACKWARD  # the scores again, and gradients of four products of two operands
        return scores * (3.0 * q[3] + 2.0 * v[3] if backward else q[3] + v[3]), "attention"
    if op in EXPERTS:
        return 2.0 * operands[2].numel * math.prod(_widths(node, operands)), "matmul"
    if op in RECURRENT:
        loop = RECURRENT[op]
        return 2.0 * loop.products * math.prod(operands[0].shape[:2]) * operands[loop.weight].numel, "matmul"
    if op in GROUPED:  # each row of the left operand belongs to one group, and meets the right operand of that one
        left, right = operands[:2]
        each = right.shape[0] if len(left.shape) > len(right.shape) else 1
        return GROUPED[op] * left.numel * right.shape[-1] / each, "matmul"
    if op == "aten.convolution.default":
        out = node.outputs[0]
        assert out is not None
        return 2.0 * out.numel * math.prod(operands[1].shape[1:]), "conv"
    if op == "aten.convolution_backward.default":
        return 2.0 * operands[0].numel * math.prod(operands[2].shape[1:]), "conv"
    each = 6 if op.startswith(("aten.mul.", "aten.div.")) else 2
    made = [out.numel * (each if _is_complex(out) else 1) for out in node.outputs if out is not None]
    return sum(made), "elementwise"


def _is_complex(type: TensorType) -> bool:
    return type.dtype.startswith("complex")


def _product_size(node: Node, operands: Sequence[TensorType]) -> float:
    if node.op != EINSUM:
        left, right = operands[-2:]
        return math.prod(left.shape) * right.shape[-1]
    terms = equation_of(str(node.args[0]))
    sizes: dict[str, int] = {}
    for letters, operand in zip((terms.left, terms.right), operands, strict=True):
        sizes.update(zip(letters, operand.shape, strict=True))
    sizes.pop("1", None)
    return math.prod(sizes.values())
