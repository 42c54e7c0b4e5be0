"""search: graph in, plan out. No torch here; the one place that speaks to both solver/ and cost_models/."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.assemble import DEVICE, Assembled, assemble
from autopar.classes import classes_of
from autopar.decide import decide
from autopar.elixir import DoesNotFit
from autopar.graph import Graph
from autopar.hidden import Shares
from autopar.layout import Layout
from autopar.measure.calls import Profile, operations, wanted, with_measured
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.policies import agree, policies_for, policy_named, restrict, sparing_of
from autopar.price import Pricer
from autopar.saving import Widened
from autopar.schedule import bucket_bytes
from autopar.search.keep import kept
from autopar.search.layouts import LOOSE, Known, best_among
from autopar.search.limits import Infeasible, NoAnswerInTime, picks_or_raise, prices_of, size
from autopar.search.simulated import choose
from autopar.search.spare import NOTHING_SPARED, Sparing, host_bytes, ways_on
from autopar.settle import tidied
from autopar.strategy import Strategy, propose
from cost_models.hardware import Hardware
from cost_models.measured import Key
from cost_models.steps import Comm, Compute
from solver import Solution, evaluate, solve

Progress = Callable[[str], None]
Begin = Callable[[], list[Known]]  # the plans among whose layouts a large search begins

# Above this many pairs of options the problem is solved with repeated layers tied to one choice. Llama-8B on 8x8 has 6
# million and needs no ties; a 3-D mesh may.
TIE_ABOVE_PAIRS = 40_000_000

# Below this many pairs the best plan is wanted to the last digit; above, one that is proven to be within GAP of it.
EXACT_BELOW_PAIRS = 250_000
GAP = 1e-3
ROWS = 2  # of gradients need memory: one is sent when it holds `bucket_bytes`, or more; one more waits for the host
LARGE_GAP = 5e-3  # of a large problem with all that may be spared

# What people do who use that way alone.
BY_WAY = {"recompute": "checkpoint-every-block", "host": "zero3-offload"}


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
    keep: Mapping[str, str] | None = None,
    progress: Progress = lambda text: None,
) -> Plan:
    """The fastest plan for one training step of `graph` that fits in `memory` bytes on each rank.

    `outputs`: "sharded" leaves outputs in the plan's layouts, "global" brings them whole to every rank. `fixed`:
    layouts of parameters that are settled already. `tied`: one choice for repeated layers (default: only where the
    problem is large). `policy`: only plans of this baseline (`autopar.policies`). `profile`: gives operators the times
    that were measured (`autopar.measure.operators`). `spare`: what may be done where the fastest plan does not fit,
    of "recompute", "offload", "host" and "stream" (`autopar.search.spare`; default: what makes sense on the hardware).
    `keep`: module or parameter -> what is settled of it (`autopar.search.keep`), for policies, too.
    `simulation`: on hardware where collectives run beside compute,
    the plan whose simulated step is the quickest of several (`autopar.search.simulated`), not the one of the least sum.
    Same arguments, same plan, unless the time limit cuts the search.
    Raises Infeasible, NoAnswerInTime.
    """
    question = ask(graph, mesh, hardware, optimizer=optimizer, profile=profile, progress=progress)
    return answer(
        question, memory=memory, outputs=outputs, fixed=fixed,
        time_limit_s=time_limit_s, tied=tied, policy=policy, simulation=simulation, spare=spare, keep=keep,
        progress=progress,
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
    keep: Mapping[str, str] | None = None,
    progress: Progress = lambda text: None,
) -> Plan:
    """`search`, of a question already asked. What it found for a policy, it knows when it is asked again."""
    settled = kept(keep or {}, question.graph)
    sparing = Sparing(ways_on(question.pricer, spare)).keeping(settled.modes, settled.residence)
    wanted = _Wanted(memory, outputs, fixed or {}, time_limit_s, tied, sparing)
    if policy is not None:
        return _of_policy(question, policy_named(policy), wanted, progress).plan
    solved = _solved(question, None, wanted, progress)
    if not simulation or question.pricer.mesh.ranks == 1:
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

    @property
    def unlimited(self) -> _Wanted:
        """The same, where memory is no matter."""
        return replace(self, memory=None, sparing=replace(self.sparing, ways=()))


@dataclass(frozen=True)
class _Solved:
    """A plan, and the problem that it solves: with what may be spared, and repeated layers `tied` or not."""

    plan: Plan
    assembled: Assembled
    solution: Solution
    pricer: Pricer
    gap: float
    sparing: Sparing
    tied: bool

    @property
    def as_known(self) -> Known:
        assert self.solution.picks is not None
        return Known(self.assembled, self.solution.picks)


def _solved(question: Question, policy: str | None, wanted: _Wanted, progress: Progress) -> _Solved:
    """The best plan that keeps everything on the device if the best of all is one, which is soon found out."""
    if policy is not None:
        try:
            sparing = sparing_of(policy, question.graph, question.pricer, wanted.memory)
            sparing = sparing.keeping(wanted.sparing.kept, wanted.sparing.residence)
        except DoesNotFit as error:
            raise Infeasible(f"no {policy} plan fits in {size(wanted.memory or 0.0)} per rank: {error}") from error
        return _within(question, policy, replace(wanted, sparing=sparing), progress)
    if wanted.memory is None:
        return _within(question, None, wanted.unlimited, progress)
    if not wanted.sparing.ways:
        return _within(question, None, wanted, progress)
    free = _free(question, wanted, progress)
    if free.plan.peak_bytes[DEVICE] <= wanted.memory:
        limits = {DEVICE: wanted.memory - ROWS * free.pricer.bucket_bytes}
        limited = replace(free.assembled, problem=replace(free.assembled.problem, limits=limits))
        return replace(free, plan=replace(free.plan, memory_limit=wanted.memory), assembled=limited)
    progress(f"the fastest plan needs {size(free.plan.peak_bytes[DEVICE])}: what to spare is part of the search")
    solved = _within(question, None, wanted, progress, lambda: _known(question, wanted, progress))
    fastest = {"fastest_bytes": free.plan.peak_bytes[DEVICE], "fastest_s": free.plan.step_seconds}
    return replace(solved, plan=replace(solved.plan, search={**solved.plan.search, **fastest}))


def _is_small(assembled: Assembled) -> bool:
    return sum(edge.cost.size for edge in assembled.problem.edges) <= EXACT_BELOW_PAIRS


def _free(question: Question, wanted: _Wanted, progress: Progress) -> _Solved:
    """The best plan without a limit."""
    if (key := repr(wanted.unlimited)) not in question.known:
        question.known[key] = _within(question, None, wanted.unlimited, progress)
    return question.known[key]


def _known(question: Question, wanted: _Wanted, progress: Progress) -> list[Known]:
    """Plans whose layouts are worth combining: the best without a limit, and what people do by hand, alike in all
    layers, if there were memory for it, and where there is little of it.
    """
    found = [_free(question, wanted, progress)]
    able = [policy for way, policy in BY_WAY.items() if way in wanted.sparing.ways]
    for policy in (*policies_for(question.pricer.mesh), *able):
        asked = wanted if policy in able else wanted.unlimited
        with contextlib.suppress(Infeasible, NoAnswerInTime):
            found.append(_of_policy(question, policy, replace(asked, tied=True), progress))
    return [one.as_known for one in found]


def _within(
    question: Question, policy: str | None, wanted: _Wanted, progress: Progress, known: Begin | None = None
) -> _Solved:
    gathered = _bucket_bytes(question, wanted.memory)
    try:
        return _answer(question, gathered, policy, wanted, progress, known)
    except Infeasible:
        if not gathered:
            raise
        # the row in which gradients gather needs memory, too
        return _answer(question, 0, policy, wanted, progress, known)


def _of_policy(question: Question, policy: str, wanted: _Wanted, progress: Progress) -> _Solved:
    key = policy, repr(wanted)
    if key not in question.known:
        question.known[key] = _solved(question, policy, wanted, progress)
    return question.known[key]


def _simulated(question: Question, solved: _Solved, wanted: _Wanted, progress: Progress) -> Plan:
    """The best plan by simulated time: see `autopar.search.simulated`."""
    graph, pricer = question.graph, solved.pricer
    start, prices = solved.solution.picks, solved.solution.prices
    spares = bool(solved.sparing.ways)
    known = [*(_known(question, wanted, progress) if spares else ()), solved.as_known]

    def again(shares: Shares, free: float) -> Plan | None:
        nonlocal start, prices
        memory = None if wanted.memory is None else wanted.memory - free
        less = replace(wanted, memory=memory, sparing=solved.sparing)
        cheaper, wide = _assembled(question, question.strategies, pricer, less, solved.tied, shares)
        if spares:  # too large to be solved again and again
            solution = best_among(known, cheaper, wide.again, wanted.time_limit_s / 3)
        else:
            solution = solve(
                cheaper.problem, time_limit_s=wanted.time_limit_s, gap=max(solved.gap, LOOSE), start=start,
                start_prices=prices,
            )  # fmt: skip
        if solution is None or solution.picks is None:
            progress("solved again: nothing fits")
            return None
        told = ", ".join(f"{kind} over {axis} {share:.0%}" for (kind, axis), share in shares.items())
        left = f", {size(free)} left free" if free else ""
        progress(f"solved again in {solution.seconds:.1f} s, prices of transfers: {told}{left}")
        start, prices = tidied(cheaper, solution.picks), solution.prices
        known.append(Known(cheaper, start))
        cost = evaluate(solved.assembled.problem, start).cost
        return decide(
            graph, solved.assembled, start, pricer,
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
                solved = _of_policy(question, policy, by_hand, progress)
                known.append(solved.as_known)
                return solved.plan
            except Infeasible:
                return "does not fit"
            except NoAnswerInTime:
                return f"no answer in {wanted.time_limit_s:g} s"

        return found

    baselines = {policy: baseline(policy) for policy in policies_for(pricer.mesh, sparing=spares)}
    return choose(solved.plan, pricer, wanted.memory, baselines, again, spares, progress)


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
    known: Begin | None = None,
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
    tied = tied and not wanted.sparing.is_uneven(classes_of(graph, tied=True), graph)
    if tied and policy is not None:
        strategies = agree(strategies, classes_of(graph, tied=True))
    sparing = wanted.sparing
    assembled, wide = _assembled(question, strategies, pricer, wanted, tied)
    problem = assembled.problem
    assembled_s = time.perf_counter() - started
    progress(
        f"assembled {len(problem.costs):,} items and {len(problem.edges):,} edges in {assembled_s:.1f} s"
        + (", repeated layers tied" if tied else "")
    )
    is_small = _is_small(assembled)
    gap = 0.0 if is_small and not wanted.sparing.ways else GAP
    start: Solution | None = None
    if known is not None and not is_small:
        gap, plans = LARGE_GAP, known()
        start = best_among(plans, assembled, wide.again, wanted.time_limit_s / 3)
        told = "does not fit" if start is None else f"takes {start.cost * 1e3:.3f} ms"
        progress(f"the best among the layouts of {len(plans)} plans {told}")
    left = wanted.time_limit_s
    if start is not None:  # it is seldom bettered: what follows proves how good it is
        left = min(left - start.seconds, left / 3)
    solution = solve(problem, time_limit_s=max(1.0, left), gap=gap, start=None if start is None else start.picks)
    progress(f"solved in {solution.seconds:.1f} s: {solution.status}, gap {solution.gap:.2%}")
    closed = [way for way in ways_on(pricer, None) if way not in sparing.ways]
    picks = picks_or_raise(solution, wide.graph, memory, wanted.time_limit_s, closed, policy)
    picks = tidied(assembled, picks)
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
    facts |= prices_of(solution)
    if policy is not None:
        facts["policy"] = policy
    plan = decide(
        graph, assembled, picks, pricer,
        objective=solution.cost, bound=solution.bound, memory=memory, outputs=outputs, notes=notes, search=facts,
    )  # fmt: skip
    if question.measured:
        plan = _with_measured_noted(plan, question)
    progress(f"refereed: {plan.step_seconds * 1e3:.3f} ms a step, {time.perf_counter() - started:.1f} s in all")
    return _Solved(plan, assembled, solution, pricer, gap, sparing, tied)


def _assembled(
    question: Question, strategies: Mapping[str, tuple[Strategy, ...]], pricer: Pricer, wanted: _Wanted, tied: bool,
    shares: Shares | None = None,
) -> tuple[Assembled, Widened]:  # fmt: skip
    """The problem, and the graph of all that it decides."""
    sparing = wanted.sparing
    wide, residences = sparing.widen(question.graph), sparing.residences
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
