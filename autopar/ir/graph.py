"""The joint forward/backward graph as plain values: what trace leaves behind and every later stage reads.

No torch here. An operator is named by its torch.ops path without the leading `torch.ops.` (`aten.mm.default`), or by a
name of ours (`autopar.einsum`). A node with several results is one node; `Ref(name, i)` is its i-th result.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

from autopar.ir.outside import Rules
from autopar.ir.rounds import LAST, ONE, SUM, Rounds, wide

Phase = Literal["forward", "backward"]

# A dtype of ours: two 64-bit numbers from which a rank draws again what it drew. It means nothing on another rank, so
# that no layout change leads anywhere from it.
RANDOM_STATE = "random_state"

ITEMSIZE = {
    RANDOM_STATE: 8,
    "bool": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorType:
    """Global (unsplit) shape and dtype (`float32`) of a value."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Ref:
    """The `index`-th result of the node called `name`."""

    name: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Const:
    """A torch constant in an argument: kind is dtype, device, layout or memory_format."""

    kind: str
    value: str


# What stands in an argument list: None, bool, int, float, complex, str, Ref, Const or a tuple of these.
Arg = Any

SOURCES = ("parameter", "buffer", "input", "tangent", "constant")
HELD = ("parameter", "input")  # sources that may have a gradient, which is laid out as they are


