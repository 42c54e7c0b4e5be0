"""The quickest plans that a search has played, beside its answer: what comes next, and what makes it another plan.

They are those that the contest of `autopar.search.overlap_loop` simulated, so there are few of them, and keeping them
costs no time. Without simulation a search finds one plan; then the best plans of policies stand beside it.
Two plans are distinct if they split or deliver anything otherwise; another prefetch makes no other plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from autopar.assemble.problem import DEVICE
from autopar.diff import difference, in_a_line
from autopar.ir.words import count_of
from autopar.plan import Plan
from autopar.plan.listing import columns
from autopar.plan.tell import human
from autopar.price.pricer import Pricer
from autopar.search.memory_options import ways_on
from autopar.search.overlap_loop import same_choices
from autopar.search.policies import REWRITES, is_open, policies_for
from autopar.search.problems import Stop, never
from autopar.search.request import Request
from autopar.search.reserved import RESERVED, told
from autopar.search.search import Infeasible, NoAnswerInTime, Progress, Question, answer
from cost_models.reserve import Room

MOST = 64


@dataclass(frozen=True)
class Top:
    """`plans`: the answer of the search, then the others, the quickest first. `unlike`: of each, what makes it another
    plan than the first. `why`: where fewer were found than asked for, why.
    """

    plans: tuple[Plan, ...]
    unlike: tuple[str, ...]
    why: str = ""

    def table(self) -> str:
        """As text, which ends with a newline."""
        rows = [("plan", "ms per step", "peak per rank", "what is other than in the first")]
        rows += [
            (str(number), f"{plan.predicted_seconds * 1e3:.3f}", human(plan.peak_bytes[DEVICE]), unlike or "-")
            for number, (plan, unlike) in enumerate(zip(self.plans, self.unlike, strict=True), 1)
        ]
        head = f"the quickest distinct plans, {self.plans[0].measure}:"
        return "\n".join([head, *columns(rows), *([self.why] if self.why else [])]) + "\n"

    def rows(self) -> list[dict[str, Any]]:
        """As `--json` has it."""
        return [
            {"name": plan.search.get("candidate"), "predicted_seconds": plan.predicted_seconds,
             "simulated_seconds": plan.simulated_seconds, "step_seconds": plan.step_seconds,
             "prefetch": plan.prefetch, "peak_bytes": dict(plan.peak_bytes), "unlike_the_first": unlike}
            for plan, unlike in zip(self.plans, self.unlike, strict=True)
        ]  # fmt: skip


def top(
    question: Question, request: Request, k: int, *, progress: Progress = lambda text: None, stop: Stop = never
) -> Top:
    """The answer of the search, and up to `k` - 1 distinct plans beside it. Raises what `answer` does, and ValueError
    for `k` below 1.
    """
    checked(k)
    played: list[Plan] = []
    plan = answer(question, request, progress=progress, stop=stop, as_played=played.append)
    if k > 1 and not request.simulation:
        played += of_policies(question, request, progress=progress, stop=stop)
    return distinct(plan, played, k, question.pricer)


def top_within(
    question: Question, request: Request, plan: Plan, played: Sequence[Plan], k: int, room: Room, *,
    progress: Progress, stop: Stop,
) -> Top:  # fmt: skip
    """`top`, of a plan that was found for a part of the device (`autopar.search.reserved`), in which
    the others hold, too.
    """
    if not request.simulation:
        limited = replace(request, memory=room.tensors)
        played = [*played, *of_policies(question, limited, progress=progress, stop=stop)]

    def within(one: Plan) -> Plan | None:
        one = told(one, room, question.pricer)
        return one if int(one.search.get(RESERVED, 0)) <= room.limit else None

    return distinct(plan, played, k, question.pricer, within)


def of_policies(question: Question, request: Request, *, progress: Progress, stop: Stop) -> list[Plan]:
    """The best plan of each policy that does only what is allowed: what stands beside a plan without simulation. Those
    that gather weights once are no plans of that search (`autopar.search.baselines`).
    """
    ways = ways_on(question.pricer, request.allow)
    found: list[Plan] = []
    for policy in policies_for(question.pricer.mesh, saving=bool(ways)):
        if policy not in REWRITES and is_open(policy, ways) and not stop():
            with suppress(Infeasible, NoAnswerInTime):
                plan = answer(question, replace(request, policy=policy), stop=stop)
                found.append(replace(plan, search={**plan.search, "candidate": policy}))
                progress(f"{policy}: {plan.predicted_seconds * 1e3:.3f} ms a step")
    return found


def distinct(
    plan: Plan,
    played: Sequence[Plan],
    k: int,
    pricer: Pricer,
    within: Callable[[Plan], Plan | None] = lambda plan: plan,
) -> Top:
    """Of `played` the quickest that are distinct from `plan` and each other, and fit. `pricer`: of the question.
    `within`: the plan with what is reserved for it; None where that is more than there is.
    """
    checked(k)
    limit = plan.memory_limit
    kept, left_out = [plan], 0
    for one in sorted(played, key=lambda one: one.predicted_seconds):
        if len(kept) == k:
            break
        if any(same_choices(one, other) and one.residence == other.residence for other in kept):
            continue
        fits = limit is None or one.peak_bytes[DEVICE] <= limit * (1 + 1e-9)
        if fits and (held := within(one)) is not None:
            kept.append(held)
        else:
            left_out += 1
    unlike = [_unlike(plan, one, pricer) for one in kept[1:]]
    return Top(tuple(kept), ("", *unlike), _why(plan, len(kept), k, left_out))


def checked(k: int) -> int:
    """`k`. Raises ValueError where nobody can keep so many plans."""
    if not 1 <= k <= MOST:
        raise ValueError(f"{k} plans cannot be kept; ask for 1 to {MOST}: a search simulates about a dozen")
    return k


def _unlike(first: Plan, other: Plan, pricer: Pricer) -> str:
    one, two = (replace(pricer, bucket_bytes=plan.bucket_bytes) for plan in (first, other))
    return in_a_line(difference(first, other, (one, two)))


def _why(plan: Plan, found: int, k: int, left_out: int) -> str:
    if found == k:
        return ""
    reasons = [f"{row.name}: {row.why}" for row in plan.candidates if row.simulated_seconds is None]
    if left_out:
        reasons.append(f"{left_out} that do not fit in the limit")
    text = f"{count_of(found, 'distinct plan')} of {k}: the search simulated no other that fits"
    return f"{text}; not simulated, or left out: {'; '.join(reasons)}" if reasons else text
