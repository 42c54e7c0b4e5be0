"""A question: what is searched, whatever the limits; and what was found out about it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from autopar.assemble.facts import GraphFacts
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.outside import Rules
from autopar.ir.words import count_of
from autopar.price.calls import Profile, operations, wanted, with_measured
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, propose
from autopar.rules.outside import given
from autopar.search.restricted import Known, Proven
from cost_models.hardware import Hardware
from cost_models.measured import Key

Progress = Callable[[str], None]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class Table(Generic[K, V]):
    """What is found out about a question once for each key. Who finds it declares the table, beside the type.

    `told`: what is in it, for readers.
    """

    told: str


@dataclass(frozen=True)
class Question:
    """What is searched, whatever the limits: a graph on a mesh and machine, with every strategy of every node.

    `measured`: seconds of the calls that were timed, which stand in the strategies' steps; `notes`: of how they came.
    `facts`: what hangs on the graph alone, which questions on other meshes may share.
    `found`: plans of other answers under a limit; the next search begins with the best of them that fits, so
    it finds none that is worse, however short its time. `proven`: bounds of theirs.
    """

    graph: Graph
    pricer: Pricer
    facts: GraphFacts
    strategies: Mapping[str, tuple[Strategy, ...]]
    without_rule: tuple[str, ...]
    measured: Mapping[Key, float] = field(default_factory=dict[Key, float])
    notes: tuple[str, ...] = ()
    found: list[Known] = field(default_factory=list[Known], compare=False, repr=False)
    proven: list[Proven] = field(default_factory=list[Proven], compare=False, repr=False)
    _tables: dict[Table[Any, Any], dict[Any, Any]] = field(
        default_factory=dict[Table[Any, Any], dict[Any, Any]], compare=False, repr=False
    )

    def once(self, table: Table[K, V], key: K, find: Callable[[], V]) -> V:
        """What the table has for the key; where there is nothing yet, it is found now."""
        known: dict[K, V] = self._tables.setdefault(table, {})
        if key not in known:
            known[key] = find()
        return known[key]

    def forget(self) -> None:
        """Drop what the tables have; it is found again when it is asked for."""
        self._tables.clear()

    @property
    def measured_digest(self) -> str:
        """Hash (hex) of what was measured, a key for caches; "" where nothing was."""
        told = repr(sorted(self.measured.items()))
        return hashlib.sha256(told.encode()).hexdigest() if self.measured else ""


def ask(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    *,
    optimizer: str = "adamw",
    profile: Profile | None = None,
    facts: GraphFacts | None = None,
    progress: Progress = lambda text: None,
    rules: Rules | Iterable[Rules] | None = None,
) -> Question:
    """Propose the strategies. Several answers to one question share them, and the prices of layout changes. `facts`: of
    the graph, where another question has them already. `rules`: of users' packages, in the place of those that the
    graph was made under.
    """
    graph = graph if rules is None else graph.under(given(rules))
    facts = facts or GraphFacts(graph)
    strategies, without_rule = propose(graph, mesh)
    progress(
        f"proposed {count_of(sum(map(len, strategies.values())), 'strategy', 'strategies')} for "
        f"{count_of(len(graph.nodes), 'node')}"
    )
    pricer = Pricer.on(mesh, hardware, optimizer, rounds=graph.rounds)
    if profile is None:
        return Question(graph, pricer, facts, strategies, without_rule)
    found = operations(graph, strategies, mesh)
    calls = wanted(found, pricer)
    profiled = profile(calls)
    measured = {want.call.key: profiled.seconds[want.call.key] for want in calls if want.call.key in profiled.seconds}
    strategies = with_measured(strategies, found, pricer, measured)
    return Question(graph, pricer, facts, strategies, without_rule, measured, profiled.notes)