@dataclass(frozen=True)
class Node:
    """One operator application, or a source of values (op is one of SOURCES, and target names what it is).

    `target` of a parameter or buffer is its name in the model; of an input its path among the arguments; of a tangent
    the index of the output it belongs to; of a constant its values as JSON. `module` and `source` say where in the
    user's model the node came from. `outside`: rules of users' packages under which the graph was made.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[TensorType | None, ...]
    phase: Phase = "forward"
    target: str = ""
    module: str = ""
    source: str = ""
    outside: tuple[Rules, ...] = field(default=(), compare=False, repr=False)

    @cached_property  # everybody asks, again and again
    def operands(self) -> tuple[Ref, ...]:
        """The tensors it reads, in the order in which they stand in args, then kwargs (with repetitions)."""
        return tuple(_refs((self.args, tuple(value for _, value in self.kwargs))))

    @property
    def is_source(self) -> bool:
        return self.op in SOURCES


@dataclass(frozen=True, slots=True)
class Result:
    """What the graph gives back: kind is output, gradient or buffer; target is an output index, or a name.

    `ref` is None where the model returns None, or where a parameter has no gradient.
    """

    kind: Literal["output", "gradient", "buffer"]
    target: str
    ref: Ref | None


CHANNEL = "%"  # how the target of what crosses a cut begins: no path of an input and no index of an output does


def is_channel(target: str) -> bool:
    """Whether a result or an input is what goes from one pipeline stage to the next."""
    return target.startswith(CHANNEL)


@dataclass(frozen=True)
class Graph:
    """Nodes in execution order: every operand is defined above its use. Forward nodes stand before backward nodes.

    `rounds`: of a step in micro-batches, of which this is one.
    """

    nodes: tuple[Node, ...]
    results: tuple[Result, ...]
    rounds: Rounds = ONE

    def __post_init__(self) -> None:
        seen: dict[str, int] = {}
        is_backward = False
        for node in self.nodes:
            is_backward |= node.phase == "backward" and not node.is_source
            if is_backward and node.phase == "forward" and not node.is_source:
                raise ValueError(
                    f"{node.source or node.module}: %{node.name} is of the forward pass, and stands behind nodes of "
                    "backward"
                )
            for ref in node.operands:
                if ref.index >= seen.get(ref.name, 0):
                    raise ValueError(
                        f"{node.source or node.module}: %{node.name} uses %{ref.name}[{ref.index}] before it is defined"
                    )
            if node.name in seen:
                raise ValueError(f"two nodes are called %{node.name}")
            seen[node.name] = len(node.outputs)
        for result in self.results:
            if result.ref is not None and result.ref.index >= seen.get(result.ref.name, 0):
                raise ValueError(
                    f"{result.kind} {result.target} is %{result.ref.name}[{result.ref.index}], which is not defined"
                )
        if self.rounds.count > 1:
            self._check_rounds()

    def _check_rounds(self) -> None:
        shapes = {n.name: n.outputs[0].shape for n in self.nodes if n.op == "input" and n.outputs[0] is not None}
        for name, dim in self.rounds.cut.items():
            if dim >= len(shapes.get(name, ())):
                raise ValueError(f"micro-batches cut %{name} along dim {dim}, and no input of that name has one")
        for name in self.rounds.stored:
            if name not in self.by_name or self.by_name[name].op != "parameter":
                raise ValueError(f"micro-batches read a cast of %{name}, and no parameter has that name")
        if len(self.rounds.joined) != len(self.results):
            raise ValueError(f"{len(self.rounds.joined)} of {len(self.results)} results say what micro-batches give")

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def trained(self) -> tuple[Node, ...]:
        """The parameters that have a gradient."""
        targets = {result.target for result in self.results if result.kind == "gradient" and result.ref is not None}
        return tuple(node for node in self.nodes if node.op == "parameter" and node.target in targets)

    @cached_property
    def inputs_with_gradient(self) -> tuple[Node, ...]:
        """Those of the caller's, to whom their gradients go."""
        targets = {result.target for result in self.results if result.kind == "gradient" and result.ref is not None}
        given = (node for node in self.nodes if node.op == "input" and not is_channel(node.target))
        return tuple(node for node in given if node.target in targets)

    @cached_property
    def written(self) -> frozenset[str]:
        """Names of the nodes of the buffers that forward writes to."""
        targets = {result.target for result in self.results if result.kind == "buffer"}
        return frozenset(node.name for node in self.nodes if node.op == "buffer" and node.target in targets)

    @cached_property
    def held_outputs(self) -> tuple[int, ...]:
        """Places of the results that are tensors which the caller of a step gets, but for scalars. A training loop
        (`out = model(batch)`) holds them until the next forward has returned.
        """
        return tuple(
            place
            for place, result in enumerate(self.results)
            if result.kind == "output" and result.ref is not None and not is_channel(result.target)
            if self.type_of(result.ref).shape
        )

    @cached_property
    def begins_at(self) -> dict[str, frozenset[str]]:
        """Parameter or input with a gradient -> the outputs whose gradients it is made of."""
        return self.begins_by(lambda node: node.operands)

    @cached_property
    def begins_without(self) -> dict[frozenset[str], dict[str, frozenset[str]]]:
        """What is known of steps that do not take some branches (`autopar.ir.branches.begins_at`)."""
        return {}

    def begins_by(self, reads: Callable[[Node], Sequence[Ref]]) -> dict[str, frozenset[str]]:
        """Likewise, where of each node these operands count."""
        found: dict[str, frozenset[str]] = {}
        for node in self.nodes:
            own = (node.target,) if node.op == "tangent" else ()
            found[node.name] = frozenset(own).union(*(found[ref.name] for ref in reads(node)))
        ends = (one for one in self.results if one.kind == "gradient" and one.ref is not None)
        return {one.target: found[one.ref.name] for one in ends if one.ref is not None}

    @cached_property
    def leads_to(self) -> dict[str, frozenset[str]]:
        """Output -> the other outputs that are made of it, where there are any."""
        named: dict[str, set[str]] = {}  # node -> the outputs that it gives
        for one in self.results:
            if one.kind == "output" and one.ref is not None:
                named.setdefault(one.ref.name, set()).add(one.target)
        behind: dict[str, frozenset[str]] = {}  # node -> the outputs that what it reads is made of
        found: dict[str, set[str]] = {}
        for node in self.nodes:
            if node.phase == "backward":
                continue
            below = {ref.name for ref in node.operands}
            behind[node.name] = frozenset().union(*(behind[name] | named.get(name, set()) for name in below))
            for target in behind[node.name] if node.name in named else ():
                found.setdefault(target, set()).update(named[node.name])
        return {target: frozenset(others) for target, others in found.items()}

    def adds_up(self, result: Result) -> bool:
        """Whether a step's micro-batches add the result up as it is made: gradients of parameters."""
        return self.rounds.count > 1 and result.ref is not None and result in self._gradients

    def put_together(self, place: int) -> TensorType | None:
        """What there is of a result beside what a round makes of it, where micro-batches put a gradient of an input
        together as they go: the whole of it, or a sum in a wide dtype. None for all else.
        """
        result = self.results[place]
        join = self.rounds.joined[place] if self.rounds.joined else LAST
        if result.kind != "gradient" or result.ref is None or join == LAST or self.adds_up(result):
            return None
        type = self.type_of(result.ref)
        return TensorType(self.rounds.whole_shape(type.shape, join), wide(type.dtype) if join == SUM else type.dtype)

    @cached_property
    def _gradients(self) -> frozenset[Result]:
        trained = {node.target for node in self.trained}
        return frozenset(one for one in self.results if one.kind == "gradient" and one.target in trained)

    def type_of(self, ref: Ref) -> TensorType:
        found = self.by_name[ref.name].outputs[ref.index]
        assert found is not None, ref
        return found

    def stored_type(self, node: Node) -> TensorType:
        """Of a parameter, as it is stored."""
        (type,) = node.outputs
        assert type is not None, node
        return TensorType(type.shape, self.rounds.stored.get(node.name, type.dtype))

    def under(self, rules: Sequence[Rules]) -> Graph:
        """The same graph, planned with these rules of users' packages and no others."""
        if all(node.outside == tuple(rules) for node in self.nodes):
            return self
        return replace(self, nodes=tuple(replace(node, outside=tuple(rules)) for node in self.nodes))

    @cached_property
    def outside(self) -> tuple[Rules, ...]:
        """The rules of users' packages that say something of this graph: of one of its operators, or by patterns."""
        given = dict.fromkeys(rules for node in self.nodes for rules in node.outside)
        ops = {node.op for node in self.nodes}
        return tuple(rules for rules in given if rules.patterns or not ops.isdisjoint(rules.operators))

    @cached_property
    def digest(self) -> str:
        """Content hash: the same for the same program under the same rules, whatever the process. Sources and module
        paths do not count.
        """
        told = [
            (n.name, n.op, _plain(n.args), _plain(n.kwargs), [str(t) for t in n.outputs], n.phase, n.target)
            for n in self.nodes
        ]
        ends = [(r.kind, r.target, _plain(r.ref)) for r in self.results]
        rules = sorted(one.identity for one in self.outside)
        rounds = [self.rounds.count, sorted(self.rounds.cut.items()), self.rounds.joined]
        rounds += [sorted(self.rounds.stored.items())] if self.rounds.stored else []
        rounds += ["reduces once"] if self.rounds.reduces_once else []
        whole = [told, ends, *([rules] if rules else []), *([rounds] if self.rounds.count > 1 else [])]
        return hashlib.sha256(json.dumps(whole, separators=(",", ":")).encode()).hexdigest()


