"""Problems in which it is open what is saved and where parameters live, and random picks of them, priced twice."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.assemble.liveness import Liveness, liveness
from autopar.assemble.problem import DEVICE, HOST, Assembled, assemble
from autopar.decide.decide import decide
from autopar.decide.picks import tidied
from autopar.ir.graph import Graph
from autopar.ir.work import FETCH, STORE
from autopar.lower import lower
from autopar.lower.memory import resident_bytes
from autopar.lower.program import (
    Alloc,
    Copy,
    Free,
    Inner,
    Instruction,
    Launch,
    Local,
    Loop,
    Operator,
    Program,
    Read,
    Run,
    Wait,
    Within,
)
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, propose
from autopar.rewrite import Widened
from autopar.rewrite.expose_choices import again_name
from autopar.search.memory_options import WAYS, MemoryOptions
from solver import Evaluation, evaluate
from tests.support.plans import random_picks

AMPLE = 1e15
ROW_TIMES = 3  # of bytes that gather before gradients are summed: what `search` sets apart


@dataclass(frozen=True)
class Drawn:
    """A traced graph and the problem of everything that `options` leaves open."""

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
        found: list[str] = []
        room = {DEVICE: ROW_TIMES * self.pricer.bucket_bytes, HOST: 0}
        assert all(nbytes <= said.peak.get(tier, 0.0) + room[tier] for tier, nbytes in plan.peak_bytes.items())
        live = liveness(self.wide.graph)
        for tier, more in room.items():
            theirs = self._said(picks, tier, live.instants) + more
            theirs[live.gathered_at] = max(theirs[live.gathered_at : live.instants])
            for (instant, name), nbytes in self._held(plan, live, tier).items():
                if nbytes > theirs[instant]:
                    found.append(f"{tier} at {name}: {nbytes}, the problem says {theirs[instant]}")
        return found

    def _held(self, plan: Plan, wide: Liveness, tier: str) -> dict[tuple[int, str], int]:
        """The most that the plan's program holds, by the problem's instant of what runs and its name."""
        stands_for, instant, name = self._stands_for(plan.graph), 0, "the start"
        program = lower(plan, None, self.pricer)
        level = resident_bytes(program).get(tier, 0)
        found: dict[tuple[int, str], int] = {}
        for phase, instruction in self._with_their_memory(program):
            made = [one.buffer for one in instruction if isinstance(one, Alloc) and one.buffer.tier == tier]
            gone = [one.buffer for one in instruction if isinstance(one, Free) and one.buffer.tier == tier]
            match next(one for one in instruction if not isinstance(one, Alloc | Free)):
                case Run(Operator(node)) | Run(Local(of=Read(node) | Copy(node))) | Launch(of=Read(node) | Copy(node)):
                    instant, name = wide.at[stands_for[node]], node
                case Run(Inner(node)) | Launch(of=Within(node)) | Wait(of=Within(node)):
                    instant, name = wide.at[stands_for[node]], node
                case _ if phase == "optimizer":  # it has an order of its own
                    instant, name = wide.gathered_at, "the updates"
                case _:
                    pass
            level += sum(buffer.nbytes for buffer in made)
            found[instant, name] = max(found.get((instant, name), 0), level)
            level -= sum(buffer.nbytes for buffer in gone)
        return found

    def _with_their_memory(self, program: Program) -> Iterator[tuple[str, list[Instruction]]]:
        """Each instruction with what is allocated for it and freed behind it."""
        for phase, instructions in program.instructions.items():
            group: list[Instruction] = []
            for instruction in _unrolled(instructions):
                if any(not isinstance(one, Alloc | Free) for one in group) and not isinstance(instruction, Free):
                    yield phase, group
                    group = []
                group.append(instruction)
            if any(not isinstance(one, Alloc | Free) for one in group):
                yield phase, group

    def _stands_for(self, runs: Graph) -> dict[str, str]:
        """The problem's node for each of the plan's."""
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
        return stands_for

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


def _unrolled(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """Those of loops, once: each round holds what the first does."""
    for instruction in instructions:
        if isinstance(instruction, Loop):
            yield from _unrolled(instruction.body)
        else:
            yield instruction


def drawn(
    graph: Graph,
    pricer: Pricer,
    options: MemoryOptions | Collection[str] = WAYS,
    *,
    strategies: Mapping[str, tuple[Strategy, ...]] | None = None,
    memory: float = AMPLE,
    host_memory: float = AMPLE,
    tied: bool = False,
) -> Drawn:
    """The problem as `search` puts it."""
    if not isinstance(options, MemoryOptions):
        options = MemoryOptions(tuple(way for way in WAYS if way in options))
    if strategies is None:
        strategies, _ = propose(graph, pricer.mesh)
    wide = options.widen(graph)
    assembled = assemble(
        wide.graph, strategies, pricer,
        memory=memory, host_memory=host_memory, tied=tied, again=wide.again, residences=options.residences,
        residence_of=options.residences_of(graph),
    )  # fmt: skip
    return Drawn(graph, wide, assembled, pricer)
