"""Baselines: what people do by hand, as restrictions of the same problem, so that one referee prices them all.

A policy keeps, mesh axis by mesh axis, those strategies of each node that it would use (`policy_axis`); the solver
picks the best of what is left.

A data axis (data-parallel, fsdp) splits the batch wherever it is and takes everything else whole, or still to be
summed. A tensor axis reads matrices only in pieces and never splits the batch. Where a policy has no way to run a node
(a size does not divide, an operator has no rule), the node runs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import reduce

from autopar.ir.batch_norm import GLOBAL, statistics_of
from autopar.ir.graph import Graph, batch_size
from autopar.ir.mesh import Mesh
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, propose
from autopar.rewrite import gathered_once, kept_whole
from autopar.rules.patterns import is_pattern
from autopar.search.elixir.placing import placed
from autopar.search.grid_policies import AXES, CUBE, SUMMA, TESSERACT, grid_of, on_a_grid
from autopar.search.memory_options import MemoryOptions, checkpointed
from autopar.search.policy_axis import PolicyAxis, Strategies, everywhere
from autopar.search.sequence_policies import DoesNotApply, along_the_sequence, with_attention

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

ON_LAST = "+tensor-parallel"  # behind the name of what the other axes of a mesh do

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

# Policies that a search tries only where they are asked for by name. On a mesh of several axes the last one does what
# is said here, and the others are fsdp, but where it says something else.
NAMED: Mapping[str, str] = {
    "data-parallel+tensor-parallel": "tensor-parallel on the last axis of the mesh, data-parallel on the others, two "
    "axes or more (Narayanan et al. 2021)",
    "megatron-sp": "tensor-parallel, with norms split along the sequence (Korthikanti et al. 2022, section 4.2)",
    "ulysses": "the sequence is split, and in attention the heads are (Jacobs et al. 2023); parameters as in fsdp",
    "ring": "the sequence is split, and keys and values go round (Liu et al. 2023); parameters as in fsdp",
    "optimus-2d": "activations and weights lie in blocks of the last two axes, products are SUMMA (Xu and You 2023)",
    "2.5d": "optimus-2d, while the axis before splits the batch and has all weights (Tesseract, Wang et al. 2022)",
    "3d": "activations and weights are split by the last three axes, of one size (Bian et al. 2021)",
}


def policies_for(mesh: Mesh, *, saving: bool = False, once: bool = False, dominated: bool = False) -> tuple[str, ...]:
    """Names of the policies that a mesh of so many axes allows; `saving`: also those that keep less on the device;
    `once`: also those that gather weights once, which the search's own plans never do; `dominated`: also those that
    cannot be the best.
    """
    named = (name for name in POLICIES if saving or name not in MEMORY_SAVING or (once and name in REWRITES))
    named = (name for name in named if dominated or name not in DOMINATED)
    return tuple(name for name in named if len(mesh.sizes) > 1 or not name.endswith(ON_LAST))


def is_open(policy: str, ways: Collection[str]) -> bool:
    """Whether a policy does only what is allowed."""
    return set(NEEDS.get(policy, ())).issubset(ways)


def policy_named(name: str) -> str:
    """The policy of that name, or that is also called so. Raises ValueError for one that is not known."""
    name = ALIASES.get(name, name)
    if name not in {**POLICIES, **NAMED}:
        raise ValueError(f"no policy {name!r}; known policies: {', '.join({**POLICIES, **NAMED})}")
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

    Raises ValueError for a policy that is not known, DoesNotApply for one that is not for this mesh or model.
    """
    policy = policy_named(policy)
    if policy.endswith(ON_LAST) and len(mesh.sizes) < 2:
        raise DoesNotApply(
            f"policy {policy} needs two mesh axes or more, mesh {mesh} has one; give --mesh data=N,tensor=N"
        )
    if policy in REWRITES:  # with the nodes that keep what is gathered
        graph = REWRITES[policy](graph, ())
        strategies, _ = propose(graph, mesh, strategies)
    policy = MEMORY_SAVING.get(policy, policy)
    if policy in AXES:
        return _and_a_grid(policy, graph, strategies, mesh)
    kept = by_hand(strategies)
    of_sequence = policy in NAMED and not policy.endswith(ON_LAST)
    if of_sequence:
        kept = with_attention(graph, kept, strategies)
    on_others = "fsdp" if of_sequence else policy.removesuffix(ON_LAST)
    on_last = ON_LAST.removeprefix("+") if policy.endswith(ON_LAST) else policy
    for axis, size in enumerate(mesh.sizes):
        is_last = axis == len(mesh.sizes) - 1
        if of_sequence and is_last:
            kept = along_the_sequence(policy, axis, mesh, graph, kept)
        elif size > 1:
            kept = PolicyAxis(on_last if is_last else on_others, axis, graph, kept).run()
    return kept


def _and_a_grid(policy: str, graph: Graph, strategies: Strategies, mesh: Mesh) -> dict[str, tuple[Strategy, ...]]:
    """A grid of the last axes, behind axes that split the batch."""
    grid = grid_of(policy, mesh)
    kept = with_attention(graph, by_hand(strategies, and_body="" if policy == CUBE else SUMMA), strategies)
    for axis in range(grid[0]):
        if mesh.sizes[axis] > 1:
            has_all = policy == TESSERACT and axis == grid[0] - 1
            kept = PolicyAxis("data-parallel" if has_all else "fsdp", axis, graph, kept).run()
    return on_a_grid(policy, mesh, graph, kept)


def by_hand(strategies: Strategies, and_body: str = "") -> dict[str, tuple[Strategy, ...]]:
    """Those of factor rules: no baseline has loops, but where they are pinned, nor what is stored in more pieces.
    `and_body`: loops that are what a policy is about.
    """
    return everywhere(strategies, lambda one: (not is_pattern(one.body) or one.body == and_body) and not one.stored)


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
