"""What bodies are written against: a `Builder` runs operators on one rank, a `Writer` makes its calls short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.ir.graph import Const, Node, TensorType

Value = Any  # a tensor at run time, an fx node in code generation
Types = Sequence[TensorType]
Comm = tuple[tuple[str, int], ...]


class Builder(Protocol):
    local_operands: Types
    local_outputs: Sequence[TensorType | None]
    shards: int  # pieces into which the factors are cut
    factor_size: int  # product of the global sizes of the factors

    def call(self, op: str, *args: Any, **kwargs: Any) -> Value: ...
    def get(self, value: Value, index: int) -> Value: ...
    def shard_index(self) -> Value: ...  # int64 tensor without dims: which piece this rank holds
    def index_on(self, axis: str) -> Value: ...  # the same, of another mesh axis, or of several (`over`)
    def all_reduce(self, value: Value, op: str) -> Value: ...


@dataclass(frozen=True, slots=True)
class Body:
    """`emit(builder, node, args)`: args are `node.args` with values in the place of Refs, localised (`local.py`)."""

    emit: Callable[[Any, Node, tuple[Any, ...]], Any]
    comm: Callable[[Node, Types, Sequence[TensorType | None]], Comm]


def silent(node: Node, operands: Types, outputs: Sequence[TensorType | None]) -> Comm:
    return ()


def wide(dtype: str) -> str:
    """The precision in which sums are formed."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


class Writer:
    """A builder with arithmetic: `w.mul(a, b)`."""

    def __init__(self, b: Builder) -> None:
        self.b = b

    def __getattr__(self, name: str) -> Callable[..., Value]:
        overload = OVERLOADS[name]
        return lambda *args, **kwargs: self.b.call(f"aten.{name}.{overload}", *args, **kwargs)

    def cast(self, value: Value, have: str, want: str) -> Value:
        return value if have == want else self.b.call("aten._to_copy.default", value, dtype=Const("dtype", want))

    def add_up(self, value: Value, dims: Sequence[int], keep: bool = True) -> Value:
        """Sum over dims; over none it is the value itself (torch would take all)."""
        return self.b.call("aten.sum.dim_IntList", value, tuple(dims), keep) if dims else value

    def all_add_up(self, value: Value, dims: Sequence[int]) -> Value:
        return self.b.all_reduce(self.add_up(value, dims), "sum")


OVERLOADS = {
    **dict.fromkeys(["add", "sub", "mul", "div"], "Tensor"),
    **dict.fromkeys(["ge", "lt", "ne", "eq", "masked_fill"], "Scalar"),
    **dict.fromkeys(["exp", "log", "rsqrt", "clamp", "unsqueeze", "view", "cat", "amax", "bitwise_not"], "default"),
    "bitwise_and": "Tensor",
    "slice": "Tensor",
}
