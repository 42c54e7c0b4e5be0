"""A plan's prediction beside what a run of it measured: the figures, as text and as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopar.lower import lower
from autopar.lower.memory import peaks, peaks_by_phase
from autopar.lower.program import PHASES
from autopar.plan.plan import Plan
from autopar.plan.tell import human
from autopar.price.pricer import Pricer
from autopar.simulate.timeline import events_of
from cost_models.steps import HOST

Moved = tuple[str, str]  # (collective, axis)


@dataclass(frozen=True, slots=True)
class Pair:
    """`predicted` is None where the plan's profile is not at hand."""

    predicted: float | None
    measured: float

    @property
    def ratio(self) -> float | None:
        return self.measured / self.predicted if self.predicted else None


@dataclass(frozen=True, slots=True)
class Collective:
    """All collectives of one kind over one axis, in one step of one rank. Bytes are those received."""

    kind: str
    axis: str
    calls: tuple[int, int]  # in the emitted program, and made
    nbytes: tuple[int, int]  # in the plan, and received
    seconds: Pair

    @property
    def is_equal(self) -> bool:
        return self.calls[0] == self.calls[1] and self.nbytes[0] == self.nbytes[1]


@dataclass(frozen=True)
class Measured:
    """One step of a plan, executed. Of times the median over steps, of times and bytes the largest over ranks.

    `step`: undisturbed. `phases`: forward and backward without their collectives, and the optimizer, from other steps
    in which every operator was timed by itself; `waiting_s`: what ranks waited there for each other before collectives.
    `peak_bytes`: per phase, all live storages on a CPU, `max_memory_allocated` on CUDA.
    """

    mesh: str
    hardware: str
    optimizer: str
    where: str
    steps: int
    step: Pair
    phases: Mapping[str, Pair]
    collectives: tuple[Collective, ...]
    waiting_s: float
    peak_bytes: Mapping[str, Pair]
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether the collectives were those of the plan, to the byte."""
        return all(one.is_equal for one in self.collectives)

    @property
    def parts(self) -> Pair:
        """The sum of phases and collectives."""
        pairs = [*self.phases.values(), *(one.seconds for one in self.collectives)]
        predicted = [pair.predicted for pair in pairs if pair.predicted is not None]
        return Pair(sum(predicted) if len(predicted) == len(pairs) else None, sum(pair.measured for pair in pairs))

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "sum_of_parts": asdict(self.parts),
            "collectives": [{**asdict(one), "is_equal": one.is_equal} for one in self.collectives],
            "is_equal": self.is_equal,
        }

    def table(self) -> str:
        lines = [
            f"mesh {self.mesh}, planned for {self.hardware}, optimizer {self.optimizer}",
            f"run on {self.where}",
            "",
            *columns([("time of a step", "predicted", "measured", "ratio"), *self._times()]),
            f"  step: the median of {self.steps} undisturbed steps on the slowest rank. Its parts are of other steps,",
            "  in which every operator was timed by itself and ranks met before each collective (and waited there for",
            f"  {ms(self.waiting_s)})",
            "",
        ]
        head = ("collectives of a step and rank", "calls emitted", "made", "bytes planned", "received", "")
        rows = [
            (
                f"{one.kind} over {one.axis}" if one.axis else one.kind,
                *(f"{n:,}" for n in (*one.calls, *one.nbytes)),
                "equal" if one.is_equal else "DIFFERENT",
            )
            for one in self.collectives
        ]
        lines += [*columns([head, *rows]), ""] if rows else ["no collectives", ""]
        memory = [
            (name, "-" if pair.predicted is None else human(pair.predicted), human(pair.measured), ratio(pair))
            for name, pair in self.peak_bytes.items()
        ]
        lines += columns([("memory peak of a rank", "predicted", "measured", "ratio"), *memory])
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def _times(self) -> Iterator[tuple[str, ...]]:
        rows = [(f"{name}, operators" if name != "optimizer" else name, pair) for name, pair in self.phases.items()]
        named = ((f"{one.kind} over {one.axis}" if one.axis else one.kind, one.seconds) for one in self.collectives)
        for name, pair in [*rows[:2], *named, *rows[2:], ("sum of its parts", self.parts), ("step", self.step)]:
            yield name, "-" if pair.predicted is None else ms(pair.predicted), ms(pair.measured), ratio(pair)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def ratio(pair: Pair) -> str:
    return "-" if pair.ratio is None else f"{pair.ratio:.2f}"


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """The first column to the left, the others to the right; lines below the head are set in."""
    rows = [rows[0], *((f"  {row[0]}", *row[1:]) for row in rows[1:])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines: list[str] = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


# --- what is predicted -----------------------------------------------------------------------------------------------


def predicted_seconds(plan: Plan, pricer: Pricer) -> tuple[dict[str, float], dict[Moved, float]]:
    """(phase -> seconds without collectives, collective -> seconds); together the step with nothing overlapped."""
    phases: dict[str, float] = {phase: 0.0 for phase in PHASES}
    collectives: dict[Moved, float] = defaultdict(float)
    for event in events_of(plan, pricer):
        about = dict(event.about)
        if (kind := about.get("collective")) is not None:
            collectives[str(kind), str(about["axis"])] += event.seconds
        else:
            phases[event.phase] += event.seconds
    return phases, dict(collectives)


def predicted_peaks(plan: Plan, pricer: Pricer) -> dict[str, int]:
    """phase -> the most that one rank's device holds in it, by the plan's own account; `step`: the most of all;
    `host`: the most that the host holds for it, if anything.
    """
    program = lower(plan, None, pricer)
    by_phase, host = peaks_by_phase(program), peaks(program).get(HOST, 0)
    return {**by_phase, "step": max(by_phase.values()), **({HOST: host} if host else {})}
