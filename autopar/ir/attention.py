"""Attention as one operator, the same on every device: its name, its arguments, and which kernel runs it where.

    autopar.attention(q, k, v, bias, causal, scale, dropout, bias_grad) -> out, lse, state
    autopar.attention_backward(grad, q, k, v, bias, out, lse, state, causal, scale, dropout, bias_grad)
        -> dq, dk, dv, dbias

q is [batch, heads, s, d], k [batch, kv heads, t, d], v [batch, kv heads, t, e]; each kv head serves heads / kv heads
query heads that lie side by side. `bias` (or None) is added to the scores: four dims, each of full size or 1. `causal`:
query i sees keys 0 to i. `scale` multiplies the scores. `lse` [batch, heads, s] is the log of the sum of their
exponentials, from which flash kernels make the probabilities again in backward (Dao 2023, section 3.1). `state`, where
something is dropped, is that of the random numbers; it means something only on the rank that drew them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.graph import ITEMSIZE, Node, Ref, TensorType

ATTENTION = "autopar.attention.default"
ATTENTION_BACKWARD = "autopar.attention_backward.default"
STATES = {ATTENTION: 2, ATTENTION_BACKWARD: None}  # operator -> which of its results is a state of random numbers
OPERANDS_OF_ATTENTION = {ATTENTION: (0, 1, 2), ATTENTION_BACKWARD: (1, 2, 3)}  # where q, k and v stand
DROPOUT_AT, BIAS_GRAD_AT = {ATTENTION: 6, ATTENTION_BACKWARD: 10}, {ATTENTION: 7, ATTENTION_BACKWARD: 11}
CAUSAL_AT = {ATTENTION: 4, ATTENTION_BACKWARD: 8}
DROPPED = ".dropped"  # of the name of its price
HALF = ("bfloat16", "float16")
TILE = 128  # queries and keys that cuDNN works on at a time
BLOCK = 2**20  # scores that the kernel of plain products makes at a time, or those of one head where they are more


def operands_at(node: Node, operands: Sequence[TensorType]) -> tuple[TensorType, TensorType, TensorType]:
    """Of the types of a node's operands, those of q, k and v."""
    type_at = _by_place(node, operands)
    q, k, v = (type_at[place] for place in OPERANDS_OF_ATTENTION[node.op])
    return q, k, v


def _by_place(node: Node, operands: Sequence[TensorType]) -> dict[int, TensorType]:
    places = [place for place, arg in enumerate(node.args) if isinstance(arg, Ref)]
    return dict(zip(places, operands, strict=True))


def priced_as(node: Node) -> str:
    """The name under which hardware profiles have its rate: kernels lose a part of theirs with a causal mask, and where
    values are dropped another kernel may run.
    """
    way = "causal" if node.args[CAUSAL_AT[node.op]] else "full"
    return f"{node.op.removesuffix('.default')}.{way}{DROPPED if node.args[DROPOUT_AT[node.op]] else ''}"


def with_causal(node: Node, causal: bool) -> Node:
    """The same with such a mask, or without."""
    at = CAUSAL_AT[node.op]
    return replace(node, args=(*node.args[:at], causal, *node.args[at + 1 :]))


def has_bias(node: Node) -> bool:
    return isinstance(node.args[OPERANDS_OF_ATTENTION[node.op][2] + 1], Ref)


def kernel_at(
    device: str, node: Node, operands: Sequence[TensorType], capability: tuple[int, int] = (8, 0), cudnn: bool = False
) -> str:
    """`kernel_of` a node on operands of these local types."""
    bias = _by_place(node, operands).get(OPERANDS_OF_ATTENTION[node.op][2] + 1)
    return kernel_of(
        device, *operands_at(node, operands), None if bias is None else bias.dtype,
        causal=node.args[CAUSAL_AT[node.op]], dropout=node.args[DROPOUT_AT[node.op]],
        bias_grad=node.args[BIAS_GRAD_AT[node.op]], capability=capability, cudnn=cudnn,
    )  # fmt: skip


def kernel_of(
    device: str, q: TensorType, k: TensorType, v: TensorType, bias: str | None, *, causal: bool, dropout: float,
    bias_grad: bool, capability: tuple[int, int] = (8, 0), cudnn: bool = False,
) -> str:  # fmt: skip
    """Which kernel of `autopar.emit.attention` runs attention of these local types on a kind of device.

    `bias`: its dtype, if there is one. `capability`: of a CUDA device, (major, minor). "flash" takes no bias, halves
    only and dims up to 256 (Dao 2023), and aligns an oblong causal mask at its other end; "efficient" (Rabe and Staats
    2021) takes a bias and float32. What neither takes is left to "math", products of blocks: float64 on CUDA, dropout
    on a CPU. `cudnn`: it is to be asked before flash (`autopar.emit.attention.cudnn_first`), and has then what both
    take, but no dropout, whose chances it rounds to sixteenths.
    """
    d, e = q.shape[-1], v.shape[-1]
    if device == "cpu":
        # Backward of the CPU's kernel is wrong for rows that a large finite number hides; torch runs grouped heads
        # behind a mask by products, too.
        grouped = bias is not None and q.shape[1] != k.shape[1]
        return "math" if dropout or bias_grad or d != e or grouped else "cpu"
    if device != "cuda":
        return "math"
    fits = capability >= (8, 0) and d == e and d <= 256 and d % 8 == 0
    if q.dtype in HALF and fits and bias is None and (q.shape[2] == k.shape[2] or not causal):
        return "cudnn" if cudnn and not dropout and _by_cudnn(q, k) else "flash"
    if q.dtype in (*HALF, "float32") and not d % 8 and not e % 8 and bias in (None, q.dtype):
        return "efficient"
    return "math"


def _by_cudnn(q: TensorType, k: TensorType) -> bool:
    """Of what flash takes, what torch's sdp_utils.cpp has taken since its first version, and whole tiles only: in
    backward some of its kernels read the rest of a tile as scores of 0, which are infinite beside an lse below -88
    (pytorch issue 196678, cudnn-frontend issues 160 and 1072).
    """
    batch, heads, queries, d = q.shape
    return d <= 128 and not queries % TILE and not k.shape[2] % TILE and max(batch, heads) < 2**16


def block_of(batch: int, heads: int, group: int, scores: int) -> tuple[int, int]:
    """(batch entries, heads) whose scores, so many for each head, "math" makes at a time: whole groups of query heads
    that share a kv head.
    """
    if heads * scores <= BLOCK:
        return max(1, min(batch, BLOCK // max(1, heads * scores))), heads
    return 1, max(1, min(heads // group, BLOCK // (group * scores))) * group


def temporary_bytes(node: Node, operands: Sequence[TensorType]) -> int:
    """Bytes of the scores that "math" holds at a time, and of what they are made of; 0 where a CPU, which takes it most
    often, has another kernel. Beside a block's scores stand their exponentials, or what is kept of them; in backward
    their slopes, too.
    """
    if kernel_at("cpu", node, operands) != "math":
        return 0
    q, k, v = operands_at(node, operands)
    (batch, heads, queries, d), keys, e = q.shape, k.shape[2], v.shape[-1]
    entries, together = block_of(batch, heads, heads // k.shape[1], queries * keys)
    one = entries * together * ITEMSIZE["float32" if q.dtype in HALF else q.dtype]
    copies = 3 if node.args[DROPOUT_AT[node.op]] and node.op == ATTENTION_BACKWARD else 2
    return one * (copies * queries * keys + (queries + keys) * (d + e))
