"""Writes a timeline as a trace that chrome://tracing and ui.perfetto.dev open (Trace Event Format, JSON object form).

One process; a track (thread) for the phases, one per stream, and a counter per memory tier. Times are microseconds,
rounded to whole nanoseconds: viewers count in those, and two events of a stream must not seem to overlap. What takes no
time is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cost_models.simulator import Memory, Timeline
from cost_models.whole_file import write_whole

PROCESS = 1
PHASES = 1  # the thread of the phases; streams follow


def trace_events(timeline: Timeline, process: str = "one rank") -> list[dict[str, Any]]:
    """Every entry of the trace: names first, then by time."""
    streams = sorted(timeline.busy_s, key=lambda name: (name != timeline.main, name))
    thread_of = {stream: PHASES + 1 + place for place, stream in enumerate(streams)}
    entries = [_named("process_name", PHASES, name=process)]
    for thread, name in ((PHASES, "phase"), *((thread_of[stream], stream) for stream in streams)):
        entries.append(_named("thread_name", thread, name=name))
        entries.append(_named("thread_sort_index", thread, sort_index=thread))
    timed = [*_slices(timeline, thread_of)]
    for tier, memory in timeline.memory.items():
        timed += _counters(tier, memory)
    return entries + sorted(timed, key=lambda entry: entry["ts"])  # stable: within an instant in the order of the list


def write_trace(
    timeline: Timeline,
    path: str | Path,
    *,
    process: str = "one rank",
    about: Mapping[str, str | int | float] | None = None,
) -> None:
    """Write the trace, one entry per line. Whoever looks at `path` sees the old file or the whole new one."""
    told = {"step_seconds": timeline.seconds, **(about or {})}
    told |= {f"peak_bytes.{tier}": memory.peak_bytes for tier, memory in timeline.memory.items()}
    write_whole(path, _lines(trace_events(timeline, process), told))


def _lines(entries: Iterable[dict[str, Any]], about: Mapping[str, str | int | float]) -> Iterator[str]:
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about, allow_nan=False)}, "traceEvents": [\n'
    between = ""
    for entry in entries:
        yield between + json.dumps(entry, allow_nan=False)
        between = ",\n"
    yield "\n]}\n"


def _named(kind: str, thread: int, **args: str | int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": PROCESS, "tid": thread, "ts": 0, "args": args}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _slice(name: str, kind: str, begin: float, end: float, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    start, stop = _nanoseconds(begin), _nanoseconds(end)
    return {
        "name": name, "cat": kind, "ph": "X", "ts": start / 1e3, "dur": (stop - start) / 1e3,
        "pid": PROCESS, "tid": thread, "args": args,
    }  # fmt: skip


def _slices(timeline: Timeline, thread_of: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for phase, begin, end in timeline.phases:
        yield _slice(phase or "step", "phase", begin, end, PHASES, {"seconds": end - begin})
    for number, event in enumerate(timeline.events):
        if not event.seconds:
            continue
        args: dict[str, Any] = {"event": number, "phase": event.phase, "seconds": event.seconds, **dict(event.about)}
        if event.stream != timeline.main:
            args["exposed_seconds"] = timeline.exposed_of[number]
        kind = f"{event.stream},{event.phase}" if event.phase else event.stream
        yield _slice(event.name, kind, timeline.starts[number], timeline.ends[number], thread_of[event.stream], args)


def _counters(tier: str, memory: Memory) -> Iterator[dict[str, Any]]:
    """The level after all changes of each nanosecond, where it is a new one."""
    level_at: dict[int, int] = {}
    for instant, level in zip(memory.times, memory.levels, strict=True):
        level_at[_nanoseconds(instant)] = level
    before = None
    for instant, level in level_at.items():
        if level != before:
            yield {
                "name": f"{tier} bytes", "ph": "C", "ts": instant / 1e3,
                "pid": PROCESS, "tid": PHASES, "args": {tier: level},
            }  # fmt: skip
            before = level
