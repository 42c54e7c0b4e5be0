"""What is solved in a search: a problem with the graph of all that it decides.

A problem hangs on what may be done, and not on how much memory there is. So each is assembled once; its limits are set
when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.assemble.builder import DEVICE, HOST, Sizes
from autopar.assemble.facts import GraphFacts
from autopar.assemble.problem import Assembled, assemble
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.price.overlap_discounts import Shares
from autopar.price.pricer import Pricer
from autopar.propose.strategies import Strategy, propose
from autopar.rewrite import Widened
from autopar.search.context import Question, Table
from autopar.search.left_to_backward import holding_no_more, together
from autopar.search.memory_options import NO_OPTIONS, MemoryOptions, host_bytes, key_of
from autopar.search.policies import MEMORY_SAVING, REWRITES, agree, restrict
from autopar.search.request import Held, Request
from solver.store import write_problem

# Above this many pairs of options the problem is solved with repeated layers tied to one choice. Llama-8B on 8x8 has 6
# million and needs no ties; a 3-D mesh may.
TIE_ABOVE_PAIRS = 40_000_000

BUCKETS = 2  # of gradients need memory: one is sent when it holds `bucket_bytes`, or more; one more waits for the host

Strategies = Mapping[str, tuple[Strategy, ...]]
Stop = Callable[[], bool]


def never() -> bool:
    """A search that nobody stops."""
    return False


@dataclass(frozen=True)
class Wanted:
    """A request with what it means for memory. `quick`: a plan to compare with, however far from proven
    (`solver.solve`). `simulated`: the best sum of times is but the first of several plans, of which the quickest is
    wanted. `buckets_for`: bytes of a rank that buckets of gradients are sized for; None: `memory`. `stop`: once true,
    the best known by then is the answer; what is found out until then hangs on it no more than on the clock, so it is
    no part of what a question is known by.
    """

    memory: float | None
    outputs: str
    fixed: Mapping[str, Layout]
    time_limit_s: float
    tied: bool | None
    memory_options: MemoryOptions = NO_OPTIONS
    quick: bool = False
    simulated: bool = False
    buckets_for: float | None = None
    held: tuple[Held, ...] = ()
    stop: Stop = field(default=never, compare=False, repr=False)

    @classmethod
    def of(cls, request: Request, memory_options: MemoryOptions, stop: Stop) -> Wanted:
        memory, outputs, fixed = request.memory, request.outputs, request.fixed
        tied, held = request.tied, request.held
        return cls(
            memory, outputs, fixed, request.time_limit_s, tied, memory_options,
            simulated=request.simulation, buckets_for=request.buckets_for, held=held, stop=stop,
        )  # fmt: skip

    @property
    def key(self) -> Hashable:
        """Equal for those of one answer."""
        return (
            self.memory, self.outputs, key_of(self.fixed), self.time_limit_s, self.tied, self.memory_options.key,
            self.quick, self.simulated, self.buckets_for, self.held,
        )  # fmt: skip

    @property
    def unlimited(self) -> Wanted:
        """The same, where memory is no matter."""
        options = replace(self.memory_options, ways=())
        return replace(self, memory=None, held=(), buckets_for=None, memory_options=options)

    @property
    def in_buckets_for(self) -> float | None:
        """Bytes of a rank that buckets of gradients are sized for."""
        return self.memory if self.buckets_for is None else self.buckets_for

    @property
    def is_limited(self) -> bool:
        """Whether memory matters."""
        return self.memory is not None or bool(self.held)

    @property
    def unbound(self) -> Wanted:
        """Likewise, with the very buckets: the same problem without its limits; nothing is recomputed or offloaded."""
        return replace(self.unlimited, buckets_for=self.in_buckets_for)


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


POSED = Table[Hashable, Posed]("problems without limits")
ADDED = Table[Hashable, Strategies]("the strategies of a graph that was rewritten")
RESTRICTED = Table[str, Strategies]("the strategies of a policy")
WIDENED = Table[Hashable, Widened]("the graph with all that may be decided about its forward values")
SIZES = Table[None, Sizes]("bytes that its problems have in common")
FACTS = Table[int, GraphFacts]("what hangs on a graph alone that was made of the question's")


def posed(question: Question, gathered: int, policy: str | None, wanted: Wanted) -> Posed:
    """The problem of what is wanted, with the strategies of the policy. `gathered`: bytes up to which gradients do."""
    memory_options = wanted.memory_options
    key = gathered, policy, wanted.outputs, key_of(wanted.fixed), wanted.tied, memory_options.key
    found = question.once(POSED, key, lambda: _posed(question, gathered, policy, wanted))
    limited = found.within(limits_of(found.pricer, memory_options, wanted.memory))
    if not wanted.held:
        return limited
    held = together(wanted.held) if found.tied else wanted.held
    problem = holding_no_more(limited.assembled.problem, found.wide.graph, _facts(question, found.wide), held)
    return replace(limited, assembled=replace(limited.assembled, problem=problem))


def _posed(question: Question, gathered: int, policy: str | None, wanted: Wanted) -> Posed:
    graph, pricer = question.graph, replace(question.pricer, bucket_bytes=gathered)
    strategies = strategies_of(question, wanted.memory_options) if policy is None else restricted(question, policy)
    tied = _pairs(graph, strategies) > TIE_ABOVE_PAIRS if wanted.tied is None else wanted.tied
    tied = tied and not wanted.memory_options.is_uneven(question.facts.classes, graph)
    tied = tied and not _differ(question.strategies, question.facts.classes)
    if tied and policy is not None:
        strategies = agree(strategies, question.facts.classes)
    return posed_of(question, strategies, pricer, wanted, tied)


def strategies_of(question: Question, memory_options: MemoryOptions) -> Strategies:
    """Of all nodes, also of those that are put into the graph first."""
    if memory_options.rewrite is None:
        return question.strategies
    graph = memory_options.rewritten(question.graph)
    key = memory_options.key
    return question.once(ADDED, key, lambda: propose(graph, question.pricer.mesh, question.strategies)[0])


def restricted(question: Question, policy: str) -> Strategies:
    """The strategies of the policy; those that run the traced graph have them in common with what they are made of."""
    policy = policy if policy in REWRITES else MEMORY_SAVING.get(policy, policy)
    mesh = question.pricer.mesh
    return question.once(RESTRICTED, policy, lambda: restrict(policy, question.graph, question.strategies, mesh))


def posed_of(
    question: Question, strategies: Strategies, pricer: Pricer, wanted: Wanted, tied: bool, shares: Shares | None = None
) -> Posed:
    """The problem of these strategies, without limits. `shares`: as in `autopar.price.overlap_discounts`."""
    memory_options = wanted.memory_options
    wide = _widened(question, memory_options)
    assembled = assemble(
        wide.graph,
        strategies,
        pricer,
        memory=None,
        tied=tied,
        whole_outputs=wanted.outputs == "global",
        fixed=wanted.fixed,
        again=wide.again,
        residences=memory_options.residences,
        residence_of=memory_options.residences_of(question.graph),
        shares=shares,
        facts=_facts(question, wide),
        sizes=question.once(SIZES, None, Sizes),
    )
    return Posed(assembled, wide, pricer, tied)


def limits_of(pricer: Pricer, memory_options: MemoryOptions, memory: float | None) -> dict[str, float]:
    """Bytes of each tier that a problem may take: what buckets of gradients need is not the problem's to give."""
    buckets = pricer.bucket_bytes * (BUCKETS if len(memory_options.residences) == 1 else BUCKETS + 1)
    limits = {} if memory is None else {DEVICE: max(0.0, memory - buckets)}
    return limits | ({HOST: host_bytes(pricer)} if memory_options.uses_host else {})


def _widened(question: Question, memory_options: MemoryOptions) -> Widened:
    return question.once(WIDENED, memory_options.key, lambda: memory_options.widen(question.graph))


def _facts(question: Question, wide: Widened) -> GraphFacts:
    if wide.graph is question.graph:
        return question.facts
    # the id stays the graph's own, as its facts keep it
    return question.once(FACTS, id(wide.graph), lambda: GraphFacts(wide.graph, wide.again))


def _differ(strategies: Strategies, class_of: Mapping[str, str]) -> bool:
    """Whether nodes of one class have other strategies, as some are pinned."""
    return any(strategies[name] != strategies[leader] for name, leader in class_of.items())


def _pairs(graph: Graph, strategies: Strategies) -> int:
    return sum(len(strategies[node.name]) * len(strategies[ref.name]) for node in graph.nodes for ref in node.operands)


def write(assembled: Assembled, path: Path) -> None:
    """The problem as a file for `python -m solver`; it appears whole or not at all."""
    write_problem(assembled.problem, path)
