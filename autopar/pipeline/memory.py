"""What a rank holds along its list: micro-batches in flight, and bytes.

A scan over the list, which needs no times: a rank allocates and frees in the order in which it issues work.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import inf

from autopar.ir.words import count_of
from autopar.pipeline.schedule import Action, Schedule


@dataclass(frozen=True, slots=True)
class InFlight:
    """Of each rank, behind each action of its list, how many (stage, micro-batch) pairs it holds something of.

    saved      forward has run, and B or I has not: what forward kept
    pending    I has run, and W has not: what W needs
    """

    saved: tuple[tuple[int, ...], ...]
    pending: tuple[tuple[int, ...], ...]

    @property
    def most_saved(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(map(max, self.saved))

    @property
    def most_pending(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(map(max, self.pending))

    @property
    def most_held(self) -> tuple[int, ...]:
        """Of each rank, saved and pending at one instant."""
        rows = zip(self.saved, self.pending, strict=True)
        return tuple(max(map(sum, zip(saved, pending, strict=True))) for saved, pending in rows)


def in_flight(schedule: Schedule) -> InFlight:
    """The counts along the lists."""

    def along(change: dict[str, int], row: tuple[Action, ...]) -> tuple[int, ...]:
        return tuple(accumulate(change.get(action.kind, 0) for action in row))

    saved, pending = {"F": 1, "B": -1, "I": -1}, {"I": 1, "W": -1}
    return InFlight(
        tuple(along(saved, row) for row in schedule.lists), tuple(along(pending, row) for row in schedule.lists)
    )


def in_flight_of_stages(schedule: Schedule) -> tuple[int, ...]:
    """Of each stage, the most micro-batches whose forward has run and whose B or I has not."""
    most, now = [0] * schedule.stages, [0] * schedule.stages
    change = {"F": 1, "B": -1, "I": -1}
    for row in schedule.lists:
        for action in row:
            now[action.stage] += change.get(action.kind, 0)
            most[action.stage] = max(most[action.stage], now[action.stage])
    return tuple(most)


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes on each device of a stage.

    fixed      however many micro-batches are in flight: parameters, gradients, optimizer states; without what an
               earlier stage of the same rank holds already
    working    the most that temporaries take at once; of a rank's stages one works at a time
    saved      of each micro-batch from the start of F to the end of B or I
    pending    of each micro-batch from the end of I to the end of W
    sent       of what crosses the cut behind each stage but the last, one way, for one micro-batch

    Raises ValueError for a wrong number of entries, and for one that is negative or not finite.
    """

    fixed: tuple[float, ...]
    working: tuple[float, ...]
    saved: tuple[float, ...]
    pending: tuple[float, ...]
    sent: tuple[float, ...]

    def __post_init__(self) -> None:
        stages = len(self.fixed)
        for name, needed in (
            ("fixed", stages),
            ("working", stages),
            ("saved", stages),
            ("pending", stages),
            ("sent", stages - 1),
        ):
            entries: tuple[float, ...] = getattr(self, name)
            if len(entries) != needed:
                raise ValueError(
                    f"bytes {name} have {count_of(len(entries), 'entry', 'entries')}, but {count_of(stages, 'stage')} "
                    f"(the entries of fixed) need {needed}"
                )
            for at, nbytes in enumerate(entries):
                if not 0 <= nbytes < inf:
                    raise ValueError(f"bytes {name} of entry {at} are {nbytes:g}; they must be finite and not negative")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that a rank holds while each action of its list runs, and where they are most (the first such place)."""

    nbytes: tuple[float, ...]
    peak: float
    position: int
    action: Action


def memory(schedule: Schedule, nbytes: StageBytes) -> tuple[RankMemory, ...]:
    """Bytes of each rank along its list.

    Beside what `StageBytes` says, a rank holds a buffer from each receive until its reader has started (F, which keeps
    its input with what it saves) or ended (B, I), and the result of F, B or I until it is sent or, on the same rank,
    read. Raises ValueError for bytes of another number of stages.
    """
    if len(nbytes.fixed) != schedule.stages:
        raise ValueError(
            f"the bytes are those of {count_of(len(nbytes.fixed), 'stage')}, but {schedule.name} has "
            f"{schedule.stages}; give one entry for each stage"
        )
    return tuple(_of_rank(schedule, nbytes, rank) for rank in range(schedule.ranks))


def _of_rank(schedule: Schedule, nbytes: StageBytes, rank: int) -> RankMemory:
    row = schedule.lists[rank]
    own = [stage for stage, holder in enumerate(schedule.rank_of) if holder == rank]
    held = sum(nbytes.fixed[stage] for stage in own) + max(nbytes.working[stage] for stage in own)
    curve: list[float] = []
    for action in row:
        taken, kept = _changes(action, nbytes)
        curve.append(held + taken)
        held += taken + kept
    peak = max(curve)
    position = curve.index(peak)
    return RankMemory(tuple(curve), peak, position, row[position])


def _changes(action: Action, nbytes: StageBytes) -> tuple[float, float]:
    """Bytes that an action takes as it starts, and by how much those that are held change as it ends."""
    stage = action.stage
    before = nbytes.sent[stage - 1] if stage > 0 else 0.0
    behind = nbytes.sent[stage] if stage + 1 < len(nbytes.fixed) else 0.0
    match action.kind:
        case "F":  # the input's buffer becomes part of what is saved; the output is a new one
            return nbytes.saved[stage] - before + behind, 0.0
        case "B":  # the gradient from behind is read, that for the stage before is made
            return before, -nbytes.saved[stage] - behind
        case "I":
            return before, nbytes.pending[stage] - nbytes.saved[stage] - behind
        case "W":
            return 0.0, -nbytes.pending[stage]
        case "RA":
            return before, 0.0
        case "RG":
            return behind, 0.0
        case "SA":
            return 0.0, -behind
        case "SG":
            return 0.0, -before
