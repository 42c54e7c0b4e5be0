"""What a search may do to need less memory of the device, and which of it a policy prescribes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from autopar.assemble.builder import HOST
from autopar.ir.graph import Graph, Node
from autopar.ir.work import VIEWS
from autopar.price.pricer import Pricer
from autopar.rewrite import OFFLOAD, RECOMPUTE, SAVE, Again, Widened, widened
from autopar.search.pins import modes_kept

# Forward values that backward needs are made again, or wait on the host; parameters live on the host with all that
# belongs to them, or their optimizer states do and stream through the device.
SPARES = ("recompute", "offload", "host", "stream")
NEEDS_OPTIM = "stream"  # needs `autopar.optim`, and so is used only where it is asked for

Modes = Callable[[Again, Node], tuple[str, ...]]  # a forward value that comes back, the node that makes it -> its modes


@dataclass(frozen=True)
class Sparing:
    """`ways`: those of SPARES that are open. `modes`: those that a value may have, if a policy says so; `residence`:
    where a policy, or the user, wants the parameters that it names; `kept`: forward node -> what the user wants of it.
    `rewrite`: what a policy makes of the graph first, but for the parameters that it is given, those on the host.
    """

    ways: tuple[str, ...] = ()
    modes: Modes | None = None
    residence: Mapping[str, str] = field(default_factory=dict[str, str])
    kept: Mapping[str, str] = field(default_factory=dict[str, str])
    rewrite: Callable[[Graph, Collection[str]], Graph] | None = None

    def keeping(self, kept: Mapping[str, str], residence: Mapping[str, str]) -> Sparing:
        """The same, but for what the user settles."""
        return replace(self, residence={**self.residence, **residence}, kept=kept)

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
        return len(self.residences) > 1 or "offload" in self.ways or OFFLOAD in self.kept.values()

    def widen(self, graph: Graph) -> Widened:
        """The graph with all that may be decided about its forward values; itself where that is nothing.

        With parameters on the host, views of them are made again in backward, of what is fetched there.
        """
        if self.rewrite is not None:
            graph = self.rewrite(graph, [name for name, where in self.residence.items() if where == HOST])
        is_settled = self.modes is not None or bool(self.kept)
        if not {"recompute", "offload"} & set(self.ways) and HOST not in self.residences and not is_settled:
            return Widened(graph, {}, graph)
        again = "recompute" in self.ways or self.modes is not None or RECOMPUTE in self.kept.values()
        found = widened(graph, recompute=again, offload="offload" in self.ways or OFFLOAD in self.kept.values())
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
        word = self.kept.get(again.origin)
        if word is not None and (meant := modes_kept(word, again, node)):
            return meant
        if self.modes is not None:
            return self.modes(again, node)
        closed = {way for way in (RECOMPUTE, OFFLOAD) if way not in self.ways}
        return tuple(mode for mode in again.modes if mode not in closed or (mode == RECOMPUTE and node.op in VIEWS))


NOTHING_SPARED = Sparing()


def checkpointed(again: Again, node: Node) -> tuple[str, ...]:
    """Nothing is saved that can be made again: what `torch.utils.checkpoint` around every region does."""
    if RECOMPUTE not in again.modes:
        return tuple(mode for mode in again.modes if mode in (SAVE, "drop"))
    return tuple(mode for mode in again.modes if mode not in (SAVE, "offload"))


def ways_on(pricer: Pricer, asked: Collection[str] | None) -> tuple[str, ...]:
    """The ways that are open: those asked for, or what makes sense on this machine. A CPU's memory is the host's.

    Raises ValueError for one that is not known.
    """
    if asked is None:
        return tuple(way for way in SPARES if way != NEEDS_OPTIM) if pricer.updates_together else ("recompute",)
    if unknown := sorted(set(asked).difference(SPARES)):
        raise ValueError(f"no way to spare memory is called {unknown[0]!r}; known: {', '.join(SPARES)}, or none")
    return tuple(way for way in SPARES if way in asked)


def host_bytes(pricer: Pricer) -> float:
    """What a rank may take of its host's memory."""
    return float(pricer.hardware.tiers[HOST].capacity_bytes)


def ways_named(spare: str | Collection[str] | None) -> tuple[str, ...] | None:
    """Ways to spare memory, from words: a collection, or a text with commas between; () for "none".

    Raises ValueError for a word that is not known, or for "none" among others.
    """
    if spare is None:
        return None
    words = [word.strip() for word in spare.split(",")] if isinstance(spare, str) else [*spare]
    if words == ["none"]:
        return ()
    if unknown := [word for word in words if word not in SPARES]:
        raise ValueError(f"spare {unknown[0]!r} is not known; choose some of {', '.join(SPARES)}, or none alone")
    return tuple(way for way in SPARES if way in words)
