"""What a search may do to need less memory of the device, and which of it a policy prescribes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace

from autopar.assemble.builder import HOST
from autopar.ir.graph import Graph, Node
from autopar.ir.work import VIEWS
from autopar.price.pricer import Pricer
from autopar.rewrite import OFFLOAD, RECOMPUTE, SAVE, Again, Widened, widened

# What a user may allow, and what it is called in problems, graphs and plans: forward values that backward needs are
# made again, or wait on the host; parameters live on the host with all that belongs to them, or their optimizer states
# do and stream through the device. These tables are the one place where the words of users are translated.
ALLOWED: Mapping[str, str] = {
    "recompute": RECOMPUTE,
    "offload-activations": OFFLOAD,
    "offload-parameters": HOST,
    "offload-optimizer": "stream",
}
NEEDS_OPTIM = "offload-optimizer"  # needs `autopar.optim`, and so is used only where it is asked for
WAYS = tuple(ALLOWED.values())

# What a user may pin a module to, and a parameter.
MODES: Mapping[str, str] = {"save": SAVE, "recompute": RECOMPUTE, "offload-activations": OFFLOAD}
RESIDENCES: Mapping[str, str] = {"device": "device", "offload-parameters": HOST, "offload-optimizer": "stream"}

Modes = Callable[[Again, Node], tuple[str, ...]]  # a forward value that comes back, the node that makes it -> its modes


def key_of(mapping: Mapping[str, Hashable]) -> Hashable:
    """Equal for equal mappings, in whatever order they are."""
    return frozenset(mapping.items())


@dataclass(frozen=True)
class MemoryOptions:
    """What may be done, and what is settled.

    `ways`: those of WAYS that are open. `modes`: those that a value may have, if a policy says so; `residence`:
    where a policy, or the user, wants the parameters that it names; `pinned`: forward node -> the mode that the user
    wants.
    `rewrite`: what is made of the graph first, but for the parameters that it is given, those on the host.
    """

    ways: tuple[str, ...] = ()
    modes: Modes | None = None
    residence: Mapping[str, str] = field(default_factory=dict[str, str])
    pinned: Mapping[str, str] = field(default_factory=dict[str, str])
    rewrite: Callable[[Graph, Collection[str]], Graph] | None = None

    @property
    def key(self) -> Hashable:
        """Equal for those that open, settle and rewrite the same."""
        return self.ways, self.modes, key_of(self.residence), key_of(self.pinned), self.rewrite

    def pinning(self, pinned: Mapping[str, str], residence: Mapping[str, str]) -> MemoryOptions:
        """The same, but for what the user pins."""
        return replace(self, residence={**self.residence, **residence}, pinned=pinned)

    @property
    def residences(self) -> tuple[str, ...]:
        """Where any parameter may reside."""
        open_ = {*self.ways, *self.residence.values()}
        return ("device", *(where for where in ("host", "stream") if where in open_))

    def residences_of(self, graph: Graph) -> dict[str, tuple[str, ...]]:
        """Where each parameter may reside."""
        free = ("device", *(where for where in ("host", "stream") if where in self.ways))
        names = [node.target for node in graph.nodes if node.op == "parameter"]
        return {name: (self.residence[name],) if name in self.residence else free for name in names}

    def is_uneven(self, class_of: Mapping[str, str], graph: Graph) -> bool:
        """Whether parameters of one class are to reside in different places."""
        where = self.residences_of(graph)
        told = {(class_of[node.name], where[node.target]) for node in graph.nodes if node.op == "parameter"}
        return len(told) > len({leader for leader, _ in told})

    @property
    def uses_host(self) -> bool:
        return len(self.residences) > 1 or "offload" in self.ways or OFFLOAD in self.pinned.values()

    def rewritten(self, graph: Graph) -> Graph:
        """The graph as it is made before anything is decided."""
        if self.rewrite is None:
            return graph
        return self.rewrite(graph, [name for name, where in self.residence.items() if where == HOST])

    def widen(self, graph: Graph) -> Widened:
        """The graph with all that may be decided about its forward values; itself where that is nothing.

        With parameters on the host, views of them are made again in backward, of what is fetched there.
        """
        graph = self.rewritten(graph)
        is_settled = self.modes is not None or bool(self.pinned)
        if not {"recompute", "offload"} & set(self.ways) and HOST not in self.residences and not is_settled:
            return Widened(graph, {}, graph)
        again = "recompute" in self.ways or self.modes is not None or RECOMPUTE in self.pinned.values()
        found = widened(graph, recompute=again, offload="offload" in self.ways or OFFLOAD in self.pinned.values())
        if not is_settled:
            return found
        node_of = graph.by_name
        settled = {
            name: replace(one, modes=self._modes(one, node_of[one.origin])) if one.modes else one
            for name, one in found.again.items()
        }
        return replace(found, again=settled)

    def _modes(self, again: Again, node: Node) -> tuple[str, ...]:
        """Those of a value's modes that are open."""
        word = self.pinned.get(again.origin)
        if word is not None and (meant := _modes_pinned(word, again, node)):
            return meant
        if self.modes is not None:
            return self.modes(again, node)
        closed = {way for way in (RECOMPUTE, OFFLOAD) if way not in self.ways}
        return tuple(mode for mode in again.modes if mode not in closed or (mode == RECOMPUTE and node.op in VIEWS))


