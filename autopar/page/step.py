"""The picture of a step: what runs on which stream, and below it, on the same axis of time, what memory holds."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.page.blocks import (
    COLLECTIVES,
    COPIES,
    HOST,
    OPTIMIZER,
    OTHERS,
    PRODUCTS,
    REORDER,
    WAITING,
    Block,
    Blocks,
)
from autopar.page.markup import Markup, joined, row, table, tag
from autopar.page.scales import percentage, ticks, unit_of
from autopar.page.tenants import TENANTS, Stack
from autopar.plan.reading import ms, percent
from autopar.plan.tell import human
from cost_models.simulator import Timeline

COLOUR_OF = {
    PRODUCTS: "a", OTHERS: "b", REORDER: "g", OPTIMIZER: "d", COLLECTIVES: "c", COPIES: "e", HOST: "d", WAITING: "x",
    **dict(zip(TENANTS, "adecbfgh", strict=True)),
}  # fmt: skip
LANE, GAP, TOP = 22, 10, 46  # pixels: of a stream, between two, and above the first
STACK, AXIS = 170, 22  # pixels: of memory, and of the ticks below
NAMES = {"h2d": "host to device", "d2h": "device to host", "host": "host"}
ZOOMS = (1, 4, 16)
NEAR = 1.6  # a limit is drawn where it is at most so many times the peak
TICKS = 7  # about so many of time
SHORT = 0.12  # of the step: a phase whose name has room only where the picture is made wider
LARGEST = 8  # holders at the peak that are named


def stream_name(stream: str) -> str:
    return NAMES.get(stream, stream.removeprefix("comm:"))


def figure(timeline: Timeline, blocks: Blocks, stacks: list[Stack], limit: float | None) -> Markup:
    """Both, in one frame that can be made wider, with the names of the streams beside it."""
    names, pictures = [_stream_names(blocks)], [_streams(timeline, blocks)]
    for stack in stacks:
        high = _high(stack, limit)
        names.append(_memory_names(stack, high))
        pictures.append(_memory(timeline, stack, limit, high))
    zooms = [
        tag("label", tag("input", type="radio", name="ap-zoom", value=str(z), checked=z == 1), f"{z}x") for z in ZOOMS
    ]
    sorts = [sort for sort in COLOUR_OF if sort not in TENANTS and _is_drawn(sort, blocks)]
    return tag(
        "figure",
        tag("div", legend(sorts), tag("fieldset", tag("legend", "width"), *zooms, class_="zoom"), class_="above"),
        tag(
            "div", tag("div", *names, class_="names", aria_hidden="true"),
            tag("div", *pictures, class_="scroll", tabindex="0", role="region", aria_label="the step over time"),
            class_="frame",
        ),
        tag("figcaption", _caption(timeline, blocks)),
        class_="step",
    )  # fmt: skip


def swatch(sort: str) -> Markup:
    return tag("i", class_=f"sw {COLOUR_OF[sort]}", aria_hidden="true")


def legend(sorts: Iterable[str]) -> Markup:
    return tag("ul", *(tag("li", swatch(sort), sort) for sort in sorts), class_="legend")


def _is_drawn(sort: str, blocks: Blocks) -> bool:
    if sort == WAITING:
        return bool(blocks.waits)
    return any(block.sort == sort for ones in blocks.streams.values() for block in ones)


def _caption(timeline: Timeline, blocks: Blocks) -> str:
    drawn = sum(block.count for ones in blocks.streams.values() for block in ones)
    told = f"One rank, simulated: {drawn:,} events in {ms(timeline.seconds)}."
    if blocks.grain:
        told += f" What is shorter than {blocks.grain * 1e6:.3g} µs is drawn together with its neighbours."
    return f"{told} Point at a block to read what it is. Red: compute stands still, and what it waits for."


# --- streams ---------------------------------------------------------------------------------------------------------


def _height(blocks: Blocks) -> int:
    return TOP + len(blocks.streams) * (LANE + GAP)


def _stream_names(blocks: Blocks) -> Markup:
    texts = [
        tag("text", stream_name(stream), x=0, y=_lane(number) + 16) for number, stream in enumerate(blocks.streams)
    ]
    return tag("svg", tag("text", "ms", x=0, y=14, class_="dim"), *texts, height=_height(blocks), width="100%")


def _lane(number: int) -> int:
    return TOP + number * (LANE + GAP)


def _streams(timeline: Timeline, blocks: Blocks) -> Markup:
    whole, parts = timeline.seconds, [_axis(timeline.seconds, _height(blocks))]
    for phase, begin, end in timeline.phases:
        place = {"x": percentage(begin, whole), "width": percentage(end - begin, whole)}
        drawn = (
            tag("title", f"{phase or 'step'}: {ms(end - begin)}"),
            tag("rect", width="100%", height=16, class_="phase"),
            tag("text", phase or "step", x=4, y=12),
        )
        parts.append(
            tag("svg", *drawn, y=22, height=16, class_="short" if end - begin < SHORT * whole else "", **place)
        )
    for number, (stream, ones) in enumerate(blocks.streams.items()):
        drawn = [tag("rect", width="100%", height=LANE, class_="lane")]
        drawn += [_rect(block, whole, 0, LANE) for block in ones]
        drawn += [_rect(block, whole, 0, LANE) for block in (blocks.waits if stream == timeline.main else ())]
        drawn += [_rect(block, whole, LANE - 5, 5) for block in blocks.exposed.get(stream, ())]
        parts.append(tag("svg", *drawn, y=_lane(number), height=LANE, width="100%", data_stream=stream))
    about = "; ".join(f"{stream_name(s)} works for {ms(busy)}" for s, busy in timeline.busy_s.items())
    head = tag("title", "The step on its streams"), tag("desc", f"In {ms(whole)}, {about}.")
    hatch = tag(
        "pattern", tag("path", d="M0 6L6 0", class_="stroke"), id="ap-hatch", width=6, height=6,
        patternUnits="userSpaceOnUse",
    )  # fmt: skip
    return tag("svg", *head, tag("defs", hatch), *parts, height=_height(blocks), width="100%", role="img")


def _rect(block: Block, whole: float, y: int, height: int) -> Markup:
    told = f"{block.told}, {_time(block.seconds)}"
    if block.count > 1:
        told = f"{block.count} events, {_time(block.seconds)}; the longest: {block.told}"
    return tag(
        "rect", tag("title", f"{told}, from {ms(block.begin)}"), class_=COLOUR_OF[block.sort],
        x=percentage(block.begin, whole), width=percentage(block.seconds, whole), y=str(y) if y else "", height=height,
    )  # fmt: skip


def _time(seconds: float) -> str:
    return ms(seconds) if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"


def _axis(seconds: float, height: int) -> Markup:
    """Ticks for each width of the picture."""
    groups: list[Markup] = []
    for zoom in ZOOMS:
        marks: list[Markup] = []
        for tick in ticks(0.0, seconds * 1e3, TICKS * zoom):
            if (place := tick / (seconds * 1e3) if seconds else 0.0) <= 1.0:
                x, anchor = percentage(place, 1.0), "start" if place < 0.02 else "end" if place > 0.98 else "middle"
                marks.append(tag("line", x1=x, x2=x, y1=20, y2=height, class_="grid"))
                marks.append(tag("text", f"{tick:g}", x=x, y=14, text_anchor=anchor))
        groups.append(tag("g", *marks, class_=f"z{zoom}"))
    return joined(*groups)


# --- memory ----------------------------------------------------------------------------------------------------------


def _high(stack: Stack, limit: float | None) -> float:
    """Bytes at the upper edge."""
    peak = sum(stack.peak.values())
    return 1.08 * (limit if stack.tier == "hbm" and limit and peak <= limit <= NEAR * peak else peak) or 1.0


def _memory_names(stack: Stack, high: float) -> Markup:
    scale, unit = unit_of(high / 1.08)
    texts = [tag("text", f"{stack.tier}, {unit}", x=0, y=12)]
    for tick in ticks(0.0, high / scale, 4):
        if (y := STACK * (1 - tick * scale / high)) > 24 or not tick:
            texts.append(tag("text", f"{tick:g}", x="92%", y=round(min(y + 4, STACK), 1), text_anchor="end"))
    return tag("svg", *texts, height=STACK + AXIS, width="100%")


def _memory(timeline: Timeline, stack: Stack, limit: float | None, high: float) -> Markup:
    whole, peak = timeline.seconds, sum(stack.peak.values())
    scale, _ = unit_of(high / 1.08)
    parts: list[Markup] = []
    for tick in ticks(0.0, high / scale, 4):
        if (y := STACK * (1 - tick * scale / high)) >= 0:
            parts.append(tag("line", x1="0", x2="100%", y1=round(y, 1), y2=round(y, 1), class_="grid"))
    areas = [
        tag(
            "path", tag("title", f"{tenant}, {human(max(stack.levels[tenant]))} at most"), d=d, class_=COLOUR_OF[tenant]
        )
        for tenant, d in _areas(stack, whole, high)
    ]
    box = f"0 0 1000 {STACK}"
    parts.append(tag("svg", *areas, viewBox=box, preserveAspectRatio="none", width="100%", height=STACK))
    if limit and stack.tier == "hbm" and limit <= high:
        y = round(STACK * (1 - limit / high), 1)
        parts.append(tag("line", x1="0", x2="100%", y1=y, y2=y, class_="limit"))
        parts.append(tag("text", f"limit {human(limit)}", x="4", y=y - 4, class_="limit"))
    x, right = percentage(stack.peak_at, whole), stack.peak_at > whole / 2
    parts.append(tag("line", x1=x, x2=x, y1=0, y2=STACK, class_="peak"))
    told = f"peak {human(peak)} at {ms(stack.peak_at)}"
    anchor = "end" if right else "start"
    parts.append(tag("text", told, x=x, dx=-6 if right else 6, y=STACK + 15, text_anchor=anchor, class_="peak"))
    about = ", ".join(f"{tenant} {human(nbytes)}" for tenant, nbytes in stack.peak.items())
    head = tag("title", f"What {stack.tier} holds over the step"), tag("desc", f"{told}, of which {about}.")
    return tag("svg", *head, *parts, height=STACK + AXIS, width="100%", role="img", data_tier=stack.tier)


def _areas(stack: Stack, whole: float, high: float) -> Iterable[tuple[str, str]]:
    """Outline of each tenant, on top of those before it; where a level stays, one line."""
    xs = [round(1000 * at / whole, 1) if whole else 0.0 for at in stack.times] + [1000.0]
    floor = [0] * len(stack.times)
    for tenant, levels in stack.levels.items():
        top = [below + level for below, level in zip(floor, levels, strict=True)]
        there = _line(xs, [STACK * (1 - level / high) for level in top])
        back = _line(xs[::-1], [STACK * (1 - level / high) for level in reversed(floor)])
        yield tenant, f"M{there}L{back}Z"
        floor = top


def _line(xs: list[float], ys: list[float]) -> str:
    """Steps: of `len(xs) - 1` levels, each from one place to the next."""
    found, before = f"{xs[0]:g} {ys[0]:.1f}", f"{ys[0]:.1f}"
    for x, y in zip(xs[1:-1], ys[1:], strict=True):
        if (now := f"{y:.1f}") != before:
            found, before = f"{found}H{x:g}V{now}", now
    return f"{found}H{xs[-1]:g}"


# --- in figures ------------------------------------------------------------------------------------------------------


def streams_table(timeline: Timeline, received: dict[str, str]) -> Markup:
    """`received`: axis -> what a rank receives over it, in words."""
    exposed, rows = timeline.exposed_s, list[Markup]()
    for stream in sorted(timeline.busy_s, key=lambda name: (name != timeline.main, name)):
        busy, axis = timeline.busy_s[stream], stream.removeprefix("comm:")
        waits = ms(exposed[stream]) if stream in exposed else ""
        told = tag("span", received[axis], class_="last") if axis != stream and axis in received else ""
        rows.append(row((stream_name(stream), ms(busy), percent(busy, timeline.seconds), waits, told), (1, 2, 3)))
    head = "stream", "busy", "of the step", "exposed", "a rank receives"
    return table(head, rows, numbers=(1, 2, 3), caption="Streams, simulated")


def peak_table(stack: Stack) -> Markup:
    """What lies there at the peak, by what it is for; it is the legend of the picture, too."""
    peak = stack.peak
    whole, rows = sum(peak.values()), list[Markup]()
    for tenant, levels in stack.levels.items():
        nbytes = peak.get(tenant, 0)
        name = joined(swatch(tenant), tenant)
        rows.append(row((name, human(nbytes), percent(nbytes, whole), human(max(levels))), (1, 2, 3)))
    rows.append(row(("together", human(whole), percent(whole, whole), ""), (1, 2, 3)))
    caption = f"{stack.tier} of a rank, simulated: peak at {ms(stack.peak_at)}, in {stack.peak_event}"
    return table(("tenant", "at the peak", "share", "at most"), rows, numbers=(1, 2, 3), caption=caption)


def holders_table(stack: Stack) -> Markup:
    rows = [row((owner, tenant, human(nbytes)), (2,)) for owner, tenant, nbytes in stack.holders[:LARGEST]]
    caption = f"The largest at the peak of {stack.tier}, of {len(stack.holders):,}"
    return table(("value", "tenant", "bytes"), rows, numbers=(2,), caption=caption)
