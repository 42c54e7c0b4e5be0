"""Baselines: what people do by hand, as restrictions of the same problem, so that one referee prices them all.

A policy keeps, mesh axis by mesh axis, those strategies of each node that it would use; the solver picks the best of
what is left. The values of the graph are told apart by what they are made of:

    a number    the dim that holds the batch
    weight      made of parameters alone: "matrix" (two dims or more) or "vector"
    free        made of constants alone, or of scalars: whoever reads it takes the piece it needs
    summed      everything else: gradients of weights, statistics of the batch, losses

A data axis (data-parallel, fsdp) splits the batch wherever it is and takes everything else whole, or still to be
summed. A tensor axis reads matrices only in pieces and never splits the batch. Where a policy has no way to run a node
(a size does not divide, an operator has no rule), the node runs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import reduce
from typing import Literal

from autopar.ir.batch_norm import GLOBAL, statistics_of
from autopar.ir.graph import Graph, Node, batch_size
from autopar.ir.layout import Placement, Shard
from autopar.ir.mesh import Mesh
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, propose
from autopar.rewrite import gathered_once, is_gathered_once, kept_whole
from autopar.rules.patterns import is_pattern
from autopar.search.elixir.placing import placed
from autopar.search.memory_options import MemoryOptions, checkpointed

POLICIES: Mapping[str, str] = {
    "data-parallel": "every rank has all parameters and a part of the batch; gradients are all-reduced",
    "fsdp": "parameters are sharded and gathered whole for each use; every rank has a part of the batch",
    "tensor-parallel": "weight matrices stay sharded and are never gathered; every rank has the whole batch",
    "fsdp+tensor-parallel": "tensor-parallel on the last axis of the mesh, fsdp on the others (two axes or more)",
    "zero2": "fsdp, but weights that backward reads, too, are gathered once and kept whole until it has read them",
    "zero1": "fsdp, but weights are gathered as the step begins, and kept whole, as gradients are, until backward ends",
    "checkpoint-every-block": "fsdp, and of what lies within a layer backward keeps nothing: it is computed again",
    "zero3-offload": "fsdp, with all parameters, gradients and optimizer states on the host, which updates them",
    "elixir": "checkpoint-every-block, with those parameters on the host that Elixir's search finds no room for",
}

ALIASES: Mapping[str, str] = {"ddp": "data-parallel", "zero3": "fsdp"}

# What a policy does by its own name, and to what else: the strategies are those of the second.
MEMORY_SAVING: Mapping[str, str] = {
    "zero2": "fsdp",
    "zero1": "fsdp",
    "zero3-offload": "fsdp",
    "checkpoint-every-block": "fsdp",
    "elixir": "fsdp",
}

# What a policy does to need less memory (`autopar.search.memory_options.WAYS`): closed one, it is no candidate.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "checkpoint-every-block": ("recompute",),
    "zero3-offload": ("host",),
    "elixir": ("recompute", "host"),
}

# The graph in which a policy runs, which says how long weights stay whole.
REWRITES: Mapping[str, Callable[[Graph, Collection[str]], Graph]] = {"zero2": gathered_once, "zero1": kept_whole}

# Policies that no search tries, as another one is never slower and never needs more: to be compared with.
DOMINATED: Mapping[str, str] = {"zero1": "zero2"}

Strategies = Mapping[str, tuple[Strategy, ...]]
Kind = int | Literal["matrix", "vector", "free", "summed"]
Wish = Callable[[Strategy], bool]
WEIGHT: tuple[Kind, ...] = ("matrix", "vector")


def policies_for(mesh: Mesh, *, saving: bool = False, once: bool = False, dominated: bool = False) -> tuple[str, ...]:
    """Names of the policies that a mesh of so many axes allows; `saving`: also those that keep less on the device;
    `once`: also those that gather weights once, which the search's own plans never do; `dominated`: also those that
    cannot be the best.
    """
    named = (name for name in POLICIES if saving or name not in MEMORY_SAVING or (once and name in REWRITES))
    named = (name for name in named if dominated or name not in DOMINATED)
    return tuple(name for name in named if len(mesh.sizes) > 1 or name != "fsdp+tensor-parallel")


def is_open(policy: str, ways: Collection[str]) -> bool:
    """Whether a policy does only what is allowed."""
    return set(NEEDS.get(policy, ())).issubset(ways)


def policy_named(name: str) -> str:
    """The policy of that name, or that is also called so. Raises ValueError for one that is not known."""
    name = ALIASES.get(name, name)
    if name not in POLICIES:
        raise ValueError(f"no policy {name!r}; known policies: {', '.join(POLICIES)}")
    return name


def called(policy: str, graph: Graph) -> str:
    """The policy's name for people: what DDP does has batch norms of each rank's part, so one with those of the whole
    batch, as SyncBatchNorm makes them, is called otherwise.
    """
    return f"{policy}, synced" if policy == "data-parallel" and GLOBAL in statistics_of(graph) else policy


def memory_options_of(policy: str, graph: Graph, pricer: Pricer, memory: float | None) -> MemoryOptions:
    """What the policy does to need less memory of the device, of which it may have `memory` bytes (None: any).

    Raises DoesNotFit where the policy says so itself.
    """
    match policy:
        case "elixir" if memory is not None:
            found = placed(
                graph, memory, ranks=pricer.mesh.ranks, batch=batch_size(graph), optimizer=pricer.optimizer
            ).is_on_device
            residence = {name: "device" if here else "host" for name, here in found.items()}
            return MemoryOptions(modes=checkpointed, residence=residence)
        case "elixir":
            return MemoryOptions(modes=checkpointed)
        case "zero3-offload":
            return MemoryOptions(residence={node.target: "host" for node in graph.nodes if node.op == "parameter"})
        case "checkpoint-every-block":
            return MemoryOptions(modes=checkpointed)
        case _:
            return MemoryOptions(rewrite=REWRITES.get(policy))


def restrict(policy: str, graph: Graph, strategies: Strategies, mesh: Mesh) -> dict[str, tuple[Strategy, ...]]:
    """The strategies that the policy would use, at least one for each node of the graph that it runs.

    Raises ValueError for a policy that is not known, or not for this mesh.
    """
    policy = policy_named(policy)
    if policy not in policies_for(mesh, saving=True, dominated=True):
        raise ValueError(
            f"policy {policy} needs two mesh axes or more, mesh {mesh} has one; give --mesh data=N,tensor=N"
        )
    if policy in REWRITES:  # with the nodes that keep what is gathered
        graph = REWRITES[policy](graph, ())
        strategies = {**propose(graph, mesh)[0], **strategies}
    policy = MEMORY_SAVING.get(policy, policy)
    on_last = "tensor-parallel" if policy == "fsdp+tensor-parallel" else policy
    kept = by_hand(strategies)
    for axis, size in enumerate(mesh.sizes):
        if size > 1:
            on_axis = on_last if axis == len(mesh.sizes) - 1 else policy.removesuffix("+tensor-parallel")
            kept = _Axis(on_axis, axis, graph, kept).run()
    return kept


def by_hand(strategies: Strategies) -> dict[str, tuple[Strategy, ...]]:
    """Those of factor rules: no baseline has loops, but where they are pinned."""
    known: dict[int, tuple[Strategy, ...]] = {}  # equal nodes share one tuple, still
    for options in strategies.values():
        if id(options) not in known:
            plain = tuple(option for option in options if not is_pattern(option.body))
            known[id(options)] = plain if plain and len(plain) < len(options) else options
    return {name: known[id(options)] for name, options in strategies.items()}


def agree(strategies: Strategies, class_of: Mapping[str, str]) -> dict[str, tuple[Strategy, ...]]:
    """The same strategies for all nodes of a class: those that all of them have, else those that any has."""
    members: dict[str, list[str]] = {}
    for name, leader in class_of.items():
        members.setdefault(leader, []).append(name)
    kept = dict(strategies)
    for leader, names in members.items():
        options = list(dict.fromkeys(option for name in names for option in strategies[name]))
        if all(len(strategies[name]) == len(options) for name in names):
            shared = strategies[leader]
        else:
            sets = [set(strategies[name]) for name in names]
            common = reduce(set[Strategy].intersection, sets)
            shared = tuple(option for option in options if option in common) or tuple(options)
        kept |= dict.fromkeys(names, shared)
    return kept


def _prefer(options: tuple[Strategy, ...], *wishes: Wish) -> tuple[Strategy, ...]:
    """The options that the first wish which any of them fulfils leaves; all of them where none does."""
    for wish in wishes:
        if kept := tuple(option for option in options if wish(option)):
            return kept
    return options


class _Axis:
    """One policy on one mesh axis: a walk through the graph keeps strategies and learns the kind of every value."""

    def __init__(self, policy: str, axis: int, graph: Graph, strategies: Strategies) -> None:
        self.policy, self.axis, self.graph, self.strategies = policy, axis, graph, strategies
        self.node_of = graph.by_name
        self.batch = batch_size(graph)
        self.kinds: dict[str, tuple[Kind, ...]] = {}
        self.known: dict[object, tuple[tuple[Strategy, ...], tuple[Kind, ...]]] = {}
        self.output_of = {result.target: result.ref for result in graph.results if result.kind == "output"}

    def run(self) -> dict[str, tuple[Strategy, ...]]:
        kept: dict[str, tuple[Strategy, ...]] = {}
        # A tangent takes after an output, wherever it stands: it comes when the forward pass is through.
        turn = {"tangent": 1}
        for node in sorted(self.graph.nodes, key=lambda n: turn.get(n.op, 0 if n.phase == "forward" else 2)):
            options = self.strategies[node.name]
            if node.is_source:
                key: object = (id(options), node.op, self.kind_of_source(node))
            else:
                operands = tuple(
                    (self.kinds[ref.name][ref.index], self._numel(ref.name, ref.index)) for ref in node.operands
                )
                key = (id(options), node.outputs, operands)
            if key not in self.known:  # equal nodes share one tuple, which is what pricing them once rests on
                self.known[key] = self.source(node, options) if node.is_source else self.operator(node, options)
            kept[node.name], self.kinds[node.name] = self.known[key]
        return kept

    def takes(self, option: Strategy) -> tuple[Placement, ...]:
        return tuple(layout[self.axis] for layout in option.takes)

    def is_split(self, option: Strategy) -> bool:
        """Whether a source enters the program in pieces."""
        return isinstance(option.gives[0][self.axis], Shard)

    # --- sources ---------------------------------------------------------------------------------------------------

    def kind_of_source(self, node: Node) -> Kind:
        (type,) = node.outputs
        assert type is not None
        match node.op:
            case "parameter":
                return "matrix" if len(type.shape) > 1 else "vector"
            case "input":
                is_split = Shard(0) in {option.gives[0][self.axis] for option in self.strategies[node.name]}
                return 0 if is_split and type.shape[0] == self.batch else "summed"
            case "tangent":  # laid out as the output that it belongs to
                ref = self.output_of[node.target]
                return self.kinds[ref.name][ref.index] if ref is not None else "summed"
            case _:
                return "free"

    def source(self, node: Node, options: tuple[Strategy, ...]) -> tuple[tuple[Strategy, ...], tuple[Kind, ...]]:
        kind = self.kind_of_source(node)
        match node.op:
            case "parameter" if self.policy == "fsdp" or (self.policy == "tensor-parallel" and kind == "matrix"):
                options = _prefer(options, self.is_split)
            case "parameter" if self.policy == "data-parallel":
                options = _prefer(options, lambda option: not self.is_split(option))
            case "input" if kind == 0 and self.policy != "tensor-parallel":
                options = _prefer(options, lambda option: option.gives[0][self.axis] == Shard(0))
            case "input":
                options = _prefer(options, lambda option: not self.is_split(option))
            case _:
                pass
        return options, (kind,)

    # --- operators -------------------------------------------------------------------------------------------------

    def operator(self, node: Node, options: tuple[Strategy, ...]) -> tuple[tuple[Strategy, ...], tuple[Kind, ...]]:
        kinds: tuple[Kind, ...] = tuple(self.kinds[ref.name][ref.index] for ref in node.operands)
        along = self._along_the_batch(options, kinds)
        results = self._results(node, kinds, along)
        if self.policy == "tensor-parallel":
            return self._on_tensor_axis(options, kinds, results), results
        if along:
            return along, results
        if is_gathered_once(node):
            return _prefer(options, self._is_whole), results
        if all(kind == "free" for kind in results) or (self.policy == "fsdp" and all(kind in WEIGHT for kind in kinds)):
            return options, results
        return _prefer(options, self._is_whole), results

    def _along_the_batch(self, options: tuple[Strategy, ...], kinds: tuple[Kind, ...]) -> tuple[Strategy, ...]:
        """The options that split the batch of the most operands, and nothing else of those that have one."""

        def matched(option: Strategy) -> int:
            ends = zip(kinds, self.takes(option), strict=True)
            splits = [place.dim == kind for kind, place in ends if isinstance(kind, int) and isinstance(place, Shard)]
            return len(splits) if all(splits) else 0

        best = max(map(matched, options), default=0)
        if not best:
            return ()
        found = [option for option in options if matched(option) == best]
        return tuple(option for option in found if self.takes(option) == self.takes(found[0]))

    def _results(self, node: Node, kinds: tuple[Kind, ...], along: tuple[Strategy, ...]) -> tuple[Kind, ...]:
        if along:
            gives = [layout[self.axis] for layout in along[0].gives]
            return tuple(place.dim if isinstance(place, Shard) else "summed" for place in gives)
        same: Kind = "summed"
        if all(kind == "free" for kind in kinds):
            same = "free"
        elif all(kind in WEIGHT for kind in kinds):
            same = "matrix" if "matrix" in kinds else "vector"
        elif all(
            kind == "free" or self._numel(ref.name, ref.index) == 1
            for kind, ref in zip(kinds, node.operands, strict=True)
        ):
            return tuple("free" if type is not None and type.numel > 1 else "summed" for type in node.outputs)
        return (same,) * len(node.outputs)

    def _is_whole(self, option: Strategy) -> bool:
        return not any(isinstance(place, Shard) for place in self.takes(option))

    def _on_tensor_axis(
        self, options: tuple[Strategy, ...], kinds: tuple[Kind, ...], results: tuple[Kind, ...]
    ) -> tuple[Strategy, ...]:
        ends = *kinds, *results

        def leaves_the_batch(option: Strategy) -> bool:
            places = (*self.takes(option), *(layout[self.axis] for layout in option.gives))
            return not any(
                isinstance(place, Shard) and place.dim == kind for kind, place in zip(ends, places, strict=True)
            )

        def reads_pieces(option: Strategy) -> bool:
            pairs = zip(kinds, self.takes(option), strict=True)
            return all(isinstance(place, Shard) for kind, place in pairs if kind == "matrix")

        return _prefer(options, lambda option: leaves_the_batch(option) and reads_pieces(option), leaves_the_batch)

    def _numel(self, name: str, index: int) -> int:
        type = self.node_of[name].outputs[index]
        return type.numel if type is not None else 0