def _modes_pinned(mode: str, again: Again, node: Node) -> tuple[str, ...]:
    """Of the modes of a value, those that are meant by the one it is pinned to; none if it can have no such mode."""
    if node.op in VIEWS:  # another look, which takes no time, and is not to hold what it looks at
        if mode == SAVE:
            return tuple(one for one in again.modes if one != OFFLOAD)
        return tuple(one for one in again.modes if one not in (SAVE, OFFLOAD)) if RECOMPUTE in again.modes else ()
    return tuple(one for one in again.modes if one in (mode, "drop")) if mode in again.modes else ()


NO_OPTIONS = MemoryOptions()


def checkpointed(again: Again, node: Node) -> tuple[str, ...]:
    """Nothing is saved that can be made again: what `torch.utils.checkpoint` around every region does."""
    if RECOMPUTE not in again.modes:
        return tuple(mode for mode in again.modes if mode in (SAVE, "drop"))
    return tuple(mode for mode in again.modes if mode not in (SAVE, "offload"))


def ways_on(pricer: Pricer, allow: Collection[str] | None) -> tuple[str, ...]:
    """The ways that are open: those that the words allow, or what makes sense on this machine. A CPU's memory is the
    host's.

    Raises ValueError for a word that is not known.
    """
    words = allowed(allow)
    if words is None:
        words = tuple(word for word in ALLOWED if word != NEEDS_OPTIM) if pricer.updates_together else ("recompute",)
    if pricer.rounds.count > 1:  # gradients are added up where they are made
        words = tuple(word for word in words if ALLOWED[word] not in (HOST, "stream"))
    return tuple(ALLOWED[word] for word in words)


def host_bytes(pricer: Pricer) -> float:
    """What a rank may take of its host's memory."""
    return float(pricer.hardware.tiers[HOST].capacity_bytes)


def allowed(allow: str | Collection[str] | None) -> tuple[str, ...] | None:
    """Those of ALLOWED that are named, by a collection of words, or a text with commas between; () for "none".

    Raises ValueError for a word that is not known, or for "none" among others.
    """
    if allow is None:
        return None
    words = [word.strip() for word in allow.split(",")] if isinstance(allow, str) else [*allow]
    if words == ["none"]:
        return ()
    if unknown := [word for word in words if word not in ALLOWED]:
        raise ValueError(f"allow {unknown[0]!r} is not known; choose some of {', '.join(ALLOWED)}, or none alone")
    return tuple(word for word in ALLOWED if word in words)


def words_of(residence: Mapping[str, str]) -> dict[str, str]:
    """Parameter -> the word that pins it to where it resides."""
    word_of = {where: word for word, where in RESIDENCES.items()}
    return {name: word_of[where] for name, where in residence.items()}
