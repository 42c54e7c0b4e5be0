"""Problems in which it is open what is saved and where parameters live, and random picks of them, priced twice."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.assemble import DEVICE, HOST, Assembled, assemble
from autopar.decide import Holding, Referee, decide
from autopar.graph import Graph
from autopar.liveness import Liveness, liveness
from autopar.plan import Plan
from autopar.price import Pricer
from autopar.saving import Widened
from autopar.saving.widen import again_name
from autopar.search.spare import SPARES, Sparing
from autopar.settle import tidied
from autopar.strategy import Strategy, propose
from autopar.work import FETCH, STORE
from solver import Evaluation, evaluate
from tests.support.plans import random_picks

AMPLE = 1e15
ROW_TIMES = 3  # of bytes that gather before gradients are summed: what `search` sets apart


@dataclass(frozen=True)
class Drawn:
    """A traced graph and the problem of everything that `sparing` leaves open."""

    graph: Graph
    wide: Widened
    assembled: Assembled
    pricer: Pricer

    def tidy(self, rng: random.Random) -> tuple[int, ...]:
        """Random picks, with nothing brought back that nobody reads."""
        return tidied(self.assembled, random_picks(self.assembled, rng))

    def priced(self, picks: Sequence[int]) -> Evaluation:
        return evaluate(self.assembled.problem, picks)

    def plan(self, picks: Sequence[int], said: Evaluation, *, memory: float | None = None) -> Plan:
        """Raises RefereeError where the referee finds another price than `said`, or more than `memory`."""
        return decide(
            self.wide.base, self.assembled, picks, self.pricer,
            objective=said.cost, bound=0.0, memory=memory, outputs="sharded", notes=(), search={},
        )  # fmt: skip

    def wrong(self, picks: Sequence[int]) -> list[str]:
        """Instants at which the referee finds more bytes than the problem says."""
        said = self.priced(picks)
        plan = self.plan(picks, said)
        referee = Referee(plan.graph, plan.choices, plan.deliveries, self.pricer, plan.residence)
        found: list[str] = []
        room = {DEVICE: ROW_TIMES * self.pricer.bucket_bytes, HOST: 0}
        assert all(nbytes <= said.peak.get(tier, 0.0) + room[tier] for tier, nbytes in plan.peak_bytes.items())
        live = liveness(self.wide.graph)
        where = self._instants(plan.graph, referee.live, live)
        for tier, more in room.items():
            ours = _profile(referee.holdings(), tier, referee.live.instants)
            theirs = self._said(picks, tier, live.instants) + more
            for instant, nbytes in enumerate(ours):
                if nbytes > theirs[where[instant]]:
                    node = referee.live.node_at[instant]
                    found.append(f"{tier} at {node or 'the end'}: {nbytes}, the problem says {theirs[where[instant]]}")
        return found

    def _instants(self, runs: Graph, live: Liveness, wide: Liveness) -> list[int]:
        """The problem's instant of each of the referee's."""
        names = self.wide.graph.by_name
        stands_for: dict[str, str] = {}
        following = ""
        for node in reversed(runs.nodes):
            if node.op == STORE:
                stands_for[node.name] = node.operands[0].name
            elif node.op == FETCH and runs.by_name[node.operands[0].name].op == STORE:
                origin = runs.by_name[node.operands[0].name].operands[0].name
                stands_for[node.name] = following = again_name(origin, self.graph.by_name)
            elif node.op == FETCH:
                stands_for[node.name] = following
            else:
                stands_for[node.name] = following = node.name
        assert set(stands_for.values()) <= names.keys()
        found = [wide.at[stands_for[name]] if name else -1 for name in live.node_at]
        ends = range(live.gathered_at, live.instants)
        found[live.gathered_at :] = [wide.gathered_at + at - live.gathered_at for at in ends]
        assert found == sorted(found)
        return found

    def _said(self, picks: Sequence[int], tier: str, instants: int) -> np.ndarray:
        change = np.zeros(instants + 1)
        problem = self.assembled.problem
        for usage in problem.usages:
            if usage.resource == tier:
                change[usage.start] += usage.nbytes[picks[usage.item]]
                change[usage.end] -= usage.nbytes[picks[usage.item]]
        for usage in problem.edge_usages:
            if usage.resource == tier:
                edge = problem.edges[usage.edge]
                change[usage.start] += usage.nbytes[picks[edge.src], picks[edge.dst]]
                change[usage.end] -= usage.nbytes[picks[edge.src], picks[edge.dst]]
        return change.cumsum()


def _profile(holdings: Sequence[Holding], tier: str, instants: int) -> np.ndarray:
    change = np.zeros(instants + 1, dtype=np.int64)
    for held in holdings:
        if held.tier == tier:
            change[int(held.start)] += held.nbytes
            change[int(held.end)] -= held.nbytes
    return change.cumsum()[:-1]


def drawn(
    graph: Graph,
    pricer: Pricer,
    sparing: Sparing | Collection[str] = SPARES,
    *,
    strategies: Mapping[str, tuple[Strategy, ...]] | None = None,
    memory: float = AMPLE,
    host_memory: float = AMPLE,
    tied: bool = False,
) -> Drawn:
    """The problem as `search` puts it."""
    if not isinstance(sparing, Sparing):
        sparing = Sparing(tuple(way for way in SPARES if way in sparing))
    if strategies is None:
        strategies, _ = propose(graph, pricer.mesh)
    wide = sparing.widen(graph)
    assembled = assemble(
        wide.graph, strategies, pricer,
        memory=memory, host_memory=host_memory, tied=tied, again=wide.again, residences=sparing.residences,
        residence_of=sparing.residences_of(graph),
    )  # fmt: skip
    return Drawn(graph, wide, assembled, pricer)
