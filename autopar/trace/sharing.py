"""Which tensors that forward gives lie in one memory, and which in that of its arguments and of buffers.

    return hidden, self.memory, x, hidden.clone()

A program gives values, and those of equal computations are one. A script that writes to one output in place must not
meet another one there that the model has made by itself; and what it writes to a buffer, or to an argument, that
forward has only handed on is meant for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._compat import pytree
from autopar.ir.graph import Graph, Node, Ref, Result
from autopar.ir.work import VIEWS
from autopar.trace.builder import CONTIGUOUS

Kind = Literal["input", "buffer"]


@dataclass(frozen=True)
class Look:
    """How a tensor lies in the memory of another one, which itself has the strides `of`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    of: tuple[int, ...]

    def at(self, base: Tensor) -> Tensor | None:
        """The same look at `base`, without gradient; None where that lies otherwise."""
        if base.stride() != self.of:
            return None
        if (self.size, self.stride, self.offset) == (tuple(base.shape), base.stride(), 0):
            return base.detach()
        return base.detach().as_strided(self.size, self.stride, base.storage_offset() + self.offset)


@dataclass(frozen=True)
class Given:
    """An output that is an argument, by its path, or a buffer, by its name, or (`look`) looks at one."""

    leaf: int
    kind: Kind
    name: str
    look: Look | None


@dataclass(frozen=True)
class Memory:
    """`given`: outputs that lie where what is there before the call does. `groups`: (leaf, group) of all that lies in
    memory of forward's making; those of one memory are of one group. `packed`: those that lie alone there, without
    gaps. `rebound`: names of buffers that forward sets to other tensors; who has the old one keeps it.
    """

    given: tuple[Given, ...] = ()
    groups: tuple[tuple[int, int], ...] = ()
    rebound: frozenset[str] = frozenset()
    packed: frozenset[int] = frozenset()


NOWHERE = Memory()


def seen(
    returned: Any,
    outputs: Any,
    arguments: Iterable[tuple[str, Any]],
    before: Mapping[str, Tensor],
    behind: Mapping[str, Tensor],
) -> Memory:
    """`returned`: what forward has given and kept, of which the first leaves are its `outputs`. `arguments` by path;
    `before` and `behind` it parameters and buffers by name.
    """
    stay = {name: value for name, value in before.items() if behind.get(name) is value}
    of_call: list[tuple[Kind, str, Any]] = [("input", path, value) for path, value in arguments]
    of_model: list[tuple[Kind, str, Any]] = [("buffer", name, value) for name, value in stay.items()]
    there = (one for one in (*of_call, *of_model) if has_storage(one[-1]))
    held: dict[int, tuple[Kind, str, Any]] = {storage_of(one[-1]): one for one in there}
    of_caller = len(pytree.tree_leaves(outputs))
    rebound = {id(behind[name]): name for name in before.keys() - stay.keys() if name in behind}
    given, groups, first = list[Given](), list[tuple[int, int]](), dict[int, int]()
    for leaf, value in enumerate(pytree.tree_leaves(returned)):
        if not has_storage(value):
            continue
        if id(value) in rebound and leaf < of_caller:
            given.append(Given(leaf, "buffer", rebound[id(value)], None))
            continue
        if (found := held.get(storage_of(value))) is None:
            groups.append((leaf, first.setdefault(storage_of(value), leaf)))
            continue
        kind, name, base = found
        if isinstance(base, nn.Parameter) or (leaf >= of_caller and (kind == "buffer" or value is not base)):
            continue
        if value is base:
            given.append(Given(leaf, kind, name, None))
        elif not value.requires_grad and value.dtype == base.dtype:
            offset = int(value.storage_offset()) - int(base.storage_offset())
            given.append(Given(leaf, kind, name, Look(tuple(value.shape), value.stride(), offset, base.stride())))
    leaves, count = pytree.tree_leaves(returned), Counter(group for _, group in groups)
    packed = (leaf for leaf, group in groups if count[group] == 1 and leaves[leaf].is_contiguous())
    return Memory(tuple(given), tuple(groups), frozenset(before.keys() - stay.keys()), frozenset(packed))


def has_storage(value: Any) -> bool:
    """Whether it is a tensor that lies in a memory of its own, or looks at one."""
    return isinstance(value, Tensor) and value.layout is torch.strided


def lies_somewhere(value: Any) -> bool:
    """Whether it is a tensor with values in a memory."""
    return has_storage(value) and not value.is_meta and value.numel() > 0


def storage_of(value: Tensor) -> int:
    """A number of the memory where it lies, while that is there."""
    return StorageWeakRef(value.untyped_storage()).cdata


def in_memory_of_its_own(graph: Graph, groups: Mapping[int, int]) -> Graph:
    """The graph with a copy of each output that lies where another one does, or what is there before the call, and does
    not in the model. `groups`: as `Memory.groups`.
    """
    made_in: dict[str, int | None] = {node.name: None for node in graph.nodes if node.is_source}
    results, copies = list[Result](), dict[str, list[Node]]()
    for result in graph.results:
        group = groups.get(int(result.target)) if result.kind == "output" else None
        if result.ref is None or group is None:
            results.append(result)
            continue
        base = _base(graph, result.ref)
        if made_in.setdefault(base, group) == group:
            results.append(result)
            continue
        copy = copy_of(graph, result.ref, f"{result.ref.name}_copy{result.target}")
        copies.setdefault(result.ref.name, []).append(copy)
        results.append(replace(result, ref=Ref(copy.name)))
    if not copies:
        return graph
    constants = [node for node in graph.nodes if node.op == "constant" and node.name in copies]  # which come late
    others = [node for node in graph.nodes if node.op != "constant" or node.name not in copies]
    nodes = [one for node in (*constants, *others) for one in (node, *copies.get(node.name, ()))]
    return replace(graph, nodes=tuple(nodes), results=tuple(results))


def _base(graph: Graph, ref: Ref) -> str:
    """In whose memory a value lies; results of one operator are told apart."""
    node = graph.by_name[ref.name]
    while node.op in VIEWS:
        (ref, *_) = node.operands
        node = graph.by_name[ref.name]
    return f"{node.name}" if not ref.index else f"{node.name}:{ref.index}"


def copy_of(graph: Graph, ref: Ref, name: str) -> Node:
    """A node of forward that gives the same value in a memory of its own, called so, or about so."""
    while name in graph.by_name:
        name += "_"
    how = (("memory_format", CONTIGUOUS),)
    node = graph.by_name[ref.name]
    return replace(
        node, name=name, op="aten.clone.default", args=(ref,), kwargs=how, outputs=(graph.type_of(ref),), target="",
        phase="forward",
    )  # fmt: skip
