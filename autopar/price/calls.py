"""Which call of an operator each strategy makes on one rank: what is timed, and the key under which the time is kept.

A key has the operator (with its local body, if the strategy has one) and its arguments: local types, the order of their
dims in memory, constants. Names of nodes do not enter, so that equal calls of equal layers are timed once.

    ('autopar.einsum', "('b s k, n k -> b s n', float32[4, 128, 256], float32[768, 256]) -> float32[4, 128, 768]")
    ('aten.clone.default', '(float32[4, 128, 4, 64] in 0,2,1,3, memory_format=contiguous_format) -> ...')
    ('aten._softmax.default by softmax, 2 of 1024', '(float32[8, 512], 1, False) -> float32[8, 512]')

`in 0,2,1,3`: dim 0 is the outermost in memory, then dim 2; a dim that is missing there repeats, as expand makes it.
It is read off the views in front of the operator; other views than permute and expand are taken for contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import cast

from autopar.ir.graph import Arg, Const, Graph, Node, Ref, TensorType, map_refs
from autopar.ir.layout import Layout, local_type
from autopar.ir.mesh import Mesh
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, operand_types
from autopar.rules.local import localise
from autopar.rules.patterns import is_pattern
from cost_models.measured import Key
from cost_models.steps import Compute, Step


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a call reads: its local type, and its dims from the outermost in memory inwards.

    `same_as`: the place of an earlier operand that is the very same tensor.
    """

    type: TensorType
    order: tuple[int, ...]
    same_as: int | None = None

    def __str__(self) -> str:
        if self.same_as is not None:
            return f"=%{self.same_as}"
        if self.order == tuple(range(len(self.type.shape))):
            return str(self.type)
        return f"{self.type} in {','.join(map(str, self.order)) or 'none'}"


@dataclass(frozen=True)
class Call:
    """What one rank runs for `node` under a strategy, but for the collectives.

    `args`, `kwargs`: localised; `Ref("", i)` stands for operand i. `shards`, `body_size`: those of the local body.
    """

    key: Key
    node: Node
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    operands: tuple[Operand, ...]
    outputs: tuple[TensorType | None, ...]
    body: str
    shards: int
    body_size: int


@dataclass(frozen=True)
class Operation:
    """`count` nodes that share their strategies, and the call of each: None of loops, and of what runs nothing."""

    strategies: tuple[Strategy, ...]
    calls: tuple[Call | None, ...]
    count: int


@dataclass(frozen=True)
class Wanted:
    """A call whose time matters: its seconds by the formula, and the bytes of its operands and results."""

    call: Call
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Profiled:
    """Seconds of calls on one rank that has the machine for itself, and what a user should know of how they came."""

    seconds: Mapping[Key, float]
    notes: tuple[str, ...] = ()


# How calls get their times: the calls in order of importance, all those of one operation together -> those known.
Profile = Callable[[Sequence[Wanted]], Profiled]


def operations(graph: Graph, strategies: Mapping[str, tuple[Strategy, ...]], mesh: Mesh) -> list[Operation]:
    """Every operator of the graph once, with what each of its strategies calls. Of nodes that share their strategies
    the first speaks for all, also for how its operands lie in memory.
    """
    counts: dict[int, int] = {}
    first: dict[int, Node] = {}
    node_of = graph.by_name
    for node in graph.nodes:
        if not node.is_source:
            key = id(strategies[node.name])
            counts[key] = counts.get(key, 0) + 1
            first.setdefault(key, node)
    orders = _orders(graph)
    made: list[Operation] = []
    for key, node in first.items():
        types = operand_types(node, node_of)
        options = strategies[node.name]
        lie = [orders[ref] for ref in node.operands]
        made.append(Operation(options, tuple(_call(node, types, lie, one, mesh) for one in options), counts[key]))
    return made


def wanted(found: Sequence[Operation], pricer: Pricer) -> list[Wanted]:
    """The distinct calls. Operations stand in the order of what they take by the formula, in all their nodes: so, when
    time runs out, an operation has all of its strategies measured or none, and they are compared fairly.
    """
    weighed: list[tuple[float, list[Wanted]]] = []
    for one in found:
        calls: dict[Key, Wanted] = {}
        for strategy, call in zip(one.strategies, one.calls, strict=True):
            if call is not None:
                held = [operand.type for operand in call.operands if operand.same_as is None]
                held += [type for type in call.outputs if type is not None]
                seconds = sum(pricer.seconds((step,)) for step in strategy.steps if isinstance(step, Compute))
                calls[call.key] = Wanted(call, seconds, sum(type.nbytes for type in held))
        ordered = sorted(calls.values(), key=lambda want: -want.seconds)
        weighed.append((one.count * sum(want.seconds for want in ordered), ordered))
    weighed.sort(key=lambda pair: -pair[0])
    return list({want.call.key: want for _, calls in weighed for want in calls}.values())


