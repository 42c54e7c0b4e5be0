"""The page: one file without scripts that needs nothing else. The same plan gives the same bytes.

autopar.page.write_html(plan, "plan.html")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.page.blocks import blocks_of
from autopar.page.curve import curve_figure
from autopar.page.markup import Markup, joined, table, tag
from autopar.page.modules import Module, modules_of
from autopar.page.scales import percentage
from autopar.page.step import figure, holders_table, peak_table, streams_table
from autopar.page.style import STYLE
from autopar.page.tenants import stack_of
from autopar.plan.axes import words
from autopar.plan.explain import candidates, head, price, proven, saving, why
from autopar.plan.glance import Figure, figures
from autopar.plan.plan import Plan
from autopar.plan.reading import ms, sentences
from autopar.plan.tell import Traffic, human
from autopar.plan.value import PlanValue
from autopar.simulate.timeline import pricer_of, timeline_of
from cost_models.hardware import Hardware
from cost_models.simulator import Timeline
from cost_models.steps import axes_of
from cost_models.whole_file import write_whole

MEANS = (
    "Equal modules stand in one row: h.* x12 are h.0 to h.11. A layout reads dim by dim: [_, tensor] is a matrix whose "
    "columns are split over the axis tensor, _ is a dim that is whole; +data behind it means that the sum over data is "
    "still to be made. Bytes are what one rank receives, for each of the modules."
)


@dataclass(frozen=True)
class Beside:
    """Something that the plan is compared with: its seconds a step, the peak of its device's memory; None: unknown."""

    name: str
    seconds: float | None
    peak_bytes: float | None
    note: str = ""
    chosen: bool = False


def to_html(
    plan: Plan,
    hardware: Hardware | None = None,
    *,
    model: str = "",
    baselines: Sequence[Beside] = (),
    meshes: Sequence[Beside] = (),
    curve: Sequence[tuple[float, float]] = (),
) -> str:
    """The page. `hardware`: the profile that priced the plan, where it is none of autopar's; `model`: its name.

    `baselines`, `meshes`: what else was searched. `curve`: (bytes of memory, seconds a step), memory rising. Raises
    PlanMismatch where the profile is not the plan's.
    """
    timeline = timeline_of(plan, pricer_of(plan, hardware), plan.prefetch)
    name = model or "plan"
    body = tag(
        "main", *_head(plan, name), *_why(plan), *_step(plan, timeline), *_modules(plan),
        *_compared(plan, baselines, meshes, curve), *_notes(plan),
    )  # fmt: skip
    page = tag(
        "html",
        tag(
            "head", tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{name}: {ms(plan.predicted_seconds)} a step, {plan.measure}"), tag("style", STYLE),
        ),
        tag("body", body), lang="en",
    )  # fmt: skip
    return f"<!doctype html>\n{page}\n"


def write_html(
    plan: Plan,
    path: str | Path,
    hardware: Hardware | None = None,
    *,
    model: str = "",
    baselines: Sequence[Beside] = (),
    meshes: Sequence[Beside] = (),
    curve: Sequence[tuple[float, float]] = (),
) -> None:
    """Write `to_html`, whole or not at all."""
    write_whole(path, to_html(plan, hardware, model=model, baselines=baselines, meshes=meshes, curve=curve))


# --- parts of it -----------------------------------------------------------------------------------------------------


def _head(plan: Plan, name: str) -> Iterator[Markup]:
    yield tag("h1", name)
    for line in sentences(head(plan)):
        yield tag("p", line, class_="dim")
    yield tag("dl", *map(_card, figures(plan)), class_="cards")


def _card(one: Figure) -> Markup:
    bar = Markup("")
    if one.share is not None:
        bar = _bar(min(1.0, one.share), f"{100 * one.share:.0f} % of the limit", "a" if one.share <= 1 else "x")
    note = tag("dd", bar, one.note, class_="note")
    return tag("div", tag("dt", one.name), tag("dd", one.value, class_="value"), note)


def _bar(share: float, told: str, colour: str) -> Markup:
    track = tag("rect", width="100%", height=6, rx=3, class_="track")
    filled = tag("rect", width=percentage(share, 1.0), height=6, rx=3, class_=colour)
    return tag("svg", tag("title", told), track, filled, width="100%", height=6, role="img")


def _why(plan: Plan) -> Iterator[Markup]:
    yield tag("h2", "Why this plan")
    told = [why(plan).removeprefix("why this plan: ")] if plan.candidates else []
    told += [*sentences(words(plan)), *sentences(proven(plan)), *sentences(saving(plan))]
    told += [line for tier in sorted(plan.peak_bytes) for line in price(plan, tier)]
    yield tag("ul", *(tag("li", line) for line in told))


def _step(plan: Plan, timeline: Timeline) -> Iterator[Markup]:
    yield tag("h2", "The step over time")
    tiers = sorted(timeline.memory, key=lambda tier: (tier != "hbm", tier))
    stacks = [stack_of(timeline, tier) for tier in tiers]
    yield figure(timeline, blocks_of(timeline, plan), stacks, plan.memory_limit)
    received: dict[str, list[str]] = {}
    for (collective, axis), nbytes in plan.comm_bytes.items():
        over = f" over {axis}" if len(axes_of(axis)) > 1 else ""
        received.setdefault(axes_of(axis)[0], []).append(f"{collective} {human(nbytes)}{over}")
    yield streams_table(timeline, {axis: ", ".join(told) for axis, told in received.items()})
    for stack in stacks:
        yield tag("div", peak_table(stack), holders_table(stack), class_="columns")


