"""The rounds of a search: the fastest plan without a limit, what people do by hand, the best plan within the limit, and
plans of the same problem at other prices; see `autopar.search.overlap_loop`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from functools import partial

from autopar.assemble.problem import DEVICE
from autopar.decide.decide import decide
from autopar.decide.picks import tidied
from autopar.errors import Infeasible, NoAnswerInTime
from autopar.plan import Plan
from autopar.plan.value import SIMULATED_BOUND
from autopar.price.overlap_discounts import Shares
from autopar.rewrite import gathered_once
from autopar.search.context import Progress, Question, Table
from autopar.search.elixir import DoesNotFit
from autopar.search.limits import size
from autopar.search.memory_options import MemoryOptions
from autopar.search.overlap_loop import choose
from autopar.search.policies import called, is_open, memory_options_of, policies_for
from autopar.search.problems import Posed, Wanted, limits_of, posed_of
from autopar.search.restricted import GENERATIONS, LOOSE, Known, best_among, worthwhile
from autopar.search.solve import Begins, Solved, floor_s, solved_within
from solver import Solution, evaluate, solve

# What people do who use that way alone.
BY_WAY = {"recompute": "checkpoint-every-block", "host": "zero3-offload"}
OF_POLICIES = Table[Hashable, Solved | Exception]("the best plan of a policy, or why there is none")
WITHOUT_LIMIT = Table[Hashable, list[tuple[float, Solved]]](
    "best plans without a limit of memory, and their time limits"
)
FAR = 2.0  # times the fastest plan: layouts that compute for longer are not worth combining


def of_policy(question: Question, policy: str, wanted: Wanted, progress: Progress) -> Solved:
    """The best plan of a policy, or why there is none, which is found out once."""

    def find() -> Solved | Exception:
        try:
            return _of_policy(question, policy, wanted, progress)
        except (Infeasible, NoAnswerInTime) as error:
            return error

    found = question.once(OF_POLICIES, (policy, wanted.key), find)
    if isinstance(found, Exception):
        raise found
    return found


def _of_policy(question: Question, policy: str, wanted: Wanted, progress: Progress) -> Solved:
    try:
        memory_options = memory_options_of(policy, question.graph, question.pricer, wanted.memory)
        memory_options = memory_options.pinning(wanted.memory_options.pinned, wanted.memory_options.residence)
    except DoesNotFit as error:
        raise Infeasible(f"no {policy} plan fits in {size(wanted.memory or 0.0)} per rank: {error}") from error
    return solved_within(question, policy, replace(wanted, memory_options=memory_options), progress)


def gathering_once(question: Question, wanted: Wanted, progress: Progress) -> Solved:
    """The best plan in which it is open for each weight whether its readers gather it, or one gather serves them all
    and it is whole from its first reader to its last one. Nothing is recomputed or offloaded. Raises Infeasible,
    NoAnswerInTime.
    """
    options = wanted.memory_options
    options = MemoryOptions(rewrite=gathered_once).pinning(options.pinned, options.residence)
    return solved_within(question, None, replace(wanted, memory_options=options), progress)


def without_overlap(question: Question, wanted: Wanted, progress: Progress) -> Solved:
    """The best plan that keeps everything on the device if the best of all is one, which is soon found out."""
    if not wanted.is_limited:
        return _free(question, wanted, progress)
    if not wanted.memory_options.ways:
        return solved_within(question, None, wanted, progress)
    free = _free(question, wanted, progress)
    if wanted.memory is not None and not wanted.held and free.plan.peak_bytes[DEVICE] <= wanted.memory:
        limits = limits_of(free.pricer, free.memory_options, wanted.memory)
        limited = replace(free.assembled, problem=replace(free.assembled.problem, limits=limits))
        plan = replace(free.plan, memory_limit=wanted.memory)
        return replace(free, assembled=limited, tell=lambda: plan)
    progress(
        f"the fastest plan needs {size(free.plan.peak_bytes[DEVICE])}: the search decides what to recompute and offload"
    )
    begins = Begins(lambda: _layouts(question, wanted, progress), lambda: _fitting(question, wanted, progress))
    solved = solved_within(question, None, wanted, progress, begins)
    question.found.append(solved.as_known)
    fastest = {"fastest_bytes": free.plan.peak_bytes[DEVICE], "fastest_s": free.plan.step_seconds}
    plan = replace(solved.plan, search={**solved.plan.search, **fastest})
    return replace(solved, tell=lambda: plan)


def _free(question: Question, wanted: Wanted, progress: Progress) -> Solved:
    """The best plan without a limit. One that was found before will do, if it is proven or had no less time."""
    free = wanted.unlimited
    known = question.once(WITHOUT_LIMIT, replace(free, time_limit_s=0.0).key, list[tuple[float, Solved]])
    for limit_s, solved in known:
        if limit_s >= free.time_limit_s or solved.solution.status == "optimal":
            return solved
    known.append((free.time_limit_s, solved_within(question, None, free, progress)))
    return known[-1][1]


def _layouts(question: Question, wanted: Wanted, progress: Progress) -> list[Known]:
    """Plans whose layouts are worth combining: the best without a limit, and what people do by hand, alike in all
    layers, if there were memory for it, and where there is little of it.
    """
    free = _free(question, wanted, progress)
    most_s = FAR * free.plan.step_seconds
    near = [policy for policy in policies_for(question.pricer.mesh) if floor_s(question, policy) <= most_s]
    able = [policy for way, policy in BY_WAY.items() if way in wanted.memory_options.ways]
    able = [policy for policy in able if floor_s(question, policy) <= most_s]
    return [
        free.as_known,
        *_by_hand(question, near, wanted.unbound, progress),
        *_by_hand(question, able, wanted, progress),
    ]


def _fitting(question: Question, wanted: Wanted, progress: Progress) -> list[Known]:
    """What people do by hand, within the limit, of what is allowed."""
    policies = policies_for(question.pricer.mesh, saving=True)
    allowed = [policy for policy in policies if is_open(policy, wanted.memory_options.ways)]
    return _by_hand(question, allowed, wanted, progress)


def _by_hand(question: Question, policies: Iterable[str], wanted: Wanted, progress: Progress) -> list[Known]:
    found: list[Known] = []
    for policy in policies:
        if wanted.stop():
            break
        with contextlib.suppress(Infeasible, NoAnswerInTime):
            found.append(of_policy(question, policy, replace(wanted, tied=True, quick=True), progress).as_known)
    return found


def _or_why(find: Callable[[], Solved]) -> Solved | str:
    """What is found, or why there is none, for the table of candidates."""
    try:
        return find()
    except Infeasible:
        return "does not fit"
    except NoAnswerInTime:
        return "none found in its part of the time"


class _Again:
    """The problem of a search, solved again at other prices of transfers; each time it begins where it ended.

    `known`: plans whose layouts are combined where the problem is too large to be solved again and again.
    """

    def __init__(
        self, question: Question, solved: Solved, wanted: Wanted, known: list[Known], progress: Progress
    ) -> None:
        self.question, self.solved, self.known, self.progress = question, solved, known, progress
        self.wanted = replace(wanted, memory_options=solved.memory_options)
        self.start, self.prices = solved.solution.picks, solved.prices

    def __call__(self, shares: Shares, free: float) -> Plan | None:
        """`shares`: of their price that transfers cost now; `free`: bytes of the device that the plan leaves."""
        question, solved, wanted = self.question, self.solved, self.wanted
        memory = None if wanted.memory is None else wanted.memory - free
        if memory is not None and memory < 0:
            self.progress(f"not re-solved: {size(free)} left free would leave nothing")
            return None
        limits = limits_of(solved.pricer, solved.memory_options, memory)
        priced = posed_of(question, question.strategies, solved.pricer, wanted, solved.tied, shares).within(limits)
        solution = self._solution(priced)
        if solution is None or solution.picks is None:
            self.progress("re-solved: nothing fits")
            return None
        told = ", ".join(f"{kind} over {axis} {share:.0%}" for (kind, axis), share in shares.items())
        left = f", {size(free)} left free" if free else ""
        self.progress(
            f"re-solved in {solution.seconds:.1f} s, gap {solution.gap:.2%}, prices of transfers: {told}{left}"
        )
        self.start, self.prices = tidied(priced.assembled, solution.picks), solution.prices
        self.known.append(Known(solved.assembled, self.start))  # whose picks mean the same; prices are of no more use
        cost = evaluate(solved.assembled.problem, self.start).cost
        return decide(
            question.graph, solved.assembled, self.start, solved.pricer,
            objective=cost, bound=solved.plan.bound, memory=wanted.memory, outputs=wanted.outputs,
            notes=solved.plan.notes, search=solved.plan.search,
        )  # fmt: skip

    def _solution(self, priced: Posed) -> Solution | None:
        limit_s, stop = self.wanted.time_limit_s, self.wanted.stop
        if self.solved.memory_options.ways:  # too large to be solved again and again
            return best_among(self.known, priced.assembled, priced.wide.again, limit_s, self.prices, stop)
        return solve(
            priced.assembled.problem, time_limit_s=limit_s, gap=max(self.solved.gap, LOOSE), start=self.start,
            start_prices=self.prices, stop=stop,
            generations=GENERATIONS,
            reductions=worthwhile(priced.assembled.problem),
        )  # fmt: skip


def simulated(
    question: Question, solved: Solved, wanted: Wanted, progress: Progress, as_played: Callable[[Plan], None]
) -> Plan:
    """The best plan by simulated time: see `autopar.search.overlap_loop`, also for `as_played`."""
    saves_memory = bool(solved.memory_options.ways)
    known = [*(_layouts(question, wanted, progress) if saves_memory else ()), solved.as_known]
    # What people do by hand they do alike in all layers; that is found in a fraction of the time.
    by_hand = wanted if solved.gap == 0.0 else replace(wanted, tied=True, quick=True)

    def found(policy: str, beat: float) -> Plan | str:
        floor = floor_s(question, policy)
        if floor >= beat:
            return f"computes for {floor * 1e3:.3f} ms or more"
        solved = _or_why(lambda: of_policy(question, policy, by_hand, progress))
        if isinstance(solved, str):
            return solved
        known.append(solved.as_known)
        return solved.plan

    def once() -> Plan | str:
        solved = _or_why(lambda: gathering_once(question, wanted, progress))
        return solved if isinstance(solved, str) else solved.plan

    # A plan found by hand is a candidate like the others: what the user has closed, it may not do either.
    policies = [
        one
        for one in policies_for(solved.pricer.mesh, saving=saves_memory, once=True)
        if is_open(one, solved.memory_options.ways)
    ]
    baselines = {called(policy, question.graph): partial(found, policy) for policy in policies}
    again = _Again(question, solved, wanted, known, progress)
    bound_s = floor_s(question, None)

    def proven(plan: Plan) -> Plan:
        return replace(plan, search={**plan.search, SIMULATED_BOUND: bound_s})

    return proven(
        choose(
            solved.plan, solved.pricer, wanted.memory, baselines, again, once, saves_memory, progress, wanted.stop,
            lambda plan: as_played(proven(plan)),
        )
    )  # fmt: skip
