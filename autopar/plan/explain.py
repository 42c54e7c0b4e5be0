"""A plan in one screen of text: what it does, why, and how that is called in textbooks."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import inf

from autopar.ir import batch_norm, precision
from autopar.ir.graph import Node
from autopar.ir.layout import local_type
from autopar.ir.words import count_of
from autopar.ir.work import STORE, VIEWS
from autopar.plan.axes import words
from autopar.plan.listing import columns, parameters, products
from autopar.plan.reading import WIDTH, flops_in, ms, parameters_of, percent, wrapped
from autopar.plan.tell import human, modes_of
from autopar.plan.utilisation import utilisation
from autopar.plan.value import PlanValue
from cost_models.steps import Compute, Move, axes_of, unrolled

HEIGHT = 40  # lines of text
DEVICE, GIB = "hbm", 2**30
MAX_NOTES = 4
TIGHT = 0.95  # of the memory limit: from here on memory shaped the plan


# Facts of a search: seconds of a step that inductor compiles; what the host launches one by one without, and how long.
FUSED, DISPATCHED, DISPATCH = "fused_seconds", "dispatched", "dispatch_seconds"


def explain(plan: PlanValue) -> str:
    """About 40 lines of at most 110 columns (a few more on a mesh of many axes, or with long notes)."""
    facts = [*head(plan), *_time(plan), *_utilisation(plan), *_candidates(plan), *_memory(plan)]
    facts = _on_lines([*facts, *saving(plan), *words(plan)])
    notes = _on_lines(_notes(plan))
    left = HEIGHT - len(facts) - len(notes) - 4  # each table has a line above and one below
    of_products = _rows(products, plan, max(3, left * 2 // 5))
    of_parameters = _rows(parameters, plan, max(3, left + 2 - len(of_products)))
    return "\n".join([*facts, *of_parameters, *of_products, *notes]) + "\n"


def _rows(table: Callable[[PlanValue, int], Iterable[str]], plan: PlanValue, most: int) -> list[str]:
    """The table with so many rows, or with as many as are on so many lines, where some take two."""
    rows = most
    while len(found := _on_lines(table(plan, rows))) > most + 2 and rows > 1:
        rows -= 1
    return found


def _on_lines(told: Iterable[str]) -> list[str]:
    return [part for line in told for part in wrapped(line, "    ")]


# --- figures ---------------------------------------------------------------------------------------------------------


def head(plan: PlanValue) -> Iterator[str]:
    """The mesh and the machine, and in what the model computes."""
    yield f"mesh {plan.mesh} ({count_of(plan.mesh.ranks, 'rank')}) on {plan.hardware}, optimizer {plan.optimizer}"
    if (rounds := plan.graph.rounds).count > 1:
        yield f"{rounds.count} micro-batches, one behind the other; gradients are added up, times and bytes are of all"
    if norms := batch_norm.told(plan.graph):
        yield f"batch norm: {norms}"
    if casts := precision.told(plan.graph):
        yield f"precision: {casts}"
    if through := plan.graph.inputs_with_gradient:
        yield f"arguments with gradients: {', '.join(node.target for node in through)}"
    if plan.tf32 and (kinds := sorted(_kinds_of_float32(plan) & {*plan.tf32})):
        yield f"tf32: {' and '.join(kinds)} of float32 {'run' if len(kinds) > 1 else 'runs'} as TF32"


def _kinds_of_float32(plan: PlanValue) -> set[str]:
    """Which kinds of arithmetic the plan does in float32."""
    steps = (step for choice in plan.choices.values() for step in unrolled(choice.steps))
    return {step.kind for step in steps if isinstance(step, Compute) and step.dtype == "float32"}


def _time(plan: PlanValue) -> Iterator[str]:
    parts = sum(plan.seconds_by.values())
    overlapped = parts - plan.step_seconds
    how = (
        f"{ms(overlapped)} of the parts overlap"
        if overlapped > 1e-6 * parts
        else "the sum of its parts, nothing overlaps"
    )
    if plan.simulated_seconds is not None and plan.prefetch is not None:
        how = f"collectives are overlapped with compute; without overlap {ms(plan.step_seconds)}"
    elif plan.simulated_seconds is not None and abs(beside := plan.simulated_seconds - parts) > 1e-3 * parts:
        # A sum prices a gradient by its share of a full bucket.
        more = f"{ms(abs(beside))} {'less' if beside < 0 else 'more'}"
        how = f"nothing overlaps; the parts are {ms(parts)}, the buckets of gradients take {more}"
    yield f"step time {ms(plan.predicted_seconds)}, {plan.measure}: {how}"
    if isinstance(fused := plan.search.get(FUSED), float):
        yield f'  with backend="inductor", which fuses elementwise operators, about {ms(fused)} (predicted)'
    count, host_s = plan.search.get(DISPATCHED), plan.search.get(DISPATCH)
    if isinstance(count, int) and isinstance(host_s, float) and host_s > plan.predicted_seconds:
        each = f"{host_s * 1e3:.3g} ms at {host_s / count * 1e6:.0f} us each"
        yield (
            f"  the host launches {count:,} kernels one by one, about {each}: a step takes no less, unless there are "
            'fewer (backend="inductor"); larger batches hide it'
        )
    for name in ("compute", "optimizer", "reorder"):
        yield _time_line(plan, name, plan.seconds_by.get(name, 0.0), "")
    for axis in plan.mesh.names:
        sent = [
            f"{collective} {human(n)}" + (f" over {on}" if on != axis else "")
            for (collective, on), n in plan.comm_bytes.items()
            if axes_of(on)[0] == axis
        ]
        seconds = plan.seconds_by.get(f"comm:{axis}", 0.0)
        told = f"a rank receives {', '.join(sent) or 'nothing'}"
        if isinstance(exposed := plan.search.get(f"exposed:{axis}"), float):
            told = f"{ms(exposed)} of it exposed; {told}"
        line = _time_line(plan, f"communication, {axis}", seconds, "")
        yield from textwrap.wrap(f"{line}   {told}", WIDTH, subsequent_indent=" " * 48, drop_whitespace=True)
    for way, told in (("h2d", "host to device"), ("d2h", "device to host")):
        if way in plan.seconds_by:
            exposed = plan.search.get(f"exposed:{way}")
            tail = f"{ms(exposed)} of it exposed" if isinstance(exposed, float) else ""
            yield _time_line(plan, told, plan.seconds_by[way], tail)
    known = {"compute", "optimizer", "reorder", "h2d", "d2h", *(f"comm:{axis}" for axis in plan.mesh.names)}
    for name in sorted(plan.seconds_by.keys() - known):
        yield _time_line(plan, name, plan.seconds_by[name], "")
    yield from proven(plan)


def proven(plan: PlanValue) -> Iterator[str]:
    """A gap is of the measure that its bound is of, which is named where there are two."""
    if plan.bound <= 0:
        yield "no lower bound is known for this plan"
        return
    gap = f"gap {100 * plan.gap:.2f} %"
    if plan.prefetch is None or plan.simulated_seconds is None:
        yield f"proven: no plan of the searched space takes less than {ms(plan.bound)}; {gap}"
        return
    least, took = f"no plan of the searched space takes less than {ms(plan.bound)}", ms(plan.step_seconds)
    yield from wrapped(f"proven, without overlap: {least}; this one takes {took}: {gap}")
    if least_s := plan.simulated_bound:
        gap = f"gap {100 * (1 - least_s / plan.simulated_seconds):.2f} %"
        yield from wrapped(
            f"proven, simulated: none takes less than {ms(least_s)}, for computing alone; this one takes "
            f"{ms(plan.simulated_seconds)}: {gap}"
        )
    else:
        yield "proven, simulated: no lower bound is known"


def _utilisation(plan: PlanValue) -> Iterator[str]:
    for line in utilisation(plan).told():
        yield from wrapped(line)


def _time_line(plan: PlanValue, name: str, seconds: float, tail: str) -> str:
    line = f"  {name:<22}{ms(seconds):>14}{percent(seconds, plan.step_seconds):>7}"
    return f"{line}   {tail}".rstrip()


def _candidates(plan: PlanValue) -> Iterator[str]:
    """Why this plan: the ones that were simulated."""
    if plan.candidates:
        yield why(plan)
        yield from columns([CANDIDATE, *candidates(plan)])


CANDIDATE = "candidate", "simulated", "without overlap", "peak", ""


def why(plan: PlanValue) -> str:
    overlapped = " with collectives overlapped" if any(one.prefetch is not None for one in plan.candidates) else ""
    return f"why this plan: the quickest of those simulated{overlapped}"


def candidates(plan: PlanValue) -> Iterator[tuple[str, ...]]:
    """Of each candidate, what `CANDIDATE` names."""
    for one in plan.candidates:
        peak = "" if one.peak_bytes is None else human(one.peak_bytes)
        prefetch = f"prefetch {one.prefetch}" if one.prefetch else ""
        mark = "(this plan)" if one.name == plan.search.get("candidate") else ""
        times = ["" if s is None else ms(s) for s in (one.simulated_seconds, one.step_seconds)]
        yield one.name, times[0], times[1], peak, " ".join(filter(None, (one.why or prefetch, mark)))


def _memory(plan: PlanValue) -> Iterator[str]:
    for tier, nbytes in sorted(plan.peak_bytes.items()):
        told, limit = f"memory peak {human(nbytes)} of {tier} per rank (predicted)", plan.memory_limit
        if tier == DEVICE and limit is None:
            told += "; no limit was given"
        elif tier == DEVICE and limit is not None:
            told += f", {percent(nbytes, limit)} of the limit {human(limit)}: {role_of(limit, plan, nbytes)}"
        yield from wrapped(told)
    for tier in sorted(plan.peak_bytes):
        yield from price(plan, tier)


def role_of(limit: float, plan: PlanValue, nbytes: int) -> str:
    """What the limit of the device's memory did to the plan."""
    fastest = plan.search.get("fastest_bytes")
    if isinstance(fastest, int) and fastest > limit:
        return f"it shapes the plan; the fastest takes {human(fastest)}"
    if nbytes >= TIGHT * limit:
        return "it shapes the plan"
    if plan.residence or modes_of(plan):
        return "with memory savings"
    return "memory is not what limits it"


