"""Step time over memory: the best plans at several limits, from the least that does to what the fastest plan needs.

A plan that fits below a limit fits at it, so the best plan known at a limit is the quickest of all that were found and
peak no higher: step time never rises as memory grows, also where a search was cut by its time limit. What is proven at
a limit is proven below it, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from xml.sax.saxutils import escape

from autopar.assemble.builder import HOST
from autopar.assemble.problem import DEVICE
from autopar.ir.layout import local_type
from autopar.ir.work import STORE, VIEWS
from autopar.page.scales import ticks, unit_of
from autopar.plan import Plan
from autopar.plan.tell import human
from autopar.search.overlap_loop import best_prefetch
from autopar.search.problems import Stop, never
from autopar.search.request import DEFAULT, Request
from autopar.search.search import Infeasible, NoAnswerInTime, Progress, Question, answer

POINTS = 8
TRIES = 5  # searches for the least limit
NEAR = 1.05  # it is found when it is known up to this ratio

Find = Callable[[float | None], Plan]


@dataclass(frozen=True)
class Point:
    """The best plan that is known to fit in `limit` bytes of each rank's device; its bound holds at that limit."""

    limit: float
    plan: Plan


# --- the plans -------------------------------------------------------------------------------------------------------


def memory_curve(
    question: Question,
    request: Request = DEFAULT,
    known: Sequence[Plan] = (),
    *,
    points: int = POINTS,
    progress: Progress = lambda text: None,
    stop: Stop = never,
) -> tuple[Point, ...]:
    """About so many points, limits rising; the last is the fastest plan. `request`: of each of them, but for the
    memory. `known`: plans that were found before. `stop`: once true, the points are those of the plans that are known
    by then. Raises NoAnswerInTime where not even the fastest plan is found.
    """

    def find(limit: float | None) -> Plan:
        plan = answer(question, replace(request, memory=limit), stop=stop)
        if request.simulation and plan.simulated_seconds is None and question.pricer.hardware.overlaps:
            simulated = best_prefetch(plan, question.pricer, limit)  # or it would be compared by another measure
            plan = replace(simulated.plan, simulated_seconds=simulated.seconds)
        told = "everything there is" if limit is None else human(limit)
        progress(f"memory curve: with {told}, {plan.predicted_seconds * 1e3:.3f} ms a step")
        return plan

    try:
        fastest = find(None)
    except NoAnswerInTime:
        if stop():
            return ()
        raise
    top = fastest.peak_bytes[DEVICE]
    found = [fastest, *known]
    least = _least(find, top, found, progress)
    limits = _between(least, top, points)
    for limit in limits[1:-1]:
        try:
            found.append(find(limit))
        except (Infeasible, NoAnswerInTime) as error:  # the plans below stand in for it
            progress(f"memory curve: with {human(limit)}, {_why(error)}")
    asked = {plan.memory_limit for plan in known if plan.memory_limit is not None}
    return best_at(sorted({*limits, *(limit for limit in asked if least < limit < top)}), found)


def _why(error: Exception) -> str:
    return "no answer in time" if isinstance(error, NoAnswerInTime) else "nothing fits"


def _least(find: Find, top: float, found: list[Plan], progress: Progress) -> float:
    """The least limit at which a plan was found; the plans go to `found`.

    Where nothing fits, the search mostly says what would do, if not the least that would; after that the limit is
    sought between what does and what does not.
    """
    low, high, limit = 0.0, top, 1.0
    for _ in range(TRIES):
        enough: float | None = None
        try:
            found.append(find(limit))
        except (Infeasible, NoAnswerInTime) as error:
            low = max(low, limit)
            if isinstance(error, Infeasible):
                low, enough = max(low, error.at_least or 0.0), error.enough
            progress(f"memory curve: with {human(limit)}, {_why(error)}")
        else:
            high = limit
        if high <= low * NEAR:
            break
        limit = math.ceil(enough if enough is not None and low <= enough < high else math.sqrt(low * high))
    return high


def _between(least: float, top: float, points: int) -> list[float]:
    """Limits in even ratios: where memory is short, a little more of it saves the most."""
    if top <= least:
        return [top]
    ratio = (top / least) ** (1 / (points - 1))
    return [least, *(math.ceil(least * ratio**i) for i in range(1, points - 1)), top]


def best_at(limits: Sequence[float], plans: Sequence[Plan]) -> tuple[Point, ...]:
    """At each limit, the quickest of the plans that fit, with what is proven there; limits that none fits in are left
    out.
    """
    points: list[Point] = []
    for limit in limits:
        fitting = [plan for plan in plans if plan.peak_bytes[DEVICE] <= limit]
        if not fitting:
            continue
        best = min(fitting, key=lambda plan: (plan.predicted_seconds, plan.peak_bytes[DEVICE]))
        above = [plan.bound for plan in plans if plan.memory_limit is None or plan.memory_limit >= limit]
        # A search keeps some memory free for buckets of gradients; what it proves may not hold of a plan that does not.
        bound = max((bound for bound in above if bound <= best.step_seconds), default=best.bound)
        points.append(Point(limit, replace(best, memory_limit=limit, bound=bound)))
    return tuple(points)


