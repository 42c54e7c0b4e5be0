"""Step time over memory, drawn: between two limits stands the plan of the lower one, which fits there."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.page.markup import Markup, tag
from autopar.page.scales import percentage, ticks, unit_of

HEIGHT, BELOW, ABOVE = 200, 24, 12


def curve_figure(points: Sequence[tuple[float, float]], measure: str) -> Markup:
    """`points`: (bytes of a rank's memory, seconds a step), memory rising; at least one."""
    scale, unit = unit_of(points[-1][0])
    xs, ys = [limit / scale for limit, _ in points], [seconds * 1e3 for _, seconds in points]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))

    def across(x: float) -> float:
        return (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])

    def down(y: float) -> float:
        return round(ABOVE + HEIGHT * (1 - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])), 1)

    names = [tag("text", f"{y:g}", x="92%", y=down(y) + 4, text_anchor="end") for y in y_ticks]
    parts: list[Markup] = []
    for y in y_ticks:
        parts.append(tag("line", x1="0", x2="100%", y1=down(y), y2=down(y), class_="grid"))
    for number, x in enumerate(x_ticks):
        anchor = "start" if number == 0 else "end" if number == len(x_ticks) - 1 else "middle"
        place = percentage(across(x), 1.0)
        parts.append(tag("text", f"{x:g}", x=place, y=ABOVE + HEIGHT + 18, text_anchor=anchor, class_="dim"))
    line = f"M{1000 * across(xs[0]):.1f} {down(ys[0])}" + "".join(
        f"H{1000 * across(x):.1f}V{down(y)}" for x, y in zip(xs[1:], ys[1:], strict=True)
    )
    box = f"0 0 1000 {HEIGHT + ABOVE}"
    path = tag("path", d=line, class_="curve")
    parts.append(tag("svg", path, viewBox=box, preserveAspectRatio="none", width="100%", height=HEIGHT + ABOVE))
    for x, y in zip(xs, ys, strict=True):
        told = tag("title", f"{y:.3f} ms with {x:.3g} {unit}")
        parts.append(tag("circle", told, cx=percentage(across(x), 1.0), cy=down(y), r=4, class_="a"))
    about = "; ".join(f"{y:.3f} ms with {x:.3g} {unit}" for x, y in zip(xs, ys, strict=True))
    head = tag("title", "Step time over memory"), tag("desc", about)
    drawn = tag("svg", *head, *parts, height=HEIGHT + ABOVE + BELOW, width="100%", role="img")
    beside = tag("svg", *names, height=HEIGHT + ABOVE + BELOW, width="100%")
    return tag(
        "figure",
        tag("figcaption", f"Milliseconds a step over memory of a rank in {unit}, {measure}"),
        tag("div", tag("div", beside, class_="names", aria_hidden="true"), tag("div", drawn), class_="frame"),
    )
