"""What memory holds over a step, by what it is for: the levels of a stack, and what lies there at its peak."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.lower.program import Kind
from autopar.page.blocks import told
from cost_models.simulator import Change, Timeline, changes

SAVED = "saved for backward"
FOR = {
    Kind.PARAMETER: "parameters", Kind.BUFFER: "parameters", Kind.CONSTANT: "parameters",
    Kind.NEW_BUFFER: "parameters", Kind.CAST: "parameters", Kind.ADDED_UP: "gradients",
    Kind.STATES: "optimizer states", Kind.COUNT: "optimizer states",
    Kind.STREAMED: "optimizer states", Kind.GRADIENT: "gradients", Kind.BUCKET: "gradients",
    Kind.VALUE: "activations in use", Kind.TANGENT: "activations in use", Kind.RESHARDED: "gathered or resharded",
    Kind.WORKSPACE: "workspace", Kind.TEMPORARY: "workspace", Kind.COORDINATES: "inputs, outputs",
    Kind.INPUT: "inputs, outputs", Kind.OUTPUT: "inputs, outputs",
    Kind.BEFORE: "inputs, outputs",
}  # fmt: skip
TENANTS = (
    "parameters", "optimizer states", "gradients", SAVED, "activations in use", "gathered or resharded", "workspace",
    "inputs, outputs",
)  # fmt: skip
BINS = 1000  # of a picture's width


@dataclass(frozen=True)
class Stack:
    """One tier over a step. From times[i] on, levels[tenant][i] bytes are held of each tenant, ordered as `TENANTS`.

    `at`: the place of the peak among the times, with its instant `peak_at` and `peak_event`; `holders`: (owner, tenant,
    bytes) there, the largest first.
    """

    tier: str
    times: tuple[float, ...]
    levels: dict[str, tuple[int, ...]]
    at: int
    peak_at: float
    peak_event: str
    holders: tuple[tuple[str, str, int], ...]

    @property
    def peak(self) -> dict[str, int]:
        """Tenant -> its bytes at the peak."""
        return {tenant: levels[self.at] for tenant, levels in self.levels.items() if levels[self.at]}


def stack_of(timeline: Timeline, tier: str, bins: int = BINS) -> Stack:
    """In at most so many steps of equal width, of each the instant at which it holds the most; so the peak is there."""
    found = changes(timeline, tier)
    saved = _saved(timeline, found)
    level: dict[str, int] = dict.fromkeys(TENANTS, 0)
    total, best, highest = 0, dict(level), 0
    times: list[float] = []
    steps: list[dict[str, int]] = []
    here, width = 0, timeline.seconds / bins

    def close() -> None:
        if not steps or best != steps[-1]:
            times.append(here * width)
            steps.append(best)

    for change in found:
        bin = min(bins - 1, int(change.seconds / width)) if width else 0
        if change.at >= 0 and bin > here:
            close()
            here, best, highest = here + 1, dict(level), total
            if bin > here:  # nothing changes in between
                close()
                here = bin
        tenant = _tenant(change, saved)
        level[tenant] += change.sign * change.hold.nbytes
        total += change.sign * change.hold.nbytes
        if total > highest or change.at < 0:
            best, highest = dict(level), total
    close()
    memory = timeline.memory[tier]
    at = max(range(len(steps)), key=lambda number: sum(steps[number].values()))
    levels = {tenant: tuple(step[tenant] for step in steps) for tenant in TENANTS}
    return Stack(
        tier, tuple(times), {tenant: ones for tenant, ones in levels.items() if any(ones)}, at, memory.peak_at,
        told(timeline.events[memory.peak_event]), _holders(found, saved, memory.peak_bytes),
    )  # fmt: skip


def _tenant(change: Change, saved: set[int]) -> str:
    return SAVED if change.span in saved else FOR[Kind(change.hold.kind)]


def _saved(timeline: Timeline, found: list[Change]) -> set[int]:
    """Spans of values that are made in forward and read in backward."""
    phase_of = [event.phase for event in timeline.events]
    kept = {Kind.VALUE.value, Kind.RESHARDED.value}
    forward: set[int] = set()
    saved: set[int] = set()
    for change in found:
        if change.hold.kind not in kept or not 0 <= change.at < len(phase_of):
            continue
        if change.sign > 0 and phase_of[change.at] == "forward":
            forward.add(change.span)
        elif change.sign < 0 and change.span in forward and phase_of[change.at] != "forward":
            saved.add(change.span)
    return saved


def _holders(found: list[Change], saved: set[int], peak: int) -> tuple[tuple[str, str, int], ...]:
    held: dict[tuple[str, str], int] = defaultdict(int)
    total = 0
    for change in found:
        key = change.hold.tenant, _tenant(change, saved)
        held[key] += change.sign * change.hold.nbytes
        total += change.sign * change.hold.nbytes
        if change.at >= 0 and total == peak:
            break
    largest = [(owner, tenant, nbytes) for (owner, tenant), nbytes in held.items() if nbytes]
    return tuple(sorted(largest, key=lambda one: (-one[2], one[:2])))