# --- in figures ------------------------------------------------------------------------------------------------------


def recomputed(plan: Plan) -> int:
    """How many operators run twice."""
    return sum(not node.is_source and bool(node.target) and node.op not in VIEWS for node in plan.graph.nodes)


def offloaded_bytes(plan: Plan) -> int:
    """Bytes of forward values that one rank sends to its host, and fetches back."""
    total = 0
    for node in plan.graph.nodes:
        if node.op == STORE:
            (type,), (layout,) = node.outputs, plan.choices[node.name].gives
            assert type is not None
            total += local_type(type, layout, plan.mesh).nbytes
    return total


def rows_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The curve for --json; seconds are of a step, bytes of a rank."""
    return [
        {
            "limit_bytes": point.limit,
            "peak_bytes": dict(point.plan.peak_bytes),
            "predicted_seconds": point.plan.predicted_seconds,
            "step_seconds": point.plan.step_seconds,
            "simulated_seconds": point.plan.simulated_seconds,
            "to_fastest": _ratio(point, points),
            "bound": point.plan.bound if math.isfinite(point.plan.bound) else None,
            "gap": point.plan.gap if math.isfinite(point.plan.gap) else None,
            "recomputed": recomputed(point.plan),
            "offloaded_bytes": offloaded_bytes(point.plan),
            "host_bytes": point.plan.peak_bytes.get(HOST, 0),
        }
        for point in points
    ]


def _ratio(point: Point, points: Sequence[Point]) -> float:
    fastest = points[-1].plan.predicted_seconds
    return point.plan.predicted_seconds / fastest if fastest else 1.0


def table(points: Sequence[Point]) -> str:
    """The curve as text, one line per limit."""
    plan = points[-1].plan
    lines: list[tuple[str, ...]] = [
        ("limit", "ms per step", "to the fastest", "gap", "recomputed", "offloaded", "on the host")
    ]
    for point in points:
        there = point.plan
        nbytes = (offloaded_bytes(there), there.peak_bytes.get(HOST, 0))
        gap = f"{100 * there.gap:.2f} %" if math.isfinite(there.gap) else "-"
        told = (human(point.limit), f"{there.predicted_seconds * 1e3:.3f}", f"{_ratio(point, points):.2f} x", gap)
        lines.append((*told, str(recomputed(there) or "-"), *(human(n) if n else "-" for n in nbytes)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = ["  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    head = f"step time over memory per rank, {plan.measure}: {plan.mesh}, {plan.hardware}"
    return "\n".join([head, *body]) + "\n"


# --- in a picture ----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 50, 60  # margins


def picture(points: Sequence[Point]) -> str:
    """The curve as SVG. Between two limits stands the plan of the lower one, which fits there."""
    plan = points[-1].plan
    scale, unit = unit_of(points[-1].limit)
    xs = [point.limit / scale for point in points]
    ys = [point.plan.predicted_seconds * 1e3 for point in points]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))

    def across(x: float) -> float:
        part = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)

    def down(y: float) -> float:
        part = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return round(HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM), 1)

    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    head = f"Step time over memory: {plan.mesh}, {plan.hardware} (predicted)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        label(LEFT, 28, head, "start", ' font-size="14"'),
    ]
    for y in y_ticks:
        parts.append(f'<path d="M{LEFT} {down(y)}H{right}" stroke="#ddd"/>')
        parts.append(label(LEFT - 8, down(y) + 4, f"{y:g}", "end"))
    for x in x_ticks:
        parts.append(f'<path d="M{across(x)} {floor}v5" stroke="#222"/>')
        parts.append(label(across(x), floor + 20, f"{x:g}", "middle"))
    parts.append(f'<path d="M{LEFT} {TOP}V{floor}H{right}" fill="none" stroke="#222"/>')
    parts.append(label((LEFT + right) / 2, HEIGHT - 16, f"memory per rank, {unit}", "middle"))
    middle = (TOP + floor) / 2
    parts.append(label(24, middle, "ms per step", "middle", f' transform="rotate(-90 24 {middle:g})"'))
    line = f"M{across(xs[0])} {down(ys[0])}" + "".join(
        f"H{across(x)}V{down(y)}" for x, y in zip(xs[1:], ys[1:], strict=True)
    )
    parts.append(f'<path d="{line}" fill="none" stroke="#1f5fbf" stroke-width="1.5"/>')
    for x, y in zip(xs, ys, strict=True):
        told = f"<title>{y:.3f} ms with {x:.3g} {unit}</title>"
        parts.append(f'<circle cx="{across(x)}" cy="{down(y)}" r="3.5" fill="#1f5fbf">{told}</circle>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def label(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