def _modules(plan: PlanValue) -> Iterator[Markup]:
    yield tag("h2", "Modules")
    yield tag("p", MEANS, class_="dim")
    labels = "module", "parameters", "forward", "sent in forward", "sent in backward"
    rows = [_module(one, labels) for one in modules_of(plan)]
    first = tag("tr", *(tag("th", label, scope="col", role="columnheader") for label in labels), role="row")
    body = tag("tbody", *rows, role="rowgroup")
    yield tag("div", tag("table", tag("thead", first, role="rowgroup"), body, role="table"), class_="modules")


def _module(one: Module, labels: tuple[str, ...]) -> Markup:
    before, _, last = one.pattern.rpartition(".")
    if last[:1] in ("*", "[") or last.isdigit():
        before, _, outer = before.rpartition(".")
        last = f"{outer}.{last}" if outer else last
    times = tag("span", f" x{len(one.names)}", class_="times") if len(one.names) > 1 else ""
    dimmed = tag("span", f"{before}.", class_="dim") if before else ""
    name = tag("code", dimmed, last) if one.pattern else tag("span", "the model itself", class_="dim")
    weights = [
        tag("div", f"{weight} ", tag("code", layout), " ", tag("span", type, class_="dim"),
            tag("span", f" {lives}", class_="lives") if lives else "")
        for weight, type, layout, lives in one.weights
    ]  # fmt: skip
    forward = [tag("div", ", ".join(one.does))] if one.does else []
    forward += [tag("div", "; ".join(one.splits))] if one.splits else []
    if one.makes is not None:
        type, layout = one.makes
        forward.append(tag("div", "makes ", tag("code", layout), " ", tag("span", type, class_="dim")))
    forward += [tag("div", ", ".join(one.kept), class_="lives")] if one.kept else []
    sent = one.sends
    in_forward = [*_sent("in front, weights", sent.get("weights", {}))]
    in_forward += [*_sent("in front, activations", sent.get("activations", {})), *_sent("behind", sent.get("own", {}))]
    in_backward = [*_sent("in front", sent.get("backward", {})), *_sent("gradients", sent.get("gradients", {}))]
    cells = (joined(*weights), joined(*forward), joined(*in_forward), joined(*in_backward))
    told = [tag("td", cell, role="cell", data_label=label) for cell, label in zip(cells, labels[1:], strict=True)]
    return tag("tr", tag("th", name, times, scope="row", role="rowheader"), *told, role="row")


def _sent(label: str, traffic: Traffic) -> Iterator[Markup]:
    if traffic:
        yield tag("div", label, class_="dim")
        for (collective, axis), nbytes in traffic.items():
            yield tag("div", tag("span", f"{collective} {human(nbytes)} over {axis}", class_="sent"))


# --- what it is compared with ----------------------------------------------------------------------------------------


def _compared(
    plan: PlanValue, baselines: Sequence[Beside], meshes: Sequence[Beside], curve: Sequence[tuple[float, float]]
) -> Iterator[Markup]:
    simulated = [*_candidates(plan)]
    if not (simulated or baselines or meshes or curve):
        return
    yield tag("h2", "Compared")
    for caption, rows in (("Candidates", simulated), ("Baselines", baselines), ("Meshes", meshes)):
        if rows:
            measure = "simulated" if rows is simulated else plan.measure
            yield _beside(f"{caption}, {measure}", rows)
    if curve:
        yield curve_figure(curve, plan.measure)


def _candidates(plan: PlanValue) -> Iterator[Beside]:
    for one, (name, _, alone, _, told) in zip(plan.candidates, candidates(plan), strict=True):
        note = "; ".join(filter(None, (f"without overlap {alone}" if alone else "", told)))
        yield Beside(name, one.simulated_seconds, one.peak_bytes, note, one.name == plan.search.get("candidate"))


def _beside(caption: str, rows: Sequence[Beside]) -> Markup:
    slowest = max((row.seconds for row in rows if row.seconds is not None), default=0.0)
    told: list[Markup] = []
    for row in rows:
        seconds = "" if row.seconds is None else ms(row.seconds)
        bar = Markup("")
        if row.seconds is not None:
            bar = _bar(row.seconds / slowest if slowest else 0.0, seconds, "a" if row.chosen else "b")
        peak = "" if row.peak_bytes is None else human(row.peak_bytes)
        cells = (
            tag("th", row.name, scope="row"), tag("td", seconds, class_="n"), tag("td", bar, class_="bar"),
            tag("td", peak, class_="n"), tag("td", row.note),
        )  # fmt: skip
        told.append(tag("tr", *cells, class_="chosen" if row.chosen else ""))
    return table(
        ("plan", "a step", "beside the slowest", "peak per rank", "note"), told, numbers=(1, 3), caption=caption
    )


def _notes(plan: PlanValue) -> Iterator[Markup]:
    if plan.notes:
        yield tag("h2", "Notes")
        yield tag("ul", *(tag("li", note) for note in plan.notes))
    told = f"Simulated for {plan.hardware} by autopar; nothing of this page was measured."
    yield tag("footer", told)
