"""search: graph in, plan out. No torch here.

question    what is searched, whatever the limits, and what is known of it
posed       the problems: each assembled once, whatever its limits
solved      one problem of a search, from strategies to plan; the one place that speaks to solver/ and cost_models/ both
layouts     the best among the layouts of known plans
rounds      which problems are solved, one after the other
simulated   which of their plans is the quickest once transfers overlap with compute
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from autopar.assemble.problem import Assembled
from autopar.errors import Infeasible, NoAnswerInTime
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.work import STORE
from autopar.plan import Plan
from autopar.price.calls import Profile
from autopar.search.context import Progress, Question, ask
from autopar.search.drive import of_policy, simulated, without_overlap
from autopar.search.memory_options import MemoryOptions, ways_on
from autopar.search.pins import pinned
from autopar.search.policies import policy_named
from autopar.search.problems import Stop, Wanted, never
from cost_models.hardware import Hardware

__all__ = ["Infeasible", "NoAnswerInTime", "Progress", "Question", "answer", "ask", "search"]


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
    allow: Collection[str] | None = None,
    pin: Mapping[str, str] | None = None,
    progress: Progress = lambda text: None,
) -> Plan:
    """The fastest plan for one training step of `graph` that fits in `memory` bytes on each rank.

    `outputs`: "sharded" leaves outputs in the plan's layouts, "global" brings them whole to every rank. `fixed`:
    layouts of parameters that are settled already. `tied`: one choice for repeated layers (default: only where the
    problem is large). `policy`: only plans of this baseline (`autopar.search.policies`). `profile`: gives operators the
    times that were measured (`autopar.calibrate.operators`). `allow`: what may be done where the fastest plan does not
    fit, some of ALLOWED (`autopar.search.memory_options`; default: what makes sense on
    the hardware).
    `pin`: module or parameter -> what is settled of it (`autopar.search.pins`), for policies, too.
    `simulation`: the plan whose simulated step is the quickest of several (`autopar.search.overlap_loop`), not the
    optimum without overlap.
    Same arguments, same plan, unless the time limit cuts the search.
    Raises Infeasible, NoAnswerInTime.
    """
    question = ask(graph, mesh, hardware, optimizer=optimizer, profile=profile, progress=progress)
    return answer(
        question, memory=memory, outputs=outputs, fixed=fixed,
        time_limit_s=time_limit_s, tied=tied, policy=policy, simulation=simulation, allow=allow, pin=pin,
        progress=progress,
    )  # fmt: skip


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
    allow: Collection[str] | None = None,
    pin: Mapping[str, str] | None = None,
    progress: Progress = lambda text: None,
    stop: Stop = never,
    as_posed: Callable[[Assembled], None] = lambda assembled: None,
) -> Plan:
    """`search`, of a question already asked. What it found for a policy, it knows when it is asked again.

    `stop`: asked now and then; once true, the answer is what a time limit at that moment would give. `as_posed` is
    given the problem whose bound the plan carries, as it was solved.
    """
    if stop():
        raise NoAnswerInTime("the search was stopped before it began")
    settled = pinned(pin or {}, question.graph)
    memory_options = MemoryOptions(ways_on(question.pricer, allow)).pinning(settled.modes, settled.residence)
    wanted = Wanted(memory, outputs, fixed or {}, time_limit_s, tied, memory_options, stop=stop)
    if policy is not None:
        return of_policy(question, policy_named(policy), wanted, progress).plan
    solved = without_overlap(question, wanted, progress)
    plan = solved.plan
    as_posed(solved.assembled)
    may_overlap = question.pricer.mesh.ranks > 1 or plan.residence or any(node.op == STORE for node in plan.graph.nodes)
    if not simulation or not may_overlap:  # nothing can overlap: the step is its sum
        return plan
    return simulated(question, solved, wanted, progress)
