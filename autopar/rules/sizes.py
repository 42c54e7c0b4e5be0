"""What a local body holds while it runs: its calls followed by their sizes, each value held from its call to its last.

Nothing is computed. Sizes may be `cost_models.formulas.Form`, compared by what they come to (`number`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from autopar.ir.graph import Node, Ref, TensorType, map_refs
from autopar.ir.layout import Layout, local_type
from autopar.ir.mesh import Mesh
from autopar.rules.bodies import BODIES
from autopar.rules.builder import Types

COMPARED = ("aten.ge.Scalar", "aten.lt.Scalar", "aten.ne.Scalar", "aten.eq.Scalar", "aten.bitwise_not.default")
REDUCED = ("aten.amax.default", "aten.sum.dim_IntList")
COUNTED = "aten.arange.start_step"  # in whole numbers first, whatever comes of them
LOOKS = ("aten.view.default", "aten.unsqueeze.default", "aten.slice.Tensor", "aten.reshape.default")


@dataclass(frozen=True, slots=True)
class Sized:
    """A value of the body. `storage`: the number of what it lies in, negative for operands and what is always there."""

    type: TensorType
    storage: int


def bytes_in_body(
    body: str, node: Node, types: Types, takes: Sequence[Layout], gives: Sequence[Layout], mesh: Mesh,
    number: Callable[[Any], float] = float, last: Collection[int] = (),
) -> Any:  # fmt: skip
    """`body_bytes`, of operands of these types that are taken, and results that are given, in these layouts."""
    operands = [local_type(type, layout, mesh) for type, layout in zip(types, takes, strict=True)]
    outputs = [
        None if type is None else local_type(type, layout, mesh)
        for type, layout in zip(node.outputs, gives, strict=True)
    ]
    return body_bytes(body, node, operands, outputs, number, last)


def body_bytes(
    body: str, node: Node, operands: Types, outputs: Sequence[TensorType | None],
    number: Callable[[Any], float] = float, last: Collection[int] = (),
) -> Any:  # fmt: skip
    """Bytes that a rank holds beside operands and results while the body stands in for `node`, at most. `operands`,
    `outputs`: local types.

    What is sent is held until its sum is there, and operands to the end, but for those at the places `last`, which
    nobody needs any more.
    """
    return followed(body, node, Sizing(node.op, operands, outputs), number, last)


def followed(
    body: str, node: Node, sizing: Sizing, number: Callable[[Any], float] = float, last: Collection[int] = ()
) -> Any:
    """The same, by this `Sizing`."""
    operands, outputs = sizing.local_operands, sizing.local_outputs
    values = iter([Sized(type, sizing.given(type, place in last)) for place, type in enumerate(operands)])

    def sized(ref: Ref) -> Sized:
        return next(values)

    args = map_refs(node.args, sized)
    node = replace(node, kwargs=tuple((key, map_refs(arg, sized)) for key, arg in node.kwargs))
    given = BODIES[body].emit(sizing, node, args)
    made = cast("tuple[Any, ...]", given if isinstance(given, tuple) else (given,))
    results = {
        one.storage
        for one, type in zip(made, outputs, strict=False)
        if type is not None and isinstance(one, Sized) and sizing.is_new(one.storage)
    }
    return sizing.most(results, number)


class Sizing:
    """A `Builder` of sizes. Numbers of ranks do not count here."""

    shards, factor_size = 1, 2  # values, which no size hangs on

    def __init__(self, op: str, operands: Types, outputs: Sequence[TensorType | None]) -> None:
        self.op = op  # of the node that the body stands in for
        self.local_operands, self.local_outputs = operands, outputs
        self.sizes: list[Any] = []  # of each storage
        self.operands: set[int] = set()  # storages that are there before
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # storages that are read, and made

    def given(self, type: TensorType, is_last: bool) -> int:
        """The number of an operand's storage. Behind its last use it gives back what nobody has counted."""
        if not is_last:
            return -1
        self.sizes.append(type.nbytes)
        self.operands.add(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def is_new(self, storage: int) -> bool:
        return storage >= 0 and storage not in self.operands

    def call(self, op: str, *args: Any, **kwargs: Any) -> Any:
        read = [*_sized_in(args)]
        if op in LOOKS:
            return Sized(self._type(op, read, args, kwargs), read[0].storage)
        types = self.local_outputs if op == self.op != COUNTED else (self._type(op, read, args, kwargs),)
        made = tuple(None if type is None else self._new(type) for type in types)
        self._note(read, made)
        return made[0] if len(made) == 1 else made

    def get(self, value: Any, index: int) -> Any:
        return value[index]

    def shard_index(self) -> Sized:
        return Sized(TensorType((), "int64"), -1)

    def index_on(self, axis: str) -> Sized:
        return self.shard_index()

    def all_reduce(self, value: Sized, op: str) -> Sized:
        made = self._new(value.type)
        self._note([value], (made,))
        return made

    def most(self, results: set[int], number: Callable[[Any], float]) -> Any:
        last = {one: at for at, (read, made) in enumerate(self.calls) for one in (*read, *made)}
        held, most = 0, 0
        for at, (read, made) in enumerate(self.calls):
            held = held + sum(self.sizes[one] for one in made)
            most = held if number(held) > number(most) else most
            gone = {one for one in (*read, *made) if last[one] == at and one not in results}
            held = held - sum(self.sizes[one] for one in gone)
        beside = most - sum(self.sizes[one] for one in results)  # before they are made, others have their room
        return beside if number(beside) > 0 else 0

    def _note(self, read: Sequence[Sized], made: Sequence[Sized | None]) -> None:
        self.calls.append(
            (
                tuple(one.storage for one in read if one.storage >= 0),
                tuple(one.storage for one in made if one is not None),
            )
        )

    def _new(self, type: TensorType) -> Sized:
        self.sizes.append(type.nbytes)
        return Sized(type, len(self.sizes) - 1)

    def _type(self, op: str, read: Sequence[Sized], args: Sequence[Any], kwargs: Mapping[str, Any]) -> TensorType:
        if op == "aten._to_copy.default":
            return TensorType(read[0].type.shape, kwargs["dtype"].value)
        if op == COUNTED:
            made = self.local_outputs[0]
            assert made is not None
            return TensorType(made.shape, "int64")
        first = read[0].type
        if op in REDUCED:
            return TensorType(_reduced(first.shape, args[1], args[2]), first.dtype)
        if op == "aten.cat.default":
            at = int(args[1]) % len(first.shape)
            joined = sum([one.type.shape[at] for one in read])
            return TensorType((*first.shape[:at], joined, *first.shape[at + 1 :]), first.dtype)
        if op == "aten.slice.Tensor":
            at = int(args[1]) % len(first.shape)
            return TensorType((*first.shape[:at], args[3] - args[2], *first.shape[at + 1 :]), first.dtype)
        if op == "aten.unsqueeze.default":
            at = int(args[1]) % (len(first.shape) + 1)
            return TensorType((*first.shape[:at], 1, *first.shape[at:]), first.dtype)
        if op in LOOKS:
            return TensorType(tuple(args[1]), first.dtype)
        return TensorType(_broadcast([one.type.shape for one in read]), "bool" if op in COMPARED else first.dtype)


def _reduced(shape: Sequence[Any], dims: Sequence[int], keep: bool) -> tuple[Any, ...]:
    over = {dim % len(shape) for dim in dims}
    return tuple(1 if dim in over else size for dim, size in enumerate(shape) if keep or dim not in over)


def _broadcast(shapes: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    made: list[Any] = [1] * max(map(len, shapes))
    for shape in shapes:
        for at, size in enumerate(reversed(shape), 1):
            made[-at] = size if size != 1 else made[-at]
    return tuple(made)


def _sized_in(value: Any) -> Iterator[Sized]:
    if isinstance(value, Sized):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in cast("Sequence[Any]", value):
            yield from _sized_in(one)