def with_measured(
    strategies: Mapping[str, tuple[Strategy, ...]],
    found: Sequence[Operation],
    pricer: Pricer,
    seconds: Mapping[Key, float],
) -> dict[str, tuple[Strategy, ...]]:
    """The same strategies; the operators of those that were measured say what they take among the ranks of a node.
    Patterns are not timed, and a formula is no match for a measurement: where others are measured, they are left out.
    """
    changed: dict[int, tuple[Strategy, ...]] = {}
    for one in found:
        known = [None if call is None else seconds.get(call.key) for call in one.calls]
        if any(value is not None for value in known):
            changed[id(one.strategies)] = tuple(
                strategy if value is None else replace(strategy, steps=_timed(strategy, value, pricer))
                for strategy, value in zip(one.strategies, known, strict=True)
                if not is_pattern(strategy.body)
            )
    return {name: changed.get(id(options), options) for name, options in strategies.items()}


def _timed(strategy: Strategy, alone_s: float, pricer: Pricer) -> tuple[Step, ...]:
    return tuple(pricer.timed(step, alone_s) if isinstance(step, Compute) else step for step in strategy.steps)


# --- one call --------------------------------------------------------------------------------------------------------


def _call(
    node: Node, types: Sequence[TensorType], orders: Sequence[tuple[int, ...]], strategy: Strategy, mesh: Mesh
) -> Call | None:
    if is_pattern(strategy.body) or not any(isinstance(step, Compute) for step in strategy.steps):
        return None
    local_in = tuple(local_type(type, layout, mesh) for type, layout in zip(types, strategy.takes, strict=True))
    local_out = tuple(
        None if type is None else local_type(type, layout, mesh)
        for type, layout in zip(node.outputs, strategy.gives, strict=True)
    )
    seen: dict[tuple[Ref, Layout], int] = {}
    operands: list[Operand] = []
    for place, (ref, layout, type, order) in enumerate(
        zip(node.operands, strategy.takes, local_in, orders, strict=True)
    ):
        first = seen.setdefault((ref, layout), place)
        operands.append(Operand(type, order, None if first == place else first))
    numbers = iter(range(len(operands)))

    def numbered(_: Ref) -> Ref:
        return Ref("", next(numbers))

    args = cast("tuple[Arg, ...]", map_refs(localise(node, node.args, local_out, local_in), numbered))
    kwargs = tuple((key, map_refs(arg, numbered)) for key, arg in node.kwargs)
    shards = prod(mesh.size(axis) for axis in strategy.body_axes)
    operator = node.op + (f" by {strategy.body}, {shards} of {strategy.body_size}" if strategy.body else "")
    given = [_text(arg, operands) for arg in args] + [f"{key}={_text(arg, operands)}" for key, arg in kwargs]
    gives = ", ".join("nothing" if type is None else str(type) for type in local_out)
    key = operator, f"({', '.join(given)}) -> {gives}"
    body = strategy.body
    return Call(key, node, args, kwargs, tuple(operands), local_out, body, shards, strategy.body_size)


def _text(arg: Arg, operands: Sequence[Operand]) -> str:
    match arg:
        case Ref():
            return str(operands[arg.index])
        case Const(kind, value):
            return "device" if kind == "device" else value
        case tuple():
            return f"({', '.join(_text(part, operands) for part in cast('tuple[Arg, ...]', arg))})"
        case _:
            return repr(arg)


def _orders(graph: Graph) -> dict[Ref, tuple[int, ...]]:
    """How every value lies in memory: its dims from the outermost inwards, without those that take no storage."""
    found: dict[Ref, tuple[int, ...]] = {}
    for node in graph.nodes:
        for index, type in enumerate(node.outputs):
            found[Ref(node.name, index)] = () if type is None else tuple(range(len(type.shape)))
        match node.op, node.args:
            case "autopar.share", (Ref() as source,):
                found[Ref(node.name)] = found[source]
            case "aten.permute.default", (Ref() as source, dims):
                places = [dim % len(found[source]) for dim in cast("tuple[int, ...]", dims)]
                found[Ref(node.name)] = tuple(places.index(dim) for dim in found[source])
            case "aten.expand.default", (Ref() as source, *_):
                before, after = graph.type_of(source).shape, graph.type_of(Ref(node.name)).shape
                new = len(after) - len(before)
                found[Ref(node.name)] = tuple(dim + new for dim in found[source] if before[dim] == after[dim + new])
            case _:
                pass
    return found
