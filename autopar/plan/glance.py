"""A plan at a glance: its few figures in words, and the fragment of HTML by which a notebook shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from autopar.plan.explain import DEVICE, explain, head, role_of
from autopar.plan.reading import ms, percent, sentences
from autopar.plan.tell import human
from autopar.plan.utilisation import short, utilisation
from autopar.plan.value import PlanValue


@dataclass(frozen=True)
class Figure:
    """`10.835 ms`, with its name and what is to be known of it. `share`: of what it could be at most, where that is
    known.
    """

    name: str
    value: str
    note: str
    share: float | None = None


def figures(plan: PlanValue) -> Iterator[Figure]:
    """Step time, gap, memory of each tier, throughput."""
    how = ""
    if plan.simulated_seconds is not None and plan.prefetch is not None:
        how = f"; without overlap {ms(plan.step_seconds)}"
    yield Figure("step time", ms(plan.predicted_seconds), f"{plan.measure}{how}")
    yield _gap(plan)
    for tier, nbytes in sorted(plan.peak_bytes.items(), key=lambda one: (one[0] != DEVICE, one[0])):
        limit = plan.memory_limit if tier == DEVICE else None
        if limit:
            note = f"{percent(nbytes, limit)} of the limit {human(limit)}: {role_of(limit, plan, nbytes)}"
            yield Figure(f"memory peak, {tier}", human(nbytes), f"per rank, predicted; {note}", nbytes / limit)
        else:
            no_limit = "; no limit was given" if tier == DEVICE else ""
            yield Figure(f"memory peak, {tier}", human(nbytes), f"per rank, predicted{no_limit}")
    yield from _throughput(plan)


def _gap(plan: PlanValue) -> Figure:
    """To the bound on the measure by which the plan was chosen, where one is known."""
    if plan.simulated_seconds is not None and plan.prefetch is not None:
        bound, seconds = plan.simulated_bound, plan.simulated_seconds
        if bound:
            note = f"simulated: no plan takes less than {ms(bound)}, for computing alone"
            return Figure("proven gap", f"{100 * (1 - bound / seconds):.2f} %", note)
    if plan.bound > 0:
        note = f"no plan of the searched space takes less than {ms(plan.bound)}"
        if plan.prefetch is not None:
            note += f", without overlap; this one {ms(plan.step_seconds)}"
        return Figure("proven gap", f"{100 * plan.gap:.2f} %", note)
    return Figure("proven gap", "unknown", "no lower bound is known for this plan")


def _throughput(plan: PlanValue) -> Iterator[Figure]:
    used = utilisation(plan)
    rates = [
        f"{short(count / used.seconds)} {name}/s"
        for name, count in (("tokens", used.tokens), ("samples", used.samples))
        if count is not None and used.seconds
    ]
    if rates:
        yield Figure("throughput", rates[0], "; ".join([*rates[1:], f"of all ranks, {plan.measure}"]))
    if used.mfu is not None and used.peak_flops_per_s is not None:
        peak = f"of the {used.peak_flops_per_s / 1e12:.4g} TFLOP/s of {used.dtype} of each rank"
        yield Figure("model flops utilisation", f"{100 * used.mfu:.1f} %", peak)


def to_fragment(plan: PlanValue) -> str:
    """For a notebook: the figures in a table, and all of `explain` below. It needs no style of its own."""
    told = " ".join(sentences(head(plan)))
    rows = "".join(
        f'<tr><th scope="row" style="text-align:left">{escape(one.name)}</th>'
        f'<td style="text-align:left"><b>{escape(one.value)}</b></td>'
        f'<td style="text-align:left">{escape(one.note)}</td></tr>'
        for one in figures(plan)
    )
    return (
        f'<table><caption style="text-align:left">{escape(told)}</caption>{rows}</table>'
        f"<details><summary>the plan in full</summary><pre>{escape(explain(plan))}</pre></details>"
    )
