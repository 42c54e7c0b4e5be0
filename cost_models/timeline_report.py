"""A timeline in a few lines of text: where the time goes, what is waited for, and who holds the memory at its peak."""

from __future__ import annotations

from cost_models.simulator import Timeline

HOLDERS = 5


def timeline_report(timeline: Timeline) -> str:
    """Phases, then each stream, then each memory tier with its peak and the largest holders there."""
    lines = [f"step {_ms(timeline.seconds).strip()}, {len(timeline.events):,} events"]
    for phase, seconds in timeline.phase_seconds.items():
        lines.append(f"  {phase or 'step':<22}{_ms(seconds)}{_share(seconds, timeline)}")
    lines.append(f"{'stream':<24}{'busy':>13}{'':>7}{'idle':>13}{'exposed':>13}")
    idle_s, exposed_s = timeline.idle_s, timeline.exposed_s
    for stream in sorted(timeline.busy_s, key=lambda name: (name != timeline.main, name)):
        busy = timeline.busy_s[stream]
        exposed = "" if stream == timeline.main else _ms(exposed_s[stream])
        lines.append(f"  {stream:<22}{_ms(busy)}{_share(busy, timeline)}{_ms(idle_s[stream])}{exposed}")
    for tier, memory in timeline.memory.items():
        where = timeline.events[memory.peak_event].name if timeline.events else ""
        peak = f"peak of {tier}: {_mib(memory.peak_bytes).strip()}"
        lines.append(f"{peak} at {_ms(memory.peak_at).strip()}, in {where}; {len(memory.holders)} holders")
        lines += [f"  {_mib(nbytes)}  {tenant}" for tenant, nbytes in memory.holders[:HOLDERS]]
    return "\n".join(lines) + "\n"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:>10.3f} ms"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:>10.2f} MiB"


def _share(seconds: float, timeline: Timeline) -> str:
    return f"{100 * seconds / timeline.seconds if timeline.seconds else 0.0:>5.1f} %"
