"""Played schedules as text: each rank a line with time from left to right, and a table that compares several."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.bound import least_seconds
from autopar.pipeline.memory import in_flight
from autopar.pipeline.play import Durations, Played
from autopar.pipeline.schedule import COMPUTES, SENDS, Action

IDLE = "."
HEADINGS = (
    "schedule", "stages/rank", "step s", "above least %", "idle %", "span s", "in flight", "with W", "messages",
)  # fmt: skip


def picture(played: Played, width: int) -> str:
    """A line per rank, of at most `width` columns: an action begins with its name where that fits, else its kind."""
    schedule = played.schedule
    several = schedule.stages > schedule.ranks
    computes = {one: span for one, span in played.times.items() if one.kind in COMPUTES}
    names = {one: str(one) if several else f"{one.kind}{one.micro_batch}" for one in computes}
    longest = max(map(len, names.values())) + 1
    shortest = min((end - start for start, end in computes.values() if end > start), default=1.0)
    columns = min(width, round(played.makespan / shortest * longest))
    scale = columns / played.makespan if played.makespan else 0.0
    lines: list[str] = []
    for rank, row in enumerate(schedule.lists):
        cells = [IDLE] * columns
        for action in row:
            if action in computes:
                start, end = (round(seconds * scale) for seconds in computes[action])
                cells[start:end] = _cell(names[action], action, end - start)
        lines.append(f"rank {rank:<3} {''.join(cells)}")
    end = f"{played.makespan:g} s"
    return "\n".join([*lines, f"{'':8} 0{end:>{max(columns - 1, len(end) + 1)}}"])


def _cell(name: str, action: Action, columns: int) -> str:
    """What an action shows: 'F0', 'B0--', or 'F' where its name is too long."""
    told = name if len(name) < columns else action.kind
    return told[:columns] if columns <= len(told) else f"{told:-<{columns - 1}} "


def comparison(plays: Sequence[tuple[Played, Durations]]) -> str:
    """A table with a line for each; what its columns mean stands below it."""
    rows = [HEADINGS, *(_figures(played, durations) for played, durations in plays)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(f"{cell:<{width}}" if not at else f"{cell:>{width}}" for at, (cell, width) in enumerate(
            zip(row, widths, strict=True)
        ))
        for row in rows
    ]  # fmt: skip
    return "\n".join([*lines, "", *MEANING])


MEANING = (
    "All seconds are played from those given, none is measured. above least: the step against what no order of these",
    "stages can beat. idle: of all ranks' time in the step. span: the longest time from a rank's first action to its",
    "last; where no barrier ends a step, the next one begins after that. in flight: most micro-batches whose saved",
    "values a rank holds, in bytes of all of its stages; with W: and those that wait for W. messages: of each",
    "micro-batch.",
)


def _figures(played: Played, durations: Durations) -> tuple[str, ...]:
    schedule = played.schedule
    least = least_seconds(schedule.rank_of, schedule.micro_batches, durations)
    counts, several = in_flight(schedule), schedule.stages_per_rank
    sends = sum(one.kind in SENDS for one in played.times)
    total = played.makespan * schedule.ranks
    return (
        schedule.name, f"{several}", f"{played.makespan:.6g}", _share(played.makespan - least, least),
        _share(sum(played.idle), total), f"{played.span:.6g}", f"{max(counts.most_saved) / several:g}",
        f"{max(counts.most_held) / several:g}", f"{sends / schedule.micro_batches:g}",
    )  # fmt: skip


def _share(part: float, whole: float) -> str:
    return f"{100 * max(part, 0.0) / whole:.1f}" if whole else "-"
