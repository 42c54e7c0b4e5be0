"""What is solved in a search: a problem with the graph of all that it decides.

A problem hangs on what may be done, and not on how much memory there is. So each is assembled once; its limits are set
when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.assemble.builder import DEVICE, HOST
from autopar.assemble.liveness import Liveness, liveness
from autopar.assemble.problem import Assembled, assemble
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.price.overlap_discounts import Shares
from autopar.price.pricer import Pricer
from autopar.propose.repeated_blocks import classes_of
from autopar.propose.strategies import Strategy
from autopar.rewrite import Widened
from autopar.search.context import Question
from autopar.search.memory_options import NOTHING_SPARED, Sparing, host_bytes
from autopar.search.policies import REWRITES, SPARING, agree, restrict
from solver.store import write_problem

# Above this many pairs of options the problem is solved with repeated layers tied to one choice. Llama-8B on 8x8 has 6
# million and needs no ties; a 3-D mesh may.
TIE_ABOVE_PAIRS = 40_000_000

ROWS = 2  # of gradients need memory: one is sent when it holds `bucket_bytes`, or more; one more waits for the host

Strategies = Mapping[str, tuple[Strategy, ...]]
Stop = Callable[[], bool]


def never() -> bool:
    """A search that nobody stops."""
    return False


@dataclass(frozen=True)
class Wanted:
    """What a search is asked for; see `autopar.search.search`. `quick`: a plan to compare with, however far from proven
    (`solver.solve`). `rows_for`: bytes of a rank that rows of gradients are sized for, where `memory` is no limit.
    `stop`: once true, the best known by then is the answer; what is found out until then hangs on it no more than on
    the clock, so it is no part of what a question is known by.
    """

    memory: float | None
    outputs: str
    fixed: Mapping[str, Layout]
    time_limit_s: float
    tied: bool | None
    sparing: Sparing = NOTHING_SPARED
    quick: bool = False
    rows_for: float | None = None
    stop: Stop = field(default=never, compare=False, repr=False)

    @property
    def unlimited(self) -> Wanted:
        """The same, where memory is no matter."""
        return replace(self, memory=None, sparing=replace(self.sparing, ways=()))

    @property
    def unbound(self) -> Wanted:
        """Likewise, but with the very rows: the same problem without its limits, where nothing is spared."""
        return replace(self.unlimited, rows_for=self.memory)


@dataclass(frozen=True)
class Posed:
    """A problem, what its strategies were priced with, and the graph that it decides. `tied`: repeated layers are."""

    assembled: Assembled
    wide: Widened
    pricer: Pricer
    tied: bool

    def within(self, limits: Mapping[str, float]) -> Posed:
        """The same, with these limits of memory."""
        problem = replace(self.assembled.problem, limits=limits)
        return replace(self, assembled=replace(self.assembled, problem=problem))


def posed(question: Question, gathered: int, policy: str | None, wanted: Wanted) -> Posed:
    """The problem of what is wanted, with the strategies of the policy. `gathered`: bytes up to which gradients do."""
    sparing = wanted.sparing
    key = "posed", gathered, policy, wanted.outputs, repr(wanted.fixed), wanted.tied, repr(sparing)
    if key not in question.known:
        question.known[key] = _posed(question, gathered, policy, wanted)
    found: Posed = question.known[key]
    return found.within(limits_of(found.pricer, sparing, wanted.memory))


def _posed(question: Question, gathered: int, policy: str | None, wanted: Wanted) -> Posed:
    graph, strategies = question.graph, question.strategies
    pricer = replace(question.pricer, bucket_bytes=gathered)
    if policy is not None:
        strategies = restricted(question, policy)
    tied = _pairs(graph, strategies) > TIE_ABOVE_PAIRS if wanted.tied is None else wanted.tied
    tied = tied and not wanted.sparing.is_uneven(_classes(question), graph)
    if tied and policy is not None:
        strategies = agree(strategies, _classes(question))
    return posed_of(question, strategies, pricer, wanted, tied)


def restricted(question: Question, policy: str) -> Strategies:
    """The strategies of the policy; those that run the traced graph have them in common with what they are made of."""
    policy = policy if policy in REWRITES else SPARING.get(policy, policy)
    if (key := ("restricted", policy)) not in question.known:
        question.known[key] = restrict(policy, question.graph, question.strategies, question.pricer.mesh)
    return question.known[key]


def posed_of(
    question: Question, strategies: Strategies, pricer: Pricer, wanted: Wanted, tied: bool, shares: Shares | None = None
) -> Posed:
    """The problem of these strategies, without limits. `shares`: as in `autopar.price.overlap_discounts`."""
    sparing = wanted.sparing
    wide = _widened(question, sparing)
    assembled = assemble(
        wide.graph,
        strategies,
        pricer,
        memory=None,
        tied=tied,
        whole_outputs=wanted.outputs == "global",
        fixed=wanted.fixed,
        again=wide.again,
        residences=sparing.residences,
        residence_of=sparing.residences_of(question.graph),
        shares=shares,
        live=_live(question, wide.graph),
    )
    return Posed(assembled, wide, pricer, tied)


def limits_of(pricer: Pricer, sparing: Sparing, memory: float | None) -> dict[str, float]:
    """Bytes of each tier that a problem may take: what rows of gradients need is not the problem's to give."""
    rows = pricer.bucket_bytes * (ROWS if len(sparing.residences) == 1 else ROWS + 1)
    limits = {} if memory is None else {DEVICE: memory - rows}
    return limits | ({HOST: host_bytes(pricer)} if sparing.uses_host else {})


def _widened(question: Question, sparing: Sparing) -> Widened:
    key = "widened", repr(sparing)
    if key not in question.known:
        question.known[key] = sparing.widen(question.graph)
    return question.known[key]


def _live(question: Question, graph: Graph) -> Liveness:
    key = "live", id(graph)  # which stays its own, as the graph is kept beside
    if key not in question.known:
        question.known[key] = graph, liveness(graph)
    return question.known[key][1]


def _classes(question: Question) -> dict[str, str]:
    if "classes" not in question.known:
        question.known["classes"] = classes_of(question.graph, tied=True)
    return question.known["classes"]


def _pairs(graph: Graph, strategies: Strategies) -> int:
    return sum(len(strategies[node.name]) * len(strategies[ref.name]) for node in graph.nodes for ref in node.operands)


def write(assembled: Assembled, path: Path) -> None:
    """The problem as a file for `python -m solver`; it appears whole or not at all."""
    write_problem(assembled.problem, path)
