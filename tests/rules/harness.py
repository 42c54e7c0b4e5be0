"""Split an operator as its rule says, run the shards, put the results together.

All ranks run in this process and in step: a value of the simulated body builder is the list of what the ranks hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.emit import ctc, ops, recurrent
from autopar.ir.attention import ATTENTION, ATTENTION_BACKWARD
from autopar.ir.batch_norm import IN_PARTS, IN_PARTS_BACKWARD
from autopar.ir.graph import Const, Node, Ref, TensorType, map_refs
from autopar.ir.work import EXPERTS, RECURRENT
from autopar.rules.bodies import BODIES
from autopar.rules.local import localise
from autopar.rules.notation import Rule
from autopar.rules.sizes import Sized, Sizing, followed
from autopar.rules.table import rule_of


@dataclass(frozen=True)
class Axis:
    """One mesh axis: it splits `factor`, or holds terms of the operands at the positions `terms`."""

    size: int
    factor: str | None = None
    terms: frozenset[int] = frozenset()


@dataclass
class Call:
    """An operator with real operands."""

    node: Node
    operands: list[torch.Tensor]
    outputs: list[Any] = field(default_factory=list)

    @property
    def types(self) -> tuple[TensorType, ...]:
        return tuple(type_of(value) for value in self.operands)

    @property
    def rule(self) -> Rule | None:
        return rule_of(self.node, self.types)


def type_of(value: torch.Tensor) -> TensorType:
    return TensorType(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def resolve(op: str) -> Callable[..., Any]:
    if op in STAND_INS:
        return STAND_INS[op]
    found: Any = torch.ops
    for part in op.split("."):
        found = getattr(found, part)
    return found


def _einsum(equation: str, *operands: torch.Tensor) -> torch.Tensor:
    letters: dict[str, str] = {}
    short = "".join(
        word if word in (",", "->") else letters.setdefault(word, chr(ord("a") + len(letters)))
        for word in equation.replace(",", " , ").split()
    )
    return torch.einsum(short, *operands)


def _rms_norm_backward(grad: Any, x: Any, normalized: Any, rstd: Any, weight: Any, mask: Any) -> tuple[Any, Any]:
    """What CUDA has a kernel for and CPU has not."""
    leaves = [value.detach().clone().requires_grad_() if value is not None else None for value in (x, weight)]
    dims = list(range(-len(normalized), 0))
    eps = (rstd.square().reciprocal() - x.square().mean(dims, keepdim=True)).detach()
    y = leaves[0] * (leaves[0].square().mean(dims, keepdim=True) + eps).rsqrt()
    y = y if leaves[1] is None else y * leaves[1]
    y.backward(grad)
    return tuple(leaf.grad if leaf is not None and wanted else None for leaf, wanted in zip(leaves, mask, strict=True))  # type: ignore[return-value]


STAND_INS: dict[str, Callable[..., Any]] = {
    "autopar.einsum": _einsum,
    "autopar.share": lambda x: x,
    "autopar.store": lambda x: x.clone(),
    "autopar.fetch": lambda x: x.clone(),
    "autopar.to_reduce_dtype": torch.ops.aten._to_copy.default,
    ATTENTION: ops.attention,
    ATTENTION_BACKWARD: ops.attention_backward,
    EXPERTS[0]: ops.expert_mm,
    EXPERTS[1]: ops.expert_mm_weight,
    "autopar.ctc.default": ctc.ctc,
    "autopar.ctc_backward.default": ctc.ctc_backward,
    **{op: getattr(recurrent, op.split(".")[1]) for op in RECURRENT},
    IN_PARTS: ops.batch_norm_in_parts,
    IN_PARTS_BACKWARD: ops.batch_norm_in_parts_backward,
    "aten._fused_rms_norm_backward.default": _rms_norm_backward,
}


def make_call(op: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Call:
    """Run the operator unsplit, and describe it as a `Node`."""
    operands: list[torch.Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            operands.append(value)
            return Ref(f"x{len(operands) - 1}")
        if isinstance(value, list | tuple):
            return tuple(plain(part) for part in value)
        if isinstance(value, torch.dtype):
            return Const("dtype", str(value).removeprefix("torch."))
        return value

    plain_args = tuple(plain(value) for value in args)
    plain_kwargs = tuple((name, plain(value)) for name, value in (kwargs or {}).items())
    outputs = run_op(op, real(plain_args, operands), real_kwargs(plain_kwargs, operands))
    types = tuple(type_of(out) if isinstance(out, torch.Tensor) else None for out in outputs)
    return Call(Node("node", op, plain_args, plain_kwargs, types), operands, outputs)


def real(args: Any, operands: Sequence[torch.Tensor]) -> list[Any]:
    return [_torch(map_refs(value, lambda ref: operands[int(ref.name[1:])])) for value in args]


def real_kwargs(kwargs: Any, operands: Sequence[torch.Tensor]) -> dict[str, Any]:
    return {name: real([value], operands)[0] for name, value in kwargs}


def _torch(value: Any) -> Any:
    if isinstance(value, Const):
        return getattr(torch, value.value)
    if isinstance(value, tuple):
        return [_torch(part) for part in value]
    return value


def run_op(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    out = resolve(op)(*args, **kwargs)
    return list(out) if isinstance(out, tuple | list) else [out]


# --- ranks -----------------------------------------------------------------------------------------------------------


def shard(value: torch.Tensor, dims: Sequence[Sequence[str]], factor: str, size: int, index: int) -> torch.Tensor:
    at = [dim for dim, group in enumerate(dims) if factor in group]
    return value.chunk(size, at[0])[index].contiguous() if at else value


def terms(value: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Random numbers that sum to `value`; in low precision fixed parts of it, of which the sum is exact."""
    if value.dtype not in (torch.float64, torch.complex128) and (value.is_floating_point() or value.is_complex()):
        return [value / 2 ** min(place + 1, size - 1) for place in range(size)]
    if value.is_floating_point() or value.is_complex():
        parts = [torch.randn_like(value) for _ in range(size - 1)]
    else:
        parts = [torch.randint_like(value, -9, 9) for _ in range(size - 1)]
    return [*parts, value - sum(parts)]