def batch_size(graph: Graph) -> int:
    """The leading size that most inputs have (of two equally frequent ones, the first); 0 without inputs."""
    types = [node.outputs[0] for node in graph.nodes if node.op == "input"]
    sizes = Counter(type.shape[0] for type in types if type is not None and type.shape)
    return max(sizes, key=lambda size: sizes[size], default=0)


def input_type(graph: Graph, node: Node) -> TensorType:
    """Of an input of the graph, as the step is given it: for all micro-batches, where there are several."""
    (type,) = node.outputs
    assert type is not None
    return TensorType(graph.rounds.whole_shape(type.shape, graph.rounds.cut.get(node.name, LAST)), type.dtype)


def output_types(graph: Graph) -> dict[str, TensorType | None]:
    """Index of an output -> its type; of several micro-batches, of all of them. None: forward gives none."""
    found: dict[str, TensorType | None] = {}
    for place, result in enumerate(graph.results):
        if result.kind == "output":
            type = None if result.ref is None else graph.type_of(result.ref)
            join = graph.rounds.joined[place] if graph.rounds.joined else LAST
            found[result.target] = type and TensorType(graph.rounds.whole_shape(type.shape, join), type.dtype)
    return found


def gives_loss(graph: Graph) -> bool:
    """Whether an output is one floating number."""
    types = (graph.type_of(one.ref) for one in graph.results if one.kind == "output" and one.ref is not None)
    return any(not type.shape and type.dtype.startswith(("float", "bfloat")) for type in types)


def weights_in(graph: Graph) -> set[str]:
    """Parameters, and what is made of them alone: casts and views."""
    weights: set[str] = set()
    for node in graph.nodes:
        if node.op == "parameter" or (node.operands and all(ref.name in weights for ref in node.operands)):
            weights.add(node.name)
    return weights


def _refs(arg: Arg) -> Iterator[Ref]:
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple):
        for part in cast("tuple[Arg, ...]", arg):
            yield from _refs(part)


def _plain(arg: Arg) -> Any:
    match arg:
        case Ref():
            return {"ref": [arg.name, arg.index]}
        case Const():
            return {arg.kind: arg.value}
        case tuple():
            return [_plain(part) for part in cast("tuple[Arg, ...]", arg)]
        case float() | complex():
            return repr(arg)
        case _:
            return arg


def map_refs(arg: Arg, change: Any) -> Arg:
    """The same argument with `change(ref)` in the place of every Ref."""
    if isinstance(arg, Ref):
        return change(arg)
    if isinstance(arg, tuple):
        return tuple(map_refs(part, change) for part in cast("tuple[Arg, ...]", arg))
    return arg


def map_node(node: Node, change: Callable[[Ref], Ref]) -> Node:
    """The same node with `change(ref)` in the place of every operand."""
    kwargs = tuple((key, map_refs(arg, change)) for key, arg in node.kwargs)
    return replace(node, args=map_refs(node.args, change), kwargs=kwargs)


def reading(node: Node, instead: Mapping[Ref, Ref]) -> Node:
    """The node with other operands in the place of these; itself where it reads none of them."""
    if instead.keys().isdisjoint(node.operands):
        return node
    return map_node(node, lambda ref: instead.get(ref, ref))
