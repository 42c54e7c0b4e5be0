"""search: graph in, plan out. No torch here; the one place that speaks to both solver/ and cost_models/."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.assemble import DEVICE, Assembled, assemble
from autopar.classes import classes_of
from autopar.decide import decide
from autopar.graph import Graph
from autopar.layout import Layout
from autopar.liveness import liveness
from autopar.measure.calls import Profile, operations, wanted, with_measured
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.policies import agree, policies_for, restrict, sparing_of
from autopar.price import Pricer
from autopar.schedule import bucket_bytes
from autopar.search.discount import discounted
from autopar.search.simulated import Shares, choose
from autopar.search.spare import NOTHING_SPARED, Sparing, host_bytes, ways_on
from autopar.settle import tidied
from autopar.strategy import Strategy, propose
from cost_models.hardware import Hardware
from cost_models.measured import Key
from cost_models.steps import Comm, Compute
from solver import Solution, evaluate, solve

Progress = Callable[[str], None]

# Above this many pairs of options the problem is solved with repeated layers tied to one choice. Llama-8B on 8x8 has 6
# million and needs no ties; a 3-D mesh may.
TIE_ABOVE_PAIRS = 40_000_000

# Below this many pairs the best plan is wanted to the last digit; above, one that is proven to be within GAP of it.
EXACT_BELOW_PAIRS = 250_000
GAP = 1e-3
LOOSE = 3e-3  # of a problem whose prices are only a means to find candidates
ROWS = 2  # of gradients need memory: one is sent when it holds `bucket_bytes`, or more; one more waits for the host
LARGE_GAP = 5e-3  # of a large problem with all that may be spared


class Infeasible(RuntimeError):
    """No plan fits: the message names the least memory that would do, the instant of the peak and the largest tenants.

    No plan peaks below `at_least` bytes; with `enough` bytes there is one. None: not known.
    """

    def __init__(self, message: str, at_least: float | None = None, enough: float | None = None) -> None:
        super().__init__(message)
        self.at_least, self.enough = at_least, enough


class NoAnswerInTime(RuntimeError):
    """The time limit passed before any plan was found."""


@dataclass(frozen=True)
class Question:
    """What is searched, whatever the limits: a graph on a mesh and machine, with every strategy of every node.

    `measured`: seconds of the calls that were timed, which stand in the strategies' steps; `notes`: of how they came.
    `known`: answers that were given already, of policies and without a limit of memory.
    """

    graph: Graph
    pricer: Pricer
    strategies: Mapping[str, tuple[Strategy, ...]]
    without_rule: tuple[str, ...]
    measured: Mapping[Key, float] = field(default_factory=dict[Key, float])
    notes: tuple[str, ...] = ()
    known: dict[object, Any] = field(default_factory=dict[object, Any], compare=False, repr=False)

    @property
    def measured_digest(self) -> str:
        """Hash (hex) of what was measured, a key for caches; "" where nothing was."""
        told = repr(sorted(self.measured.items()))
        return hashlib.sha256(told.encode()).hexdigest() if self.measured else ""


def search(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    *,
    memory: float | None = None,
    optimizer: str = "adamw",
    outputs: str = "sharded",
    fixed: Mapping[str, Layout] | None = None,
    time_limit_s: float = 60.0,
    tied: bool | None = None,
    policy: str | None = None,
    profile: Profile | None = None,
    simulation: bool = False,
    spare: Collection[str] | None = None,
    progress: Progress = lambda text: None,
) -> Plan:
    """The fastest plan for one training step of `graph` that fits in `memory` bytes on each rank.

    `outputs`: "sharded" leaves outputs in the plan's layouts, "global" brings them whole to every rank. `fixed`:
    layouts of parameters that are settled already. `tied`: one choice for repeated layers (default: only where the
    problem is large). `policy`: only plans of this baseline (`autopar.policies`). `profile`: gives operators the times
    that were measured (`autopar.measure.operators`). `spare`: what may be done where the fastest plan does not fit,
    of "recompute", "offload", "host" and "stream" (`autopar.search.spare`; default: what makes sense on the hardware).
    `simulation`: on hardware where collectives run beside compute,
    the plan whose simulated step is the quickest of several (`autopar.search.simulated`), not the one of the least sum.
    Same arguments, same plan, unless the time limit cuts the search.
    Raises Infeasible, NoAnswerInTime.
    """
    question = ask(graph, mesh, hardware, optimizer=optimizer, profile=profile, progress=progress)
    return answer(
        question, memory=memory, outputs=outputs, fixed=fixed,
        time_limit_s=time_limit_s, tied=tied, policy=policy, simulation=simulation, spare=spare, progress=progress,
    )  # fmt: skip


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


def answer(
    question: Question,
    *,
    memory: float | None = None,
    outputs: str = "sharded",
    fixed: Mapping[str, Layout] | None = None,
    time_limit_s: float = 60.0,
    tied: bool | None = None,
    policy: str | None = None,
    simulation: bool = False,
    spare: Collection[str] | None = None,
    progress: Progress = lambda text: None,
) -> Plan:
    """`search`, of a question already asked. What it found for a policy, it knows when it is asked again."""
    sparing = Sparing(ways_on(question.pricer, spare))
    wanted = _Wanted(memory, outputs, fixed or {}, time_limit_s, tied, sparing)
    if policy is not None:
        return _of_policy(question, policy, wanted, progress)
    solved = _solved(question, None, wanted, progress)
    if not (simulation and question.pricer.hardware.overlaps and question.pricer.mesh.ranks > 1):
        return solved.plan
    return _simulated(question, solved, wanted, progress)


@dataclass(frozen=True)
class _Wanted:
    memory: float | None
    outputs: str
    fixed: Mapping[str, Layout]
    time_limit_s: float
    tied: bool | None
    sparing: Sparing = NOTHING_SPARED
    gap: float | None = None  # of a large problem


@dataclass(frozen=True)
class _Solved:
    """A plan, and the problem that it solves."""

    plan: Plan
    assembled: Assembled
    solution: Solution
    pricer: Pricer
    gap: float


def _solved(question: Question, policy: str | None, wanted: _Wanted, progress: Progress) -> _Solved:
    """The best plan that keeps everything on the device if the best of all is one, which is soon found out."""
    if policy is not None:
        sparing = sparing_of(policy, question.graph, wanted.sparing.ways)
        return _within(question, policy, replace(wanted, sparing=sparing), progress)
    unlimited = replace(wanted, memory=None, sparing=NOTHING_SPARED)
    if wanted.memory is None:
        return _within(question, None, unlimited, progress)
    if not wanted.sparing.ways:
        return _within(question, None, wanted, progress)
    if (key := repr(unlimited)) not in question.known:
        question.known[key] = _within(question, None, unlimited, progress)
    free: _Solved = question.known[key]
    if free.plan.peak_bytes[DEVICE] <= wanted.memory:
        limits = {DEVICE: wanted.memory - ROWS * free.pricer.bucket_bytes}
        limited = replace(free.assembled, problem=replace(free.assembled.problem, limits=limits))
        return replace(free, plan=replace(free.plan, memory_limit=wanted.memory), assembled=limited)
    progress(f"the fastest plan needs {size(free.plan.peak_bytes[DEVICE])}: what to spare is part of the search")
    known = [free]
    for more in (1.0, 1.5):
        keeping = replace(
            unlimited, memory=wanted.memory * more, time_limit_s=min(10.0, wanted.time_limit_s), gap=2 * LARGE_GAP
        )
        with contextlib.suppress(Infeasible, NoAnswerInTime):
            known.append(_within(question, None, keeping, progress))
    return _within(question, None, wanted, progress, known)


def _within(
    question: Question, policy: str | None, wanted: _Wanted, progress: Progress, known: Sequence[_Solved] = ()
) -> _Solved:
    gathered = _bucket_bytes(question, wanted.memory)
    try:
        return _answer(question, gathered, policy, wanted, progress, known)
    except Infeasible:
        if not gathered:
            raise
        # the row in which gradients gather needs memory, too
        return _answer(question, 0, policy, wanted, progress, known)


def _of_policy(question: Question, policy: str, wanted: _Wanted, progress: Progress) -> Plan:
    key = policy, repr(wanted)
    if key not in question.known:
        question.known[key] = _solved(question, policy, wanted, progress).plan
    return question.known[key]


def _simulated(question: Question, solved: _Solved, wanted: _Wanted, progress: Progress) -> Plan:
    """The best plan by simulated time: see `autopar.search.simulated`."""
    graph, pricer = question.graph, solved.pricer
    start, prices = solved.solution.picks, solved.solution.prices

    def again(shares: Shares) -> Plan | None:
        nonlocal start, prices
        if solved.assembled.modes:  # too large to be solved again and again
            return None
        cheaper = discounted(solved.assembled, graph, pricer, shares)
        solution = solve(
            cheaper.problem, time_limit_s=wanted.time_limit_s, gap=max(solved.gap, LOOSE), start=start,
            start_prices=prices,
        )  # fmt: skip
        told = ", ".join(f"{kind} over {axis} {share:.0%}" for (kind, axis), share in shares.items())
        progress(f"solved again in {solution.seconds:.1f} s, prices of communication: {told}")
        if solution.picks is None:
            return None
        start, prices = solution.picks, solution.prices
        cost = evaluate(solved.assembled.problem, solution.picks).cost
        return decide(
            graph, solved.assembled, solution.picks, pricer,
            objective=cost, bound=solved.plan.bound, memory=wanted.memory, outputs=wanted.outputs,
            notes=solved.plan.notes, search=solved.plan.search,
        )  # fmt: skip

    # What people do by hand they do alike in all layers; that is found in a fraction of the time.
    by_hand = wanted if solved.gap == 0.0 else replace(wanted, tied=True)

    def baseline(policy: str) -> Callable[[float], Plan | str]:
        def found(beat: float) -> Plan | str:
            floor = _floor_s(question, policy)
            if floor >= beat:
                return f"computes for {floor * 1e3:.3f} ms or more"
            try:
                return _of_policy(question, policy, by_hand, progress)
            except Infeasible:
                return "does not fit"
            except NoAnswerInTime:
                return f"no answer in {wanted.time_limit_s:g} s"

        return found

    baselines = {policy: baseline(policy) for policy in policies_for(pricer.mesh)}
    return choose(solved.plan, pricer, wanted.memory, baselines, again, progress)


def _floor_s(question: Question, policy: str) -> float:
    """Seconds of compute that no plan of the policy can do without."""
    strategies = restrict(policy, question.graph, question.strategies, question.pricer.mesh)
    least: dict[int, float] = {}
    for options in strategies.values():
        if id(options) not in least:
            computes = [[step for step in option.steps if not isinstance(step, Comm)] for option in options]
            least[id(options)] = min(map(question.pricer.seconds, computes))
    return sum(least[id(options)] for options in strategies.values())


def _answer(
    question: Question,
    gathered: int,
    policy: str | None,
    wanted: _Wanted,
    progress: Progress,
    known: Sequence[_Solved] = (),
) -> _Solved:
    memory, outputs, tied = wanted.memory, wanted.outputs, wanted.tied
    started = time.perf_counter()
    graph, strategies = question.graph, question.strategies
    pricer = replace(question.pricer, bucket_bytes=gathered)
    if policy is not None:
        strategies = restrict(policy, graph, strategies, pricer.mesh)
    pairs = _pairs(graph, strategies)
    if tied is None:
        tied = pairs > TIE_ABOVE_PAIRS
    if tied and policy is not None:
        strategies = agree(strategies, classes_of(graph, tied=True))
    sparing = wanted.sparing
    wide, residences = sparing.widen(graph), sparing.residences
    rows = gathered * (ROWS if len(residences) == 1 else ROWS + 1)
    assembled = assemble(
        wide.graph,
        strategies,
        pricer,
        memory=None if memory is None else memory - rows,
        tied=tied,
        whole_outputs=outputs == "global",
        fixed=wanted.fixed,
        again=wide.again,
        residences=residences,
        host_memory=host_bytes(pricer) if len(residences) > 1 or "offload" in sparing.ways else None,
        residence_of=sparing.residence,
    )
    problem = assembled.problem
    assembled_s = time.perf_counter() - started
    progress(
        f"assembled {len(problem.costs):,} items and {len(problem.edges):,} edges in {assembled_s:.1f} s"
        + (", repeated layers tied" if tied else "")
    )
    is_small = sum(edge.cost.size for edge in problem.edges) <= EXACT_BELOW_PAIRS
    gap = 0.0 if is_small and not wanted.sparing.ways else GAP
    if not is_small and wanted.gap is not None:
        gap = wanted.gap
    start: Solution | None = None
    if known and not is_small:
        gap = LARGE_GAP
        start = _among_layouts(known, assembled, wanted.time_limit_s / 3)
        told = "does not fit" if start is None else f"takes {start.cost * 1e3:.3f} ms"
        progress(f"the best among the layouts of {len(known)} plans {told}")
    left = wanted.time_limit_s
    if start is not None:  # it is seldom bettered: what follows proves how good it is
        left = min(left - start.seconds, left / 3)
    solution = solve(problem, time_limit_s=max(1.0, left), gap=gap, start=None if start is None else start.picks)
    progress(f"solved in {solution.seconds:.1f} s: {solution.status}, gap {solution.gap:.2%}")
    picks = tidied(assembled, _picks_or_raise(solution, wide.graph, assembled, memory, wanted.time_limit_s))
    if picks != solution.picks:
        solution = replace(solution, picks=picks, cost=evaluate(problem, picks).cost)
    notes = [*_rule_notes(graph, question.without_rule)]
    if tied:
        notes.append("repeated layers share one choice; the gap is to the best plan that ties them")
    if policy is not None:
        notes.append(f"only {policy} plans were searched; the gap is to the best of them")
    if pricer.hardware.curves:
        notes.append(f"priced with what was measured: profile {pricer.hardware.name}")
    notes += question.notes
    facts: dict[str, float | int | str] = {
        "status": solution.status,
        "tied": int(tied),
        "nodes": len(graph.nodes),
        "items": len(problem.costs),
        "options": sum(len(cost) for cost in problem.costs),
        "edges": len(problem.edges),
        "variables": sum(len(cost) for cost in problem.costs) + sum(edge.cost.size for edge in problem.edges),
        "constraints": len(problem.costs) + sum(sum(edge.cost.shape) for edge in problem.edges),
    }
    if policy is not None:
        facts["policy"] = policy
    plan = decide(
        graph, assembled, picks, pricer,
        objective=solution.cost, bound=solution.bound, memory=memory, outputs=outputs, notes=notes, search=facts,
    )  # fmt: skip
    if question.measured:
        plan = _with_measured_noted(plan, question)
    progress(f"refereed: {plan.step_seconds * 1e3:.3f} ms a step, {time.perf_counter() - started:.1f} s in all")
    return _Solved(plan, assembled, solution, pricer, gap)


def _among_layouts(known: Sequence[_Solved], assembled: Assembled, time_limit_s: float) -> Solution | None:
    """The best of what combines the layouts of known plans, whatever is spared: a small problem, and a place to start
    from. None if nothing of the kind fits.
    """
    costs = list(assembled.problem.costs)
    for name, item in known[0].assembled.item_of.items():
        layouts, at = len(known[0].assembled.problem.costs[item]), assembled.item_of[name]
        picked = np.zeros(layouts, dtype=bool)
        for solved in known:
            if solved.solution.picks is not None:
                picked[solved.solution.picks[item]] = True
        open_ = picked[np.arange(len(costs[at])) % layouts]  # where a parameter resides is open
        costs[at] = np.where(open_, costs[at], np.inf)
    solution = solve(replace(assembled.problem, costs=tuple(costs)), time_limit_s=time_limit_s, gap=LOOSE)
    return None if solution.picks is None else solution


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


def _picks_or_raise(
    solution: Solution, graph: Graph, assembled: Assembled, memory: float | None, time_limit_s: float
) -> tuple[int, ...]:
    if solution.picks is not None:
        return solution.picks
    if solution.status == "infeasible":
        raise _infeasible(solution, graph, memory)
    raise NoAnswerInTime(
        f"no plan was found within {time_limit_s:g} s; give the search more time (--time-limit), or more memory"
    )


def _infeasible(solution: Solution, graph: Graph, memory: float | None) -> Infeasible:
    explanation = solution.explanation
    shortages = explanation.shortages if explanation is not None else ()
    shortage = next((s for s in shortages if s.resource == DEVICE), None)
    if shortage is None or memory is None:
        return Infeasible(
            "no combination of strategies is consistent; this is a defect of autopar, please report the model"
        )
    node = graph.by_name.get(liveness(graph).node_at[shortage.instant])
    where = "the optimizer step" if node is None else f"%{node.name} ({node.module or node.op})"
    tenants = "; ".join(f"{name} {size(nbytes)}" for name, nbytes in shortage.tenants)
    if shortage.enough is None:
        least = f"at least {size(shortage.at_least)} is needed"
    elif shortage.enough <= shortage.at_least * (1 + 1e-6):
        least = f"the least that would do is {size(shortage.enough)}"
    else:
        least = f"the least that would do lies between {size(shortage.at_least)} and {size(shortage.enough)}"
    return Infeasible(
        f"no plan fits in {size(memory)} per rank: {least}, "
        f"at the peak while {where} runs. The five largest tenants there: {tenants}. "
        "Give more memory or more ranks, or make the batch smaller.",
        shortage.at_least,
        shortage.enough,
    )


def size(nbytes: float) -> str:
    """`12.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    raise AssertionError
