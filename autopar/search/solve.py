"""One problem of a search, from strategies to plan: assembled, solved, refereed. No torch here.

A problem that is too large to be solved at once begins among the layouts of known plans (`autopar.search.restricted`),
and what follows proves how good that is, at the prices of memory that were found there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.assemble.problem import Assembled
from autopar.decide.decide import decide
from autopar.decide.picks import tidied
from autopar.errors import Infeasible
from autopar.ir.graph import Graph
from autopar.lower.buckets import bucket_bytes
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.search.context import Progress, Question, Table
from autopar.search.limits import picks_or_raise, prices_of
from autopar.search.memory_options import MemoryOptions, ways_on
from autopar.search.policies import MEMORY_SAVING, called
from autopar.search.problems import Posed, Wanted, posed, restricted
from autopar.search.restricted import GENERATIONS, Known, Proven, best_among, cheapest, worthwhile
from autopar.search.rule_notes import rule_notes
from cost_models.steps import Comm, Compute, Loop, Move, Step
from solver import Prices, Problem, Solution, evaluate, solve

Begin = Callable[[], list[Known]]

FLOORS = Table[str | None, float]("seconds that no plan of a policy can do without")

# Below this many pairs the best plan is wanted to the last digit; above, one that is proven to be within GAP of it.
EXACT_BELOW_PAIRS = 250_000
GAP = 1e-3
SAME = 1e-3  # relative: what began a large problem counts as not bettered
LEAST_S, AGAIN = 2.0, 4  # for a solve that was quick and found nothing: seconds, or so many times what it took
LARGE_GAP = 5e-3  # of a large problem with all that may be recomputed and offloaded


@dataclass(frozen=True)
class Begins:
    """With what a search under a limit begins: `layouts`, the plans that it combines where the problem is large; and
    `fitting`, plans that it falls back on where it finds nothing else in time.
    """

    layouts: Begin
    fitting: Begin


@dataclass(frozen=True)
class Solved:
    """The solution of a problem: with what may be recomputed and offloaded, and repeated layers `tied` or not.

    `prices`: of memory, with which a problem like this one begins well. `tell`: makes the plan, when it is asked for.
    """

    assembled: Assembled
    solution: Solution
    pricer: Pricer
    gap: float
    memory_options: MemoryOptions
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
    gathered = _bucket_bytes(question, wanted.in_buckets_for)
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
    graph, memory_options = question.graph, wanted.memory_options
    asked = posed(question, gathered, policy, wanted)
    assembled, wide, pricer, tied = asked.assembled, asked.wide, asked.pricer, asked.tied
    problem = assembled.problem
    assembled_s = time.perf_counter() - started
    progress(
        f"assembled {len(problem.costs):,} items and {len(problem.edges):,} edges in {assembled_s:.1f} s"
        + (", repeated layers tied" if tied else "")
    )
    is_small = sum(edge.cost.size for edge in problem.edges) <= EXACT_BELOW_PAIRS
    gap = 0.0 if is_small and not memory_options.ways else GAP
    prices: Prices = {}
    if begins is None:
        solution = solve(
            problem, time_limit_s=wanted.time_limit_s, gap=gap, quick=wanted.quick, stop=wanted.stop,
            generations=GENERATIONS if wanted.simulated else None, reductions=worthwhile(problem),
        )  # fmt: skip
        left_s = min(wanted.time_limit_s - solution.seconds, max(LEAST_S, AGAIN * solution.seconds))
        if wanted.quick and solution.status == "unknown" and left_s > 0 and not wanted.stop():
            solution = solve(problem, time_limit_s=left_s, gap=LARGE_GAP, stop=wanted.stop)
    elif is_small:
        start = cheapest(question.found, assembled)
        solution = solve(problem, time_limit_s=wanted.time_limit_s, gap=gap, start=start, stop=wanted.stop)
    else:
        gap = LARGE_GAP
        solution, prices = _begun(question, asked, wanted, begins, progress)
    if begins is not None and solution.status == "unknown" and (picks := cheapest(begins.fitting(), assembled)):
        cost = evaluate(problem, picks).cost
        solution = replace(solution, status="feasible", picks=picks, cost=cost, bound=min(solution.bound, cost))
    progress(f"solved in {solution.seconds:.1f} s: {solution.status}, gap {solution.gap:.2%}")
    closed = [way for way in ways_on(pricer, None) if way not in memory_options.ways]
    found = picks_or_raise(solution, wide.graph, wanted.memory, wanted.time_limit_s, closed, policy)
    picks = tidied(assembled, found)
    if picks != found:
        solution = replace(solution, picks=picks, cost=evaluate(problem, picks).cost)

    def tell() -> Plan:
        plan = decide(
            wide.base, assembled, picks, pricer,
            objective=solution.cost, bound=solution.bound, memory=wanted.memory, outputs=wanted.outputs,
            notes=_notes(question, policy, tied), search=_facts(graph, problem, solution, policy, tied),
        )  # fmt: skip
        if question.measured:
            plan = _with_measured_noted(plan, question)
        progress(f"refereed: {plan.step_seconds * 1e3:.3f} ms a step")
        return plan

    return Solved(assembled, solution, pricer, gap, memory_options, tied, prices or solution.prices, tell)


def _begun(
    question: Question, asked: Posed, wanted: Wanted, begins: Begins, progress: Progress
) -> tuple[Solution, Prices]:
    """The solution of a large problem, and the prices of memory among the layouts with which it began."""
    limit_s, stop, assembled, wide = wanted.time_limit_s, wanted.stop, asked.assembled, asked.wide
    plans = [*begins.layouts(), *question.found]
    start = best_among(plans, assembled, wide.again, limit_s, stop=stop)
    if start is None:
        plans += begins.fitting()
        start = best_among(plans, assembled, wide.again, limit_s, stop=stop)
    told = "does not fit" if start is None else f"takes {start.cost * 1e3:.3f} ms"
    progress(f"the best among the layouts of {len(plans)} plans {told}")
    if start is None:
        problem = assembled.problem
        return solve(problem, time_limit_s=limit_s, gap=LARGE_GAP, stop=stop, reductions=worthwhile(problem)), {}
    # it is seldom bettered: what follows proves how good it is, which holds with less memory, too
    but_for_memory = asked.pricer.bucket_bytes, asked.tied, replace(wanted, memory=None).key
    for before in question.proven:
        if before.of == but_for_memory and wanted.memory is not None and wanted.memory <= before.memory:
            bound = min(before.bound, start.cost)
            return replace(start, status="feasible", bound=bound, prices=before.prices), start.prices
    left_s = max(1.0, limit_s - start.seconds)
    solution = solve(
        assembled.problem, time_limit_s=left_s, gap=LARGE_GAP, start=start.picks, start_prices=start.prices,
        quick=True, stop=stop, reductions=worthwhile(assembled.problem),
    )  # fmt: skip
    if wanted.memory is not None and solution.cost > start.cost * (1 - SAME):
        question.proven.append(Proven(but_for_memory, wanted.memory, solution.bound, solution.prices))
    return solution, start.prices


def _notes(question: Question, policy: str | None, tied: bool) -> list[str]:
    notes = rule_notes(question)
    if tied:
        notes.append("repeated layers share one choice; the gap is to the best plan that ties them")
    if policy is not None:
        policy = called(policy, question.graph)
        notes.append(f"only {policy} plans were searched; the gap is to the best of them")
    if question.pricer.hardware.is_measured:
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


def floor_s(question: Question, policy: str | None) -> float:
    """Seconds of compute that no plan of the policy (None: no plan at all) can do without; found out once.

    Each node runs once at least, in one of its ways; what is recomputed or offloaded only adds to that. So no
    simulation of a plan, in which computing has one stream, takes less.
    """
    policy = None if policy is None else MEMORY_SAVING.get(policy, policy)  # what is gathered once computes nothing
    return question.once(FLOORS, policy, lambda: _floor_s(question, policy))


def _floor_s(question: Question, policy: str | None) -> float:
    strategies = question.strategies if policy is None else restricted(question, policy)
    least: dict[int, float] = {}
    for options in strategies.values():
        if id(options) not in least:
            least[id(options)] = min(sum(_computing(option.steps, question.pricer)) for option in options)
    return sum(least[id(options)] for options in strategies.values())


def _computing(steps: Iterable[Step], pricer: Pricer) -> Iterator[float]:
    """Seconds of what steps compute, that in loops each time it runs."""
    for step in steps:
        match step:
            case Compute():
                yield pricer.seconds((step,))
            case Loop():
                yield step.rounds * sum(_computing(step.body, pricer))
            case Comm() | Move():
                pass


def _with_measured_noted(plan: Plan, question: Question) -> Plan:
    steps = [step for choice in plan.choices.values() for step in choice.steps if isinstance(step, Compute)]
    timed = [step.seconds for step in steps if step.seconds is not None]
    share = sum(timed) / plan.seconds_by["compute"] if plan.seconds_by["compute"] else 0.0
    note = f"{len(timed)} of {len(steps)} operators are priced from measurements, {share:.0%} of the compute time"
    facts = {**plan.search, "measured": len(timed), "measured_digest": question.measured_digest[:16]}
    return replace(plan, notes=(note, *plan.notes), search=facts)


def _bucket_bytes(question: Question, memory: float | None) -> int:
    gradients = sum(question.graph.stored_type(node).nbytes for node in question.graph.trained)
    return bucket_bytes(question.pricer, gradients, memory)
