"""What it takes to train a model: the best plan on several machines and numbers of devices, side by side.

The batch of a step stays what it is. So tokens per second and device fall where devices no longer have enough to do,
and that is the efficiency: against the fewest devices of the same machine on which the model fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from autopar.ir.words import count_of
from autopar.page.scales import ticks
from autopar.plan import Plan
from autopar.plan.tell import human
from autopar.plan.utilisation import utilisation
from autopar.search.curve import label

HOUR_S, DAY_S = 3600.0, 86400.0
MILLION = 1e6
BOTH = "predicted (simulated; summed where nothing overlaps)"


@dataclass(frozen=True)
class Point:
    """So many devices of a machine, and the best plan there; `why` says why there is none."""

    hardware: str
    devices: int
    plan: Plan | None
    why: str = ""

    @property
    def seconds(self) -> float:
        """Of a step, predicted; infinite without a plan."""
        return math.inf if self.plan is None else self.plan.predicted_seconds


@dataclass(frozen=True)
class Sizing:
    """The points; `unit`: what is counted, "tokens" or, where inputs do not say, "samples", `per_step` of them.

    `prices`: machine -> what an hour of one of its devices costs, in whatever currency. `wanted`: how many tokens (or
    samples) are to be trained on, within `days`.
    """

    points: tuple[Point, ...]
    unit: str
    per_step: int
    prices: Mapping[str, float] = field(default_factory=dict[str, float])
    wanted: float | None = None
    days: float | None = None

    def rate(self, point: Point) -> float:
        """Tokens per second of one device."""
        return self.per_step / point.seconds / point.devices

    def efficiency(self, point: Point) -> float:
        """The rate of one device, to that where the machine has the fewest devices that do."""
        first = min(
            (other for other in self.points if other.hardware == point.hardware and other.plan is not None),
            key=lambda other: other.devices,
        )
        return self.rate(point) / self.rate(first)

    def cost(self, point: Point) -> float | None:
        """Of a million tokens; None where no price is known."""
        price = self.prices.get(point.hardware)
        return None if price is None else price / HOUR_S / self.rate(point) * MILLION

    def training_days(self, point: Point) -> float | None:
        """Days for what is wanted."""
        return None if self.wanted is None else self.wanted / self.per_step * point.seconds / DAY_S

    @property
    def answer(self) -> Point | None:
        """What does it in time: the cheapest where all prices are known, else the fewest devices; None: nothing."""
        able = [
            p for p in self.points if p.plan is not None and (self.training_days(p) or 0.0) <= (self.days or math.inf)
        ]
        priced = all(point.hardware in self.prices for point in able)
        return min(able, key=lambda p: ((self.cost(p) or 0.0) if priced else 0.0, p.devices, p.seconds), default=None)


def counted(plan: Plan) -> tuple[str, int]:
    """What a step is counted in: ("tokens", how many), or samples, or, where inputs do not say, steps."""
    used = utilisation(plan)
    if used.tokens is not None:
        return "tokens", used.tokens
    return ("samples", used.samples) if used.samples is not None else ("steps", 1)


# --- as text and JSON ------------------------------------------------------------------------------------------------


def told(found: Sizing) -> str:
    """The table, one line a point, and the answer to what is wanted."""
    measures = {point.plan.measure for point in found.points if point.plan is not None}
    measure = measures.pop() if len(measures) == 1 else BOTH  # one rank, or a machine without overlap, is not simulated
    head = ["machine", "devices", "mesh", "ms per step", "peak per rank", f"{found.unit}/s and device", "efficiency"]
    priced = bool(found.prices)
    head += [f"cost of a million {found.unit}"] if priced else []
    head += [f"days for {found.wanted:.3g} {found.unit}"] if found.wanted is not None else []
    lines = [head]
    for point in found.points:
        if point.plan is None:
            lines.append([point.hardware, str(point.devices), point.why, *["-"] * (len(head) - 3)])
            continue
        cost, days = found.cost(point), found.training_days(point)
        peak = "; ".join(human(nbytes) for _, nbytes in sorted(point.plan.peak_bytes.items()))
        line = [
            point.hardware, str(point.devices), str(point.plan.mesh), f"{point.seconds * 1e3:.3f}", peak,
            f"{found.rate(point):,.0f}" if found.rate(point) >= 100 else f"{found.rate(point):.3g}",
            f"{100 * found.efficiency(point):.0f} %",
        ]  # fmt: skip
        line += [("-" if cost is None else f"{cost:.4g}")] if priced else []
        line += [f"{days:.3g}"] if days is not None else []
        lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    body = [
        "  " + "  ".join(
            cell.ljust(width) if column in (0, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]  # fmt: skip
    first = f"the best plan of each, {measure}; a step is {found.per_step:,} {found.unit}, the same for all"
    return "\n".join([first, *body, *_answered(found)]) + "\n"


def _answered(found: Sizing) -> Iterator[str]:
    if found.wanted is None or found.days is None:
        return
    asked = f"{found.wanted:.3g} {found.unit} in {count_of(found.days, 'day')}"
    best = found.answer
    if best is None:
        able = [point for point in found.points if point.plan is not None]
        quickest = min(able, key=lambda point: point.seconds)
        yield (
            f"{asked}: none of these does it; the quickest, {_devices(quickest)}, would need "
            f"{_days(found, quickest)}; name more devices, or let a step have a larger batch"
        )
        return
    cost = found.cost(best)
    assert best.plan is not None
    price = "" if cost is None else f" for {cost * found.wanted / MILLION:,.0f}"
    which = "cheapest" if cost is not None else "fewest devices"
    yield f"{asked}: {_devices(best)} ({best.plan.mesh}), in {_days(found, best)}{price} ({which})"


def _devices(point: Point) -> str:
    return f"{count_of(point.devices, 'device')} of {point.hardware}"


def _days(found: Sizing, point: Point) -> str:
    days = found.training_days(point)
    assert days is not None
    return count_of(float(f"{days:.3g}"), "day")


def document(found: Sizing) -> dict[str, Any]:
    """What --json prints."""
    return {
        "unit": found.unit,
        "per_step": found.per_step,
        "points": [
            {
                "hardware": point.hardware,
                "devices": point.devices,
                "why": point.why,
                **({} if point.plan is None else _figures(found, point, point.plan)),
            }
            for point in found.points
        ],
        "answer": None if found.wanted is None or (best := found.answer) is None else [best.hardware, best.devices],
    }


def _figures(found: Sizing, point: Point, plan: Plan) -> dict[str, Any]:
    return {
        "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        "predicted_seconds": point.seconds,
        "simulated": plan.simulated_seconds is not None,
        "peak_bytes": dict(plan.peak_bytes),
        "rate_per_device": found.rate(point),
        "efficiency": found.efficiency(point),
        "cost_per_million": found.cost(point),
        "days": found.training_days(point),
    }


# --- in a picture ----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 90, 150, 50, 60
COLOURS = ("#1f5fbf", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#0e7490")


def picture(found: Sizing) -> str:
    """Step time over devices as SVG, a line for each machine; dashes are what more devices would give at best."""
    able = [point for point in found.points if point.plan is not None]
    machines = list(dict.fromkeys(point.hardware for point in able))
    counts = sorted({point.devices for point in able})
    top = ticks(0.0, max(point.seconds for point in able) * 1e3)

    def across(devices: int) -> float:
        low, high = math.log2(counts[0]), math.log2(counts[-1])
        part = (math.log2(devices) - low) / (high - low) if high > low else 0.5
        return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)

    def down(ms: float) -> float:
        return round(HEIGHT - BOTTOM - ms / top[-1] * (HEIGHT - TOP - BOTTOM), 1)

    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        "<title>Step time over devices</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        label(LEFT, 28, f"Step time over devices, predicted: {found.per_step:,} {found.unit} a step", "start"),
    ]
    for ms in top:
        parts.append(f'<path d="M{LEFT} {down(ms)}H{right}" stroke="#ddd"/>')
        parts.append(label(LEFT - 8, down(ms) + 4, f"{ms:g}", "end"))
    parts += [label(across(count), floor + 20, str(count), "middle") for count in counts]
    parts.append(f'<path d="M{LEFT} {TOP}V{floor}H{right}" fill="none" stroke="#222"/>')
    parts.append(label((LEFT + right) / 2, HEIGHT - 16, "devices", "middle"))
    parts.append(label(LEFT - 8, TOP - 10, "ms per step", "end"))
    for number, machine in enumerate(machines):
        colour = COLOURS[number % len(COLOURS)]
        points = sorted((point for point in able if point.hardware == machine), key=lambda point: point.devices)
        parts += _line(points, colour, across, down)
        parts.append(f'<rect x="{right + 16}" y="{TOP + 20 * number - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(label(right + 32, TOP + 20 * number, machine, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(
    points: Sequence[Point], colour: str, across: Callable[[int], float], down: Callable[[float], float]
) -> Iterator[str]:
    first = points[0]
    ideal = [first.seconds * first.devices / point.devices for point in points]
    true = [point.seconds for point in points]
    for dashes, seconds in ((' stroke-dasharray="4 4" opacity="0.5"', ideal), ("", true)):
        places = [(across(point.devices), down(s * 1e3)) for point, s in zip(points, seconds, strict=True)]
        path = "L".join(f"{x} {y}" for x, y in places)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>'
    for point in points:
        about = f"{point.seconds * 1e3:.3f} ms on {_devices(point)}"
        yield f'<circle cx="{across(point.devices)}" cy="{down(point.seconds * 1e3)}" r="3.5" fill="{colour}">'
        yield f"<title>{escape(about)}</title></circle>"
