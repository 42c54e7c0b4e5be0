"""A question: what is searched, whatever the limits; and what was found out about it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.price.calls import Profile, operations, wanted, with_measured
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, propose
from autopar.search.restricted import Known
from cost_models.hardware import Hardware
from cost_models.measured import Key

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """What is searched, whatever the limits: a graph on a mesh and machine, with every strategy of every node.

    `measured`: seconds of the calls that were timed, which stand in the strategies' steps; `notes`: of how they came.
    `known`: what was found out already: answers of policies and without a limit of memory, and graphs that were
    widened. `found`: plans of other answers under a limit; the next search begins with the best of them that fits, so
    it finds none that is worse, however short its time.
    """

    graph: Graph
    pricer: Pricer
    strategies: Mapping[str, tuple[Strategy, ...]]
    without_rule: tuple[str, ...]
    measured: Mapping[Key, float] = field(default_factory=dict[Key, float])
    notes: tuple[str, ...] = ()
    known: dict[object, Any] = field(default_factory=dict[object, Any], compare=False, repr=False)
    found: list[Known] = field(default_factory=list[Known], compare=False, repr=False)

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
    progress: Progress = lambda text: None,
) -> Question:
    """Propose the strategies. Several answers to one question share them, and the prices of layout changes."""
    strategies, without_rule = propose(graph, mesh)
    progress(f"proposed {sum(map(len, strategies.values())):,} strategies for {len(graph.nodes):,} nodes")
    pricer = Pricer.on(mesh, hardware, optimizer)
    if profile is None:
        return Question(graph, pricer, strategies, without_rule)
    found = operations(graph, strategies, mesh)
    calls = wanted(found, pricer)
    profiled = profile(calls)
    measured = {want.call.key: profiled.seconds[want.call.key] for want in calls if want.call.key in profiled.seconds}
    strategies = with_measured(strategies, found, pricer, measured)
    return Question(graph, pricer, strategies, without_rule, measured, profiled.notes)
