"""The plan beside the baselines: the same problem, each time with the strategies of one policy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir.batch_norm import GLOBAL, LOCAL, statistics_of
from autopar.page import Beside
from autopar.plan import Plan
from autopar.plan.tell import human
from autopar.search.overlap_loop import best_prefetch
from autopar.search.policies import REWRITES, called, policies_for
from autopar.search.problems import Stop, never
from autopar.search.request import Request
from autopar.search.search import Infeasible, NoAnswerInTime, Progress, Question, answer
from autopar.search.sequence_policies import DoesNotApply
from cost_models.steps import DEVICE

DDP = "data-parallel"
OVER = {GLOBAL: "whole batch", LOCAL: "rank's part"}
CLOSER = 5e-4  # relative: as many digits as the table shows
SMALL = 1e-3  # a gap not worth a word


@dataclass(frozen=True)
class Row:
    """A policy and its best plan; without a plan, `why` says why there is none, and `needs` how many bytes would do.

    `batch_norm`: over what its batch norms take statistics, as `Plan.batch_norm`.
    """

    policy: str
    plan: Plan | None
    why: str = ""
    needs: float | None = None
    batch_norm: str = ""


def compare(
    question: Question,
    chosen: Plan,
    request: Request,
    *,
    as_ddp: Question | str | None = None,
    policies: Sequence[str] | None = None,
    progress: Progress = lambda text: None,
    stop: Stop = never,
) -> tuple[Row, ...]:
    """The best plan of each policy, to be compared with. A report changes no result: `chosen` stays what it is, also
    where one of these is quicker, which the table then says.

    `request`: with the memory, the outputs, the pins and the time that `chosen` had. Where that was chosen by simulated
    time, so are the baselines measured.
    `as_ddp`: the question with the batch norms of DDP where this one's are others, or why there is none. It gives
    data-parallel a row more, which computes something else. `policies`: those that are compared; None: all that the
    mesh allows, but for those that must be named. `stop`: once true, rows that are not there yet stay empty.
    """

    def row_of(asked: Question, policy: str) -> Row:
        norms = (*statistics_of(asked.graph), "")[0]
        try:
            plan = answer(asked, replace(request, policy=policy, allow=None, simulation=False), stop=stop)
        except Infeasible as error:
            needs = error.at_least if error.enough is None else error.enough
            why = str(error).partition(". ")[0] if needs is None else f"does not fit ({_needs(error)})"
            return Row(policy, None, why, needs, norms)
        except DoesNotApply as error:
            return Row(policy, None, str(error), batch_norm=norms)
        except NoAnswerInTime:
            why = "interrupted" if stop() else f"no answer in {request.time_limit_s:g} s"
            return Row(policy, None, why, batch_norm=norms)
        if chosen.simulated_seconds is not None:
            simulated = best_prefetch(plan, asked.pricer, request.memory)
            plan = replace(simulated.plan, simulated_seconds=simulated.seconds)
        return Row(policy, plan, batch_norm=norms)

    rows: list[Row] = []
    if policies is None:
        policies = policies_for(question.pricer.mesh, saving=question.pricer.updates_together, dominated=True)
    for policy in policies:
        row = row_of(question, policy)
        rows.append(row)
        progress(f"baseline {called(policy, question.graph)}: {row.why or _ms(row.plan)}")
    if as_ddp is not None:
        told = isinstance(as_ddp, str)
        row = Row(DDP, None, as_ddp, batch_norm=LOCAL) if told else row_of(as_ddp, DDP)
        rows.insert(0, row)
        progress(f"baseline {DDP}, with its batch norms: {row.why or _ms(row.plan)}")
    return tuple(rows)


def _needs(error: Infeasible) -> str:
    if error.enough is not None:
        return f"needs {human(error.enough)}"
    assert error.at_least is not None
    return f"needs more than {human(error.at_least)}"


def _ms(plan: Plan | None) -> str:
    return "" if plan is None else f"{plan.predicted_seconds * 1e3:.3f} ms a step"


def moved(plan: Plan) -> int:
    """Bytes that one rank receives in a step."""
    return sum(plan.comm_bytes.values())


def table(chosen: Plan, rows: Sequence[Row]) -> str:
    """The comparison as text, one line per policy; with batch norms it says what statistics each has."""
    head = ("policy", "ms per step", "peak per rank", "moved per rank", "to this plan", "fits")
    body = [("this plan", *_figures(chosen, chosen))]
    names = [called(row.policy, row.plan.graph) if row.plan else row.policy for row in rows]
    body += [
        (name, *(_figures(row.plan, chosen) if row.plan else (*"-" * 4, row.why)))
        for name, row in zip(names, rows, strict=True)
    ]
    lines = [f"baselines, {chosen.measure}: one training step on {chosen.mesh}, {chosen.hardware}"]
    if chosen.batch_norm:
        norms = ("batch norm", *(OVER.get(one, "") for one in (chosen.batch_norm, *(row.batch_norm for row in rows))))
        head, *body = [(*line[:-1], norm, line[-1]) for line, norm in zip((head, *body), norms, strict=True)]
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head) - 1)]
    for first, *middle, last in (head, *body):
        cells = [cell.rjust(width) for cell, width in zip(middle, widths[1:], strict=True)]
        lines.append(f"  {first.ljust(widths[0])}  {'  '.join(cells)}  {last}")
    if others := sorted({row.policy for row in rows if row.plan and row.batch_norm != chosen.batch_norm}):
        lines.append(
            f"  {', '.join(others)} trains otherwise: its batch norms have the statistics of each rank's part, as DDP; "
        )
        lines.append("  --batch-norm local searches for plans that do so, too")
    lines += [f"  {line}" for line in _quicker(chosen, rows)]
    return "\n".join(lines) + "\n"


def besides(chosen: Plan, rows: Sequence[Row]) -> list[Beside]:
    """The comparison for a page (`autopar.page`); nothing, where nothing was compared."""
    if not rows:
        return []
    found = [Beside("this plan", chosen.predicted_seconds, chosen.peak_bytes[DEVICE], "", True)]
    for row in rows:
        if row.plan is None:
            found.append(Beside(row.policy, None, None, row.why))
            continue
        *_, moved_told, ratio, fits = _figures(row.plan, chosen)
        note = f"{ratio}, moves {moved_told} per rank" + ("" if fits == "yes" else f"; {fits}")
        if row.plan.batch_norm != chosen.batch_norm:
            note += f"; its batch norms are {OVER.get(row.batch_norm, '')}'s"
        name = called(row.policy, row.plan.graph)
        found.append(Beside(name, row.plan.predicted_seconds, row.plan.peak_bytes[DEVICE], note))
    return found


def _figures(plan: Plan, chosen: Plan) -> tuple[str, str, str, str, str]:
    ratio = plan.predicted_seconds / chosen.predicted_seconds if chosen.predicted_seconds else 1.0
    cut = plan.gap >= SMALL and plan.simulated_seconds is None  # chosen by simulation, it has a gap for that reason
    fits = f"yes (cut by time: at most {100 * plan.gap:.1f} % slower than its best)" if cut else "yes"
    peak = "; ".join(human(nbytes) for _, nbytes in sorted(plan.peak_bytes.items()))
    return f"{plan.predicted_seconds * 1e3:.3f}", peak, human(moved(plan)), f"{ratio:.2f} x", fits


def _quicker(chosen: Plan, rows: Sequence[Row]) -> list[str]:
    """Of baselines that train alike and beat the plan: that they do, and why the search has not found them."""
    most = chosen.predicted_seconds * (1 - CLOSER)
    return [
        f"{row.policy} is quicker than this plan, which no report changes: {_missed(chosen, row.policy)}"
        for row in rows
        if row.plan is not None and row.plan.predicted_seconds < most
        if row.batch_norm == (chosen.batch_norm or row.batch_norm)
    ]


def _missed(chosen: Plan, policy: str) -> str:
    if policy in REWRITES and chosen.simulated_seconds is None:
        return "without simulation the search looks at no plan that gathers weights once"
    if chosen.search.get("tied"):
        return "the search ties repeated layers"
    return "--allow or --pin rules out what it does, or the search was cut short (--time-limit)"
