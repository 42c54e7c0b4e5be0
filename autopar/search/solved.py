"""One problem of a search, from strategies to plan: assembled, solved, refereed. No torch here.

A problem that is too large to be solved at once begins among the layouts of known plans (`autopar.search.layouts`),
and what follows proves how good that is, at the prices of memory that were found there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.assemble import Assembled, assemble
from autopar.classes import classes_of
from autopar.decide import decide
from autopar.graph import Graph
from autopar.hidden import Shares
from autopar.layout import Layout
from autopar.plan import Plan
from autopar.policies import agree, restrict
from autopar.price import Pricer
from autopar.saving import Widened
from autopar.schedule import bucket_bytes
from autopar.search.layouts import Known, best_among, cheapest
from autopar.search.limits import Infeasible, picks_or_raise, prices_of
from autopar.search.question import Progress, Question
from autopar.search.spare import NOTHING_SPARED, Sparing, host_bytes, ways_on
from autopar.settle import tidied
from autopar.strategy import Strategy
from cost_models.steps import Comm, Compute
from solver import Prices, Problem, Solution, evaluate, solve

Begin = Callable[[], list[Known]]

# Above this many pairs of options the problem is solved with repeated layers tied to one choice. Llama-8B on 8x8 has 6
# million and needs no ties; a 3-D mesh may.
TIE_ABOVE_PAIRS = 40_000_000

# Below this many pairs the best plan is wanted to the last digit; above, one that is proven to be within GAP of it.
EXACT_BELOW_PAIRS = 250_000
GAP = 1e-3
ROWS = 2  # of gradients need memory: one is sent when it holds `bucket_bytes`, or more; one more waits for the host
LARGE_GAP = 5e-3  # of a large problem with all that may be spared


@dataclass(frozen=True)
class Wanted:
    """What a search is asked for; see `autopar.search.search`. `quick`: a plan to compare with, however far from proven
    (`solver.solve`).
    """

    memory: float | None
    outputs: str
    fixed: Mapping[str, Layout]
    time_limit_s: float
    tied: bool | None
    sparing: Sparing = NOTHING_SPARED
    quick: bool = False

    @property
    def unlimited(self) -> Wanted:
        """The same, where memory is no matter."""
        return replace(self, memory=None, sparing=replace(self.sparing, ways=()))


@dataclass(frozen=True)
class Begins:
    """With what a search under a limit begins: `layouts`, the plans that it combines where the problem is large; and
    `fitting`, plans that it falls back on where it finds nothing else in time.
    """

    layouts: Begin
    fitting: Begin


@dataclass(frozen=True)
class Solved:
    """The solution of a problem: with what may be spared, and repeated layers `tied` or not.

    `prices`: of memory, with which a problem like this one begins well. `tell`: makes the plan, when it is asked for.
    """

    assembled: Assembled
    solution: Solution
    pricer: Pricer
    gap: float
    sparing: Sparing
    tied: bool
    prices: Prices
    tell: Callable[[], Plan]

    @cached_property
    def plan(self) -> Plan:
        """Refereed."""
        return self.tell()

    @property
    def as_known(self) -> Known:
        assert self.solution.picks is not None
        return Known(self.assembled, self.solution.picks)


def solved_within(
    question: Question, policy: str | None, wanted: Wanted, progress: Progress, begins: Begins | None = None
) -> Solved:
    """The best plan. Raises Infeasible, NoAnswerInTime."""
    gathered = _bucket_bytes(question, wanted.memory)
    try:
        return _solved(question, gathered, policy, wanted, progress, begins)
    except Infeasible as error:
        is_hopeless = error.at_least is not None and wanted.memory is not None and error.at_least > wanted.memory
        if not gathered or is_hopeless:
            raise
        # the row in which gradients gather needs memory, too
        return _solved(question, 0, policy, wanted, progress, begins)


def _solved(
    question: Question, gathered: int, policy: str | None, wanted: Wanted, progress: Progress, begins: Begins | None
) -> Solved:
    started = time.perf_counter()
    graph, strategies, sparing = question.graph, question.strategies, wanted.sparing
    pricer = replace(question.pricer, bucket_bytes=gathered)
    if policy is not None:
        strategies = restrict(policy, graph, strategies, pricer.mesh)
    tied = _pairs(graph, strategies) > TIE_ABOVE_PAIRS if wanted.tied is None else wanted.tied
    tied = tied and not sparing.is_uneven(classes_of(graph, tied=True), graph)
    if tied and policy is not None:
        strategies = agree(strategies, classes_of(graph, tied=True))
    assembled, wide = assembled_for(question, strategies, pricer, wanted, tied)
    problem = assembled.problem
    assembled_s = time.perf_counter() - started
    progress(
        f"assembled {len(problem.costs):,} items and {len(problem.edges):,} edges in {assembled_s:.1f} s"
        + (", repeated layers tied" if tied else "")
    )
    is_small = sum(edge.cost.size for edge in problem.edges) <= EXACT_BELOW_PAIRS
    gap = 0.0 if is_small and not sparing.ways else GAP
    prices: Prices = {}
    if begins is None:
        solution = solve(problem, time_limit_s=wanted.time_limit_s, gap=gap, quick=wanted.quick)
    elif is_small:
        start = cheapest(question.found, assembled)
        solution = solve(problem, time_limit_s=wanted.time_limit_s, gap=gap, start=start)
    else:
        gap = LARGE_GAP
        solution, prices = _begun(question, assembled, wide, wanted, begins, progress)
    if begins is not None and solution.status == "unknown" and (picks := cheapest(begins.fitting(), assembled)):
        cost = evaluate(problem, picks).cost
        solution = replace(solution, status="feasible", picks=picks, cost=cost, bound=min(solution.bound, cost))
    progress(f"solved in {solution.seconds:.1f} s: {solution.status}, gap {solution.gap:.2%}")
    closed = [way for way in ways_on(pricer, None) if way not in sparing.ways]
    found = picks_or_raise(solution, wide.graph, wanted.memory, wanted.time_limit_s, closed, policy)
    picks = tidied(assembled, found)
    if picks != found:
        solution = replace(solution, picks=picks, cost=evaluate(problem, picks).cost)

    def tell() -> Plan:
        plan = decide(
            graph, assembled, picks, pricer,
            objective=solution.cost, bound=solution.bound, memory=wanted.memory, outputs=wanted.outputs,
            notes=_notes(question, policy, tied), search=_facts(graph, problem, solution, policy, tied),
        )  # fmt: skip
        if question.measured:
            plan = _with_measured_noted(plan, question)
        progress(f"refereed: {plan.step_seconds * 1e3:.3f} ms a step")
        return plan

    return Solved(assembled, solution, pricer, gap, sparing, tied, prices or solution.prices, tell)


def _begun(
    question: Question, assembled: Assembled, wide: Widened, wanted: Wanted, begins: Begins, progress: Progress
) -> tuple[Solution, Prices]:
    """The solution of a large problem, and the prices of memory among the layouts with which it began."""
    limit_s = wanted.time_limit_s
    plans = [*begins.layouts(), *question.found]
    start = best_among(plans, assembled, wide.again, limit_s)
    if start is None:
        plans += begins.fitting()
        start = best_among(plans, assembled, wide.again, limit_s)
    told = "does not fit" if start is None else f"takes {start.cost * 1e3:.3f} ms"
    progress(f"the best among the layouts of {len(plans)} plans {told}")
    if start is None:
        return solve(assembled.problem, time_limit_s=limit_s, gap=LARGE_GAP), {}
    # it is seldom bettered: what follows proves how good it is
    left_s = max(1.0, limit_s - start.seconds)
    solution = solve(
        assembled.problem, time_limit_s=left_s, gap=LARGE_GAP, start=start.picks, start_prices=start.prices, quick=True
    )
    return solution, start.prices


def assembled_for(
    question: Question, strategies: Mapping[str, tuple[Strategy, ...]], pricer: Pricer, wanted: Wanted, tied: bool,
    shares: Shares | None = None,
) -> tuple[Assembled, Widened]:  # fmt: skip
    """The problem, and the graph of all that it decides. `shares`: as in `autopar.hidden`."""
    sparing = wanted.sparing
    wide, residences = _widened(question, sparing), sparing.residences
    rows = pricer.bucket_bytes * (ROWS if len(residences) == 1 else ROWS + 1)
    assembled = assemble(
        wide.graph,
        strategies,
        pricer,
        memory=None if wanted.memory is None else wanted.memory - rows,
        tied=tied,
        whole_outputs=wanted.outputs == "global",
        fixed=wanted.fixed,
        again=wide.again,
        residences=residences,
        host_memory=host_bytes(pricer) if sparing.uses_host else None,
        residence_of=sparing.residences_of(question.graph),
        shares=shares,
    )
    return assembled, wide


def _widened(question: Question, sparing: Sparing) -> Widened:
    key = "widened", repr(sparing)
    if key not in question.known:
        question.known[key] = sparing.widen(question.graph)
    return question.known[key]


def _notes(question: Question, policy: str | None, tied: bool) -> list[str]:
    notes = [*_rule_notes(question.graph, question.without_rule)]
    if tied:
        notes.append("repeated layers share one choice; the gap is to the best plan that ties them")
    if policy is not None:
        notes.append(f"only {policy} plans were searched; the gap is to the best of them")
    if question.pricer.hardware.curves:
        notes.append(f"priced with what was measured: profile {question.pricer.hardware.name}")
    return [*notes, *question.notes]


def _facts(
    graph: Graph, problem: Problem, solution: Solution, policy: str | None, tied: bool
) -> dict[str, float | int | str]:
    """What `Plan.search` tells."""
    options = sum(len(cost) for cost in problem.costs)
    facts: dict[str, float | int | str] = {
        "status": solution.status,
        "tied": int(tied),
        "nodes": len(graph.nodes),
        "items": len(problem.costs),
        "options": options,
        "edges": len(problem.edges),
        "variables": options + sum(edge.cost.size for edge in problem.edges),
        "constraints": len(problem.costs) + sum(sum(edge.cost.shape) for edge in problem.edges),
    }
    return facts | prices_of(solution) | ({} if policy is None else {"policy": policy})


def floor_s(question: Question, policy: str) -> float:
    """Seconds of compute that no plan of the policy can do without; found out once."""
    if (key := ("floor", policy)) not in question.known:
        question.known[key] = _floor_s(question, policy)
    return question.known[key]


def _floor_s(question: Question, policy: str) -> float:
    strategies = restrict(policy, question.graph, question.strategies, question.pricer.mesh)
    least: dict[int, float] = {}
    for options in strategies.values():
        if id(options) not in least:
            computes = [[step for step in option.steps if not isinstance(step, Comm)] for option in options]
            least[id(options)] = min(map(question.pricer.seconds, computes))
    return sum(least[id(options)] for options in strategies.values())


def _with_measured_noted(plan: Plan, question: Question) -> Plan:
    steps = [step for choice in plan.choices.values() for step in choice.steps if isinstance(step, Compute)]
    timed = [step.seconds for step in steps if step.seconds is not None]
    share = sum(timed) / plan.seconds_by["compute"] if plan.seconds_by["compute"] else 0.0
    note = f"{len(timed)} of {len(steps)} operators are priced from measurements, {share:.0%} of the compute time"
    facts = {**plan.search, "measured": len(timed), "measured_digest": question.measured_digest[:16]}
    return replace(plan, notes=(note, *plan.notes), search=facts)


def _bucket_bytes(question: Question, memory: float | None) -> int:
    graph = question.graph
    trained = {result.target for result in graph.results if result.kind == "gradient" and result.ref is not None}
    parameters = [node for node in graph.nodes if node.op == "parameter" and node.target in trained]
    gradients = sum(type.nbytes for node in parameters for type in node.outputs if type is not None)
    return bucket_bytes(question.pricer, gradients, memory)


def _pairs(graph: Graph, strategies: Mapping[str, tuple[Strategy, ...]]) -> int:
    return sum(len(strategies[node.name]) * len(strategies[ref.name]) for node in graph.nodes for ref in node.operands)


def _rule_notes(graph: Graph, without_rule: tuple[str, ...]) -> list[str]:
    node_of = graph.by_name
    counts = Counter(node_of[name].op for name in without_rule)
    return [f"{op} has no sharding rule and runs replicated ({count} nodes)" for op, count in sorted(counts.items())]