def deal(call: Call, rule: Rule, axes: Sequence[Axis]) -> dict[tuple[int, ...], list[torch.Tensor]]:
    """What each rank (by coordinate) holds of every operand."""
    dealt: dict[tuple[int, ...], list[torch.Tensor]] = {(): call.operands}
    for axis in axes:
        new: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for at, operands in dealt.items():
            split = {place: terms(operands[place], axis.size) for place in axis.terms}
            for index in range(axis.size):
                new[(*at, index)] = [
                    split[place][index]
                    if place in split
                    else shard(value, rule.inputs[place], axis.factor, axis.size, index)
                    if axis.factor
                    else value
                    for place, value in enumerate(operands)
                ]
        dealt = new
    return dealt


def local_outputs(call: Call, rule: Rule, axes: Sequence[Axis]) -> list[TensorType | None]:
    types: list[TensorType | None] = []
    for type, dims in zip(call.node.outputs, rule.outputs, strict=True):
        if type is None:
            types.append(None)
            continue
        shape = list(type.shape)
        for axis in axes:
            for dim, group in enumerate(dims):
                if axis.factor in group:
                    shape[dim] //= axis.size
        types.append(TensorType(tuple(shape), type.dtype))
    return types


class Ranks(list):  # type: ignore[type-arg]
    """A value as every rank holds it."""


