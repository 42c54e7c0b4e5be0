"""The plan beside the baselines: the same problem, each time with the strategies of one policy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.plan import Plan
from autopar.plan.tell import human
from autopar.policies import REWRITES, policies_for
from autopar.search.search import Infeasible, NoAnswerInTime, Progress, Question, answer
from autopar.search.simulated import best_prefetch

CLOSER = 1e-6  # relative: the solver's own tolerance
SMALL = 1e-3  # a gap not worth a word


@dataclass(frozen=True)
class Row:
    """A policy and its best plan; without a plan, `why` says why there is none, and `needs` how many bytes would do."""

    policy: str
    plan: Plan | None
    why: str = ""
    needs: float | None = None


def compare(
    question: Question,
    chosen: Plan,
    *,
    memory: float | None,
    outputs: str,
    time_limit_s: float,
    keep: Mapping[str, str] | None = None,
    progress: Progress = lambda text: None,
) -> tuple[Plan, tuple[Row, ...]]:
    """(best plan of all, baselines). The best is `chosen`, unless its search was cut short, or tied, and missed it, or
    it is of a policy that gathers weights once, at whose plans that search does not look (docs/design/0020).

    Where `chosen` was chosen by simulated time, so are the baselines measured; what it had to keep, so do they.
    """
    rows: list[Row] = []
    best = chosen
    mesh, spares = question.pricer.mesh, question.pricer.updates_together
    for policy in policies_for(mesh, sparing=spares, dominated=True):
        try:
            plan = answer(question, memory=memory, outputs=outputs, time_limit_s=time_limit_s, policy=policy, keep=keep)
        except Infeasible as error:
            needs = error.at_least if error.enough is None else error.enough
            rows.append(Row(policy, None, f"does not fit ({_needs(error)})", needs))
        except NoAnswerInTime:
            rows.append(Row(policy, None, f"no answer in {time_limit_s:g} s"))
        else:
            if chosen.simulated_seconds is not None:
                played = best_prefetch(plan, question.pricer, memory)
                plan = replace(played.plan, simulated_seconds=played.seconds)
            rows.append(Row(policy, plan))
            if plan.predicted_seconds < best.predicted_seconds * (1 - CLOSER):
                best = _instead(best, plan, policy)
        progress(f"baseline {policy}: {rows[-1].why or _ms(rows[-1].plan)}")
    assert all(row.plan is None or best.predicted_seconds <= row.plan.predicted_seconds * (1 + CLOSER) for row in rows)
    return best, tuple(rows)


def _instead(chosen: Plan, plan: Plan, policy: str) -> Plan:
    """A baseline's plan as the answer; what is proven is proven of the union of what the two searches looked at."""
    if policy in REWRITES:
        why = "has every reader gather a weight for itself"
    else:
        why = "ties repeated layers" if chosen.search.get("tied") else "was cut by its time limit"
    notes = [note for note in chosen.notes if not note.startswith("repeated layers")]
    notes.append(f"the best {policy} plan beats what was found without it, by a search that {why}")
    return replace(plan, bound=min(chosen.bound, plan.bound), notes=tuple(notes))


def _needs(error: Infeasible) -> str:
    if error.enough is not None:
        return f"needs {human(error.enough)}"
    return "needs more" if error.at_least is None else f"needs more than {human(error.at_least)}"


def _ms(plan: Plan | None) -> str:
    return "" if plan is None else f"{plan.predicted_seconds * 1e3:.3f} ms a step"


def moved(plan: Plan) -> int:
    """Bytes that one rank receives in a step."""
    return sum(plan.comm_bytes.values())


def table(chosen: Plan, rows: Sequence[Row]) -> str:
    """The comparison as text, one line per policy."""
    head = ("policy", "ms per step", "peak per rank", "moved per rank", "to this plan", "fits")
    body = [("this plan", *_figures(chosen, chosen))]
    body += [(row.policy, *_figures(row.plan, chosen)) if row.plan else (row.policy, *"-" * 4, row.why) for row in rows]
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head) - 1)]
    lines = [f"baselines, predicted (simulated): one training step on {chosen.mesh}, {chosen.hardware}"]
    for first, *middle, last in (head, *body):
        cells = [cell.rjust(width) for cell, width in zip(middle, widths[1:], strict=True)]
        lines.append(f"  {first.ljust(widths[0])}  {'  '.join(cells)}  {last}")
    return "\n".join(lines) + "\n"


def _figures(plan: Plan, chosen: Plan) -> tuple[str, str, str, str, str]:
    ratio = plan.predicted_seconds / chosen.predicted_seconds if chosen.predicted_seconds else 1.0
    cut = plan.gap >= SMALL and plan.simulated_seconds is None  # chosen by simulation, it has a gap for that reason
    fits = f"yes (cut by time: at most {100 * plan.gap:.1f} % slower than its best)" if cut else "yes"
    peak = "; ".join(human(nbytes) for _, nbytes in sorted(plan.peak_bytes.items()))
    return f"{plan.predicted_seconds * 1e3:.3f}", peak, human(moved(plan)), f"{ratio:.2f} x", fits
