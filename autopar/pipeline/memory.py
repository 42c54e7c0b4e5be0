"""What a rank holds along its list: micro-batches in flight, and bytes.

A scan over the list, which needs no times: a rank allocates and frees in the order in which it issues work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    saved      of each micro-batch from the start of F to the end of B or I
    pending    of each micro-batch from the end of I to the end of W
    sent       of what forward sends over the cut behind each stage but the last, for one micro-batch
    returned   of the gradients that come back over these cuts; None: as many as are sent
    shared     of what forward sends, what is among the saved too; None: nothing
    forward, backward, weight, update
               by how much what is held grows at most while F, B or I, W, or the updates behind the list run; None: not
               more than what they leave
    outputs    of what the stage gives back from the step, which the ranks of other stages get, too, and which all still
               hold when the next step begins; None: nothing
    arguments  of gradients of what the step is given, which the stage makes and the ranks of other stages get, too;
               None: nothing

    Raises ValueError for a wrong number of entries, and for one that is negative or not finite.
    """

    fixed: tuple[float, ...]
    saved: tuple[float, ...]
    pending: tuple[float, ...]
    sent: tuple[float, ...]
    returned: tuple[float, ...] | None = None
    shared: tuple[float, ...] | None = None
    forward: tuple[float, ...] | None = None
    backward: tuple[float, ...] | None = None
    weight: tuple[float, ...] | None = None
    update: tuple[float, ...] | None = None
    outputs: tuple[float, ...] | None = None
    arguments: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        stages = len(self.fixed)
        for name, needed in (
            ("fixed", stages),
            ("saved", stages),
            ("pending", stages),
            ("sent", stages - 1),
            ("returned", stages - 1),
            ("shared", stages - 1),
            ("forward", stages),
            ("backward", stages),
            ("weight", stages),
            ("update", stages),
            ("outputs", stages),
            ("arguments", stages),
        ):
            entries: tuple[float, ...] | None = getattr(self, name)
            if entries is None:
                continue
            if len(entries) != needed:
                raise ValueError(
                    f"bytes {name} have {count_of(len(entries), 'entry', 'entries')}, but {count_of(stages, 'stage')} "
                    f"(the entries of fixed) need {needed}"
                )
            for at, nbytes in enumerate(entries):
                if not 0 <= nbytes < inf:
                    raise ValueError(f"bytes {name} of entry {at} are {nbytes:g}; they must be finite and not negative")

    @property
    def gradients(self) -> tuple[float, ...]:
        """Of those that come back over each cut."""
        return self.sent if self.returned is None else self.returned

    @property
    def copies(self) -> tuple[float, ...]:
        """Of what forward sends over each cut, what is held for that alone."""
        shared = self.shared or (0.0,) * len(self.sent)
        return tuple(sent - kept for sent, kept in zip(self.sent, shared, strict=True))


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that a rank holds while each action of its list runs, the last one with the updates behind it, and where
    they are most (the first such place).
    """

    nbytes: tuple[float, ...]
    peak: float
    position: int
    action: Action


def memory(schedule: Schedule, nbytes: StageBytes) -> tuple[RankMemory, ...]:
    """Bytes of each rank along its list.

    Beside what `StageBytes` says, a rank holds a buffer from each receive until its reader has started (F, which keeps
    its input with what it saves) or ended (B, I), and the result of F, B or I until it has been received
    (`Schedule.lets_go`) or, on the same rank, read. Raises ValueError for bytes of another number of stages.
    """
    if len(nbytes.fixed) != schedule.stages:
        raise ValueError(
            f"the bytes are those of {count_of(len(nbytes.fixed), 'stage')}, but {schedule.name} has "
            f"{schedule.stages}; give one entry for each stage"
        )
    lets_go = schedule.lets_go()
    return tuple(_of_rank(schedule, nbytes, rank, lets_go) for rank in range(schedule.ranks))


def _of_rank(
    schedule: Schedule, nbytes: StageBytes, rank: int, lets_go: Mapping[Action, Sequence[Action]]
) -> RankMemory:
    row = schedule.lists[rank]
    own = [stage for stage, holder in enumerate(schedule.rank_of) if holder == rank]
    always = sum(nbytes.fixed[stage] for stage in own)
    before = sum(nbytes.outputs or ())
    held = always + before
    curve: list[float] = []
    for action in row:
        grows, kept = _changes(action, nbytes)
        curve.append(held + grows)
        gone = (nbytes.copies[one.stage] if one.kind == "SA" else nbytes.gradients[one.stage - 1]
                for one in lets_go.get(action, ()))  # fmt: skip
        held += kept - sum(gone)
    given = (*enumerate(nbytes.outputs or ()), *enumerate(nbytes.arguments or ()))
    others = sum(of for stage, of in given if stage not in own)
    grows = max(_at(nbytes.update, stage) for stage in own)
    curve[-1] = max(curve[-1], always + others + max(before, grows))  # behind the list, when all has been received
    peak = max(curve)
    position = curve.index(peak)
    return RankMemory(tuple(curve), peak, position, row[position])


def _changes(action: Action, nbytes: StageBytes) -> tuple[float, float]:
    """By how many bytes what is held grows at most while an action runs, and by how many once it has ended."""
    stage = action.stage
    is_first, is_last = stage == 0, stage + 1 == len(nbytes.fixed)
    before, behind = 0.0 if is_first else nbytes.sent[stage - 1], 0.0 if is_last else nbytes.copies[stage]
    given, got = 0.0 if is_first else nbytes.gradients[stage - 1], 0.0 if is_last else nbytes.gradients[stage]
    match action.kind:
        case "F":  # the input's buffer becomes part of what is saved; the output is a new one
            kept = nbytes.saved[stage] - before + behind
            return max(kept, _at(nbytes.forward, stage)), kept
        case "B" | "I":  # the gradient from behind is read, that for the stage before is made
            pending = nbytes.pending[stage] if action.kind == "I" else 0.0
            return max(given, _at(nbytes.backward, stage)), given + pending - nbytes.saved[stage] - got
        case "W":
            return _at(nbytes.weight, stage), -nbytes.pending[stage]
        case "RA":
            return before, before
        case "RG":
            return got, got
        case "SA" | "SG":
            return 0.0, 0.0


def _at(entries: Sequence[float] | None, stage: int) -> float:
    return 0.0 if entries is None else entries[stage]
