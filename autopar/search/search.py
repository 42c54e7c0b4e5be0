"""search: graph in, plan out. No torch here.

context       a question: what is searched, whatever the limits, and what is known of it
request       what is asked of it
problems      the problems: each assembled once, whatever its limits
solve         one problem of a search, from strategies to plan; the one place that speaks to solver/ and cost_models/
restricted    the best among the layouts of known plans
drive         which problems are solved, one after the other
overlap_loop  which of their plans is the quickest once transfers overlap with compute
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autopar.assemble.problem import Assembled
from autopar.errors import Infeasible, NoAnswerInTime
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.outside import Rules
from autopar.ir.work import STORE
from autopar.plan import Plan
from autopar.price.calls import Profile
from autopar.search.context import Progress, Question, ask
from autopar.search.drive import of_policy, simulated, without_overlap
from autopar.search.memory_options import MemoryOptions, ways_on
from autopar.search.pins import pinned
from autopar.search.policies import policy_named
from autopar.search.problems import Stop, Wanted, never
from autopar.search.request import DEFAULT, Request
from autopar.search.splits import settled
from cost_models.hardware import Hardware

__all__ = ["Infeasible", "NoAnswerInTime", "Progress", "Question", "Request", "answer", "ask", "search"]


def search(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    request: Request = DEFAULT,
    *,
    optimizer: str = "adamw",
    profile: Profile | None = None,
    progress: Progress = lambda text: None,
    rules: Rules | Iterable[Rules] | None = None,
) -> Plan:
    """The fastest plan for one training step of `graph` that does what is requested and fits in memory.

    `optimizer`: whose states and updates the step has. `profile`: gives operators the times that were measured
    (`autopar.calibrate.operators`). `rules`: of users' packages (`autopar.Rules`), for operators of their own. Same
    arguments, same plan, unless the time limit cuts the search.
    Raises Infeasible, NoAnswerInTime.
    """
    question = ask(graph, mesh, hardware, optimizer=optimizer, profile=profile, progress=progress, rules=rules)
    return answer(question, request, progress=progress)


def answer(
    question: Question,
    request: Request = DEFAULT,
    *,
    progress: Progress = lambda text: None,
    stop: Stop = never,
    as_posed: Callable[[Assembled], None] = lambda assembled: None,
    as_played: Callable[[Plan], None] = lambda plan: None,
) -> Plan:
    """`search`, of a question already asked. What it found for a policy, it knows when it is asked again.

    `stop`: asked now and then; once true, the answer is what a time limit at that moment would give. `as_posed` is
    given the problem whose bound the plan carries, as it was solved; `as_played` each plan that was simulated, the
    answer among them (`autopar.search.top` keeps the quickest).
    """
    if stop():
        raise NoAnswerInTime("the search was stopped before it began")
    pins = pinned(request.pin, question.graph)
    question = settled(question, pins.splits)
    ways = ways_on(question.pricer, request.allow)
    wanted = Wanted.of(request, MemoryOptions(ways).pinning(pins.modes, pins.residence), stop)
    if request.policy is not None:
        return of_policy(question, policy_named(request.policy), wanted, progress).plan
    solved = without_overlap(question, wanted, progress)
    plan = solved.plan
    as_posed(solved.assembled)
    may_overlap = question.pricer.mesh.ranks > 1 or plan.residence or any(node.op == STORE for node in plan.graph.nodes)
    if not request.simulation or not may_overlap:  # nothing can overlap: the step is its sum
        return plan
    return simulated(question, solved, wanted, progress, as_played)