class LockStep:
    """The builder of `bodies.py`, computing at once for all ranks."""

    def __init__(
        self, call: Call, rule: Rule, axes: Sequence[Axis], body: str, operands: Types, outputs: Outputs
    ) -> None:
        self.coordinates = list(itertools.product(*(range(axis.size) for axis in axes)))
        self.mine = [place for place, axis in enumerate(axes) if axis.factor and rule.bodies.get(axis.factor) == body]
        self.axes, self.local_operands, self.local_outputs = axes, operands, outputs
        self.shards = math.prod(axes[place].size for place in self.mine)
        self.factor_size = math.prod(rule.sizes[name] for name, other in rule.bodies.items() if other == body)
        self.moved: list[tuple[str, int]] = []
        self.types: list[Any] = []

    def call(self, op: str, *args: Any, **kwargs: Any) -> Any:
        results = [
            run_op(
                op,
                [_torch(_at(arg, rank)) for arg in args],
                {name: _torch(_at(arg, rank)) for name, arg in kwargs.items()},
            )
            for rank in range(len(self.coordinates))
        ]
        self.types.append(type_of(results[0][0]) if len(results[0]) == 1 else "several")
        return Ranks(one[0] if len(one) == 1 else one for one in results)

    def get(self, value: Any, index: int) -> Any:
        return Ranks(one[index] for one in value)

    def shard_index(self) -> Any:
        def linear(at: tuple[int, ...]) -> int:
            index = 0
            for place in self.mine:
                index = index * self.axes[place].size + at[place]
            return index

        return Ranks(torch.tensor(linear(at)) for at in self.coordinates)

    def all_reduce(self, value: Any, op: str) -> Any:
        self.moved.append(("all_reduce", value[0].numel() * value[0].element_size()))
        together = {"sum": lambda group: torch.stack(group).sum(0), "max": lambda group: torch.stack(group).amax(0)}[op]

        def others(at: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(index for place, index in enumerate(at) if place not in self.mine)

        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for at, one in zip(self.coordinates, value, strict=True):
            groups.setdefault(others(at), []).append(one)
        whole = {key: together(group) for key, group in groups.items()}
        self.types.append(type_of(value[0]))
        return Ranks(whole[others(at)] for at in self.coordinates)


class Told(Sizing):
    """The same with sizes alone."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.types: list[Any] = []

    def call(self, op: str, *args: Any, **kwargs: Any) -> Any:
        made = super().call(op, *args, **kwargs)
        self.types.append(made.type if isinstance(made, Sized) else "several")
        return made

    def all_reduce(self, value: Any, op: str) -> Any:
        made = super().all_reduce(value, op)
        self.types.append(made.type)
        return made


Types = Sequence[TensorType]
Outputs = Sequence[TensorType | None]


def _at(arg: Any, rank: int) -> Any:
    if isinstance(arg, Ranks):
        return arg[rank]
    if isinstance(arg, tuple | list):
        return tuple(_at(part, rank) for part in arg)
    return arg


def run_split(call: Call, rule: Rule, axes: Sequence[Axis]) -> dict[tuple[int, ...], list[Any]]:
    """Results of every rank, checked against the local types that the rule promises."""
    dealt, outputs = deal(call, rule, axes), local_outputs(call, rule, axes)
    types = [type_of(value) for value in next(iter(dealt.values()))]
    args = localise(call.node, call.node.args, outputs, types)
    names = {rule.bodies[axis.factor] for axis in axes if axis.factor in rule.bodies}
    if not names:
        ran = {at: run_op(call.node.op, real(args, x), real_kwargs(call.node.kwargs, x)) for at, x in dealt.items()}
    else:
        (name,) = names
        b = LockStep(call, rule, axes, name, types, outputs)
        operands = [Ranks(dealt[at][place] for at in b.coordinates) for place in range(len(types))]
        value = BODIES[name].emit(
            b, call.node, tuple(map_refs(arg, lambda ref: operands[int(ref.name[1:])]) for arg in args)
        )
        values = [value] if isinstance(value, Ranks) else list(value)
        assert tuple(b.moved) == tuple(BODIES[name].comm(call.node, types, outputs)), (
            "comm() differs from what emit() moved"
        )
        told = Told(call.node.op, types, outputs)
        assert followed(name, call.node, told) >= 0
        assert told.types == b.types, "what a body holds is counted with other sizes than it has"
        ran = {at: [None if one is None else one[rank] for one in values] for rank, at in enumerate(b.coordinates)}
    for at, results in ran.items():
        assert len(results) >= len(outputs)
        for place, (result, type) in enumerate(zip(results, outputs, strict=True)):
            if type is not None:
                assert type_of(result) == type, (
                    f"result {place} of rank {at} is {type_of(result)}, the rule says {type}"
                )
    return ran


def join(rule: Rule, axes: Sequence[Axis], place: int, ran: dict[tuple[int, ...], Any]) -> torch.Tensor:
    """One whole result out of the ranks' pieces."""
    for axis in reversed(axes):
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for at in sorted(ran):
            groups.setdefault(at[:-1], []).append(ran[at])
        ran = {at: _join(rule, axis, place, parts) for at, parts in groups.items()}
    return ran[()]


def _join(rule: Rule, axis: Axis, place: int, parts: list[torch.Tensor]) -> torch.Tensor:
    if axis.factor:
        for dim, group in enumerate(rule.outputs[place]):
            if axis.factor in group:
                return torch.cat(parts, dim)
        op = rule.reduce[place]
        if op == "same":
            for part in parts[1:]:
                torch.testing.assert_close(part, parts[0], rtol=0, atol=0, equal_nan=True)
            return parts[0]
        if op in ("max", "min"):
            return torch.stack(parts).amax(0) if op == "max" else torch.stack(parts).amin(0)
    return torch.stack(parts).sum(0, dtype=parts[0].dtype)


def check(call: Call, axes: Sequence[Axis], tolerance: float = 1e-10) -> None:
    rule = call.rule
    assert rule is not None
    ran = run_split(call, rule, axes)
    for place, whole in enumerate(call.outputs):
        if isinstance(whole, torch.Tensor):
            joined = join(rule, axes, place, {at: results[place] for at, results in ran.items()})
            told = f"result {place} of {call.node.op} split over {axes}"
            tight = tolerance if whole.is_floating_point() or whole.is_complex() else 0
            torch.testing.assert_close(
                joined, whole, rtol=tight, atol=tight, equal_nan=True, msg=lambda text, told=told: f"{told}: {text}"
            )


def ways(call: Call, rule: Rule, size: int) -> list[Axis]:
    """All that one axis of that size can do to the operator, except leaving it whole."""
    split = [Axis(size, factor=name) for name in rule.splittable if rule.sizes[name] % size == 0]
    linear = [
        Axis(size, terms=places)
        for places in rule.linear
        if all(call.operands[place].dtype != torch.bool for place in places)
    ]
    return split + linear