def price(plan: PlanValue, tier: str) -> Iterator[str]:
    """What a little more memory would save, by the solver's price of it, where that is known: one of the relaxation, so
    that whole choices may save more or less.
    """
    price = plan.search.get(f"ms_per_gib:{tier}")
    if not isinstance(price, float) or price <= 0 or (tier == DEVICE and plan.memory_limit is None):
        return
    most, amount = plan.peak_bytes[tier] / 4, GIB  # a step from here, not to another place
    saved = inf
    if tier == DEVICE and isinstance(fastest := plan.search.get("fastest_bytes"), int):
        most, fastest_s = min(most, fastest - (plan.memory_limit or 0.0)), plan.search.get("fastest_s")
        saved = (plan.step_seconds - (fastest_s if isinstance(fastest_s, float) else 0.0)) * 1e3
    while amount > max(most, 1):
        amount //= 4
    saved = min(saved, price * amount / GIB)
    if saved > 0:
        of = "" if plan.simulated_seconds is None else " of the times without overlap"
        whole = human(amount).replace(".00", "").replace(".0", "")
        yield f"price of memory: +{whole} of {tier} would save about {saved:.3g} ms a step{of}"


def saving(plan: PlanValue) -> Iterator[str]:
    """What is not kept on the device."""
    again: list[Node] = []
    offloaded = here = streamed = 0
    for node in plan.graph.nodes:
        if node.op == STORE:
            offloaded += sum(step.nbytes for step in plan.choices[node.name].steps if isinstance(step, Move))
        elif node.target and not node.is_source and node.op not in VIEWS:
            again.append(node)
    told: list[str] = []
    if again:
        part = percent(sum(flops_in(plan, n) for n in again), sum(flops_in(plan, n) for n in plan.graph.nodes))
        told.append(f"recomputed in backward: {count_of(len(again), 'operator')}, {part} of the arithmetic")
    if offloaded:
        count = sum(node.op == STORE for node in plan.graph.nodes)
        told.append(f"offloaded to the host: {count_of(count, 'value')}, {human(offloaded)}")
    for node, type in parameters_of(plan):
        nbytes = local_type(type, plan.choices[node.name].lies, plan.mesh).nbytes
        here += nbytes if plan.residence.get(node.target) == "host" else 0
        streamed += nbytes if plan.residence.get(node.target) == "stream" else 0
    counts = Counter(plan.residence.values())
    if here:
        told.append(f"on the host: {count_of(counts['host'], 'parameter')}, {human(here)}, updated there")
    if streamed:
        told.append(
            f"on the host: states of {count_of(counts['stream'], 'parameter')} ({human(streamed)}), which stream"
        )
    told += _apart(plan)
    yield from wrapped("; ".join(told))


def _apart(plan: PlanValue) -> Iterator[str]:
    """What is stored in more pieces than micro-batches read it in."""
    found = [(node, type) for node, type in parameters_of(plan) if plan.choices[node.name].stored]
    if found:
        whole = sum(local_type(type, plan.choices[node.name].gives[0], plan.mesh).nbytes for node, type in found)
        here = sum(local_type(type, plan.choices[node.name].stored, plan.mesh).nbytes for node, type in found)
        axes = dict.fromkeys(change.axis for node, _ in found for change in reversed(plan.gathers(node)))
        yield (
            f"ZeRO-1 (distributed optimizer): {count_of(len(found), 'parameter')} and their states are split over "
            f"{', '.join(axes)}, {human(here)} on each device for {human(whole)}; gathered once a step, their "
            "gradients reduced and scattered once"
        )


# --- notes -----------------------------------------------------------------------------------------------------------


def _notes(plan: PlanValue) -> Iterator[str]:
    for note in plan.notes[:MAX_NOTES]:
        yield from wrapped(f"note: {note}")
    if len(plan.notes) > MAX_NOTES:
        yield f"and {count_of(len(plan.notes) - MAX_NOTES, 'more note')}, in plan.notes"
