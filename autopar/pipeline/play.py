"""Play a schedule: when each action starts and ends, how long the step takes, and who is idle.

Each rank computes its F, B, I and W one at a time, in the order of its list. A send begins once its rank has come to it
and takes its seconds on the link from that rank to the other, which carries one message at a time; it keeps neither
rank from computing. What is received can be read when the send has ended. A receive is taken to be posted in time.

The play is that of `cost_models.simulator`: a stream for each rank and for each link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from autopar.ir.words import count_of
from autopar.pipeline.schedule import COMPUTES, RECEIVES, SENDS, Action, Kind, Schedule, ScheduleError, receiver_of
from cost_models import simulator

Array = NDArray[np.float64]
NAMED = {"whole": "backward", "returning": "send_back"}  # what properties are called where they are given


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds for one micro-batch.

    forward, backward_input, backward_weight   F, I and W of each stage
    send                                       over the cut behind each stage but the last, of what forward makes
    backward                                   B of each stage, where that is not I + W
    send_back                                  over these cuts, of gradients, where that is not `send`

    Raises ValueError for a wrong number of entries, and for one that is negative or not finite.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    send: tuple[float, ...]
    backward: tuple[float, ...] | None = None
    send_back: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        stages = self.stages
        for name, entries, needed in (
            ("backward_input", self.backward_input, stages),
            ("backward_weight", self.backward_weight, stages),
            ("backward", self.whole, stages),
            ("send", self.send, stages - 1),
            ("send_back", self.returning, stages - 1),
        ):
            if len(entries) != needed:
                raise ValueError(
                    f"{name} has {count_of(len(entries), 'entry', 'entries')}, but {count_of(stages, 'stage')} (the "
                    f"entries of forward) need {needed}: one for each {'cut' if name.startswith('send') else 'stage'}"
                )
        for name in ("forward", "backward_input", "backward_weight", "send", "whole", "returning"):
            entries: tuple[float, ...] = getattr(self, name)
            for at, seconds in enumerate(entries):
                if not 0 <= seconds < inf:
                    raise ValueError(
                        f"{NAMED.get(name, name)} of {'cut' if name in ('send', 'returning') else 'stage'} {at} is "
                        f"{seconds:g} s; it must be finite and not negative"
                    )

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.forward)

    @property
    def whole(self) -> tuple[float, ...]:
        """B of each stage."""
        if self.backward is not None:
            return self.backward
        return tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=False)))

    @property
    def returning(self) -> tuple[float, ...]:
        """Of gradients over each cut."""
        return self.send if self.send_back is None else self.send_back

    def of(self, action: Action) -> float:
        """Seconds of an action; a receive ends with its send and has none of its own."""
        match action.kind:
            case "F":
                return self.forward[action.stage]
            case "B":
                return self.whole[action.stage]
            case "I":
                return self.backward_input[action.stage]
            case "W":
                return self.backward_weight[action.stage]
            case "SA":
                return self.send[action.stage]
            case "SG":
                return self.returning[action.stage - 1]
            case "RA" | "RG":
                return 0.0


@dataclass(frozen=True)
class Played:
    """What `play` saw: (start, end) in seconds of every F, B, I, W and send, each behind those that it waits for."""

    schedule: Schedule
    times: Mapping[Action, tuple[float, float]]

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end of any rank: a step that ends for all at once."""
        return max(end for _, end in self.times.values())

    @cached_property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """Of each rank, when its first action of computing starts and its last one ends."""
        rows = [[self.times[one] for one in row if one.kind in COMPUTES] for row in self.schedule.lists]
        return tuple((row[0][0], row[-1][1]) for row in rows)

    @property
    def span(self) -> float:
        """The longest of the ranks' spans: seconds from one step to the next where nothing but the lists binds them."""
        return max(end - start for start, end in self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(
            sum(self.times[one][1] - self.times[one][0] for one in row if one.kind in COMPUTES)
            for row in self.schedule.lists
        )

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds of the step in which each rank computes nothing."""
        return tuple(self.makespan - busy for busy in self.busy)


def play(schedule: Schedule, durations: Durations) -> Played:
    """Play the lists. Raises ValueError for durations of another number of stages, ScheduleError for lists that end
    waiting for each other.
    """
    number_of, timeline = simulated(schedule, durations)
    spans = zip(timeline.starts, timeline.ends, strict=True)
    return Played(schedule, dict(zip(number_of, spans, strict=True)))


def makespans(schedule: Schedule, many: Sequence[Durations]) -> list[float]:
    """Seconds of the step, as `play` has them, of each of these durations: what waits for what is worked out once."""
    _check(schedule, many)
    kinds: tuple[Kind, ...] = ("F", "B", "I", "W", "SA", "SG")
    seconds = {
        (kind, stage): np.array([one.of(Action(kind, stage, 0)) for one in many])
        for kind in kinds
        for stage in range(schedule.stages)
        if not (kind == "SA" and stage + 1 == schedule.stages) and not (kind == "SG" and stage == 0)
    }
    nothing = np.zeros(len(many))
    ends: dict[Action, Array] = {}
    free: dict[int | tuple[int, int], Array] = {}  # a rank, or a link: when it is
    for action, needed in walk(schedule):
        rank = schedule.rank_of[action.stage]
        start = free.get(rank, nothing)
        if needed is not None:
            start = np.maximum(start, ends[needed])
        stream: int | tuple[int, int] = rank
        if action.kind in SENDS:
            stream = rank, schedule.rank_of[receiver_of(action).stage]
            start = np.maximum(start, free.get(stream, nothing))
        ends[action] = free[stream] = start + seconds[action.kind, action.stage]
    return np.max(list(ends.values()), axis=0).tolist()


def _check(schedule: Schedule, many: Sequence[Durations]) -> None:
    for durations in many:
        if durations.stages != schedule.stages:
            raise ValueError(
                f"the durations are those of {count_of(durations.stages, 'stage')}, but {schedule.name} has "
                f"{schedule.stages}; give one entry for each stage"
            )


def simulated(schedule: Schedule, durations: Durations) -> tuple[dict[Action, int], simulator.Timeline]:
    """`play`, as (the event of each action, their timeline), with a stream for each rank and link."""
    _check(schedule, [durations])
    events: list[simulator.Event] = []
    number_of: dict[Action, int] = {}
    last_on: dict[str, int] = {}  # rank -> its last event of computing
    for action, needed in walk(schedule):
        rank = _stream(schedule, schedule.rank_of[action.stage])
        after = [] if needed is None else [number_of[needed]]
        if action.kind in SENDS:
            stream = f"{rank} to {schedule.rank_of[receiver_of(action).stage]}"
            after += [last_on[rank]] if rank in last_on else []
        else:
            stream = rank
            last_on[rank] = len(events)
        number_of[action] = len(events)
        about = ("stage", action.stage), ("micro-batch", action.micro_batch)
        seconds = durations.of(action)
        events.append(simulator.Event(str(action), stream, seconds, tuple(after), about=about, by=action))
    return number_of, simulator.play(events, main=_stream(schedule, 0))


def _stream(schedule: Schedule, rank: int) -> str:
    """Of what a rank computes: of equal length, so that names are in the order of ranks."""
    return f"rank {rank:0{len(str(schedule.ranks - 1))}}"


def walk(schedule: Schedule) -> list[tuple[Action, Action | None]]:
    """All actions but receives, each behind those it waits for, with the one of another list that it waits for.

    Sends and receives keep nobody waiting; who reads waits for the send. Raises ScheduleError where all lists wait.
    """
    done: set[Action] = set()
    walked: list[tuple[Action, Action | None]] = []
    places = [0] * schedule.ranks
    waiting: dict[Action, int] = {}  # what is waited for -> who waits
    runnable = list(range(schedule.ranks))
    whole = {(one.stage, one.micro_batch) for row in schedule.lists for one in row if one.kind == "B"}
    while runnable:
        rank = runnable.pop()
        row = schedule.lists[rank]
        while places[rank] < len(row):
            action = row[places[rank]]
            if action.kind not in RECEIVES:
                needed = _needed(schedule, action, whole)
                if needed is not None and needed not in done:
                    waiting[needed] = rank
                    break
                walked.append((action, needed))
                done.add(action)
                if action in waiting:
                    runnable.append(waiting.pop(action))
            places[rank] += 1
    if waiting:
        needed, rank = min(waiting.items(), key=lambda item: item[1])
        raise ScheduleError(
            f"{schedule.name}: rank {rank} comes to {schedule.lists[rank][places[rank]]} at position {places[rank]}, "
            f"which needs {needed}, and that never runs: it is in no list, or its rank waits in turn"
        )
    return walked


def _needed(schedule: Schedule, action: Action, whole: set[tuple[int, int]]) -> Action | None:
    """What an action waits for besides those in front of it: the send, or on one rank the maker, of what it reads."""
    kind, stage, micro_batch = action
    if kind == "F" and stage > 0:
        return Action("SA" if schedule.crosses(stage - 1) else "F", stage - 1, micro_batch)
    if kind in ("B", "I") and stage + 1 < schedule.stages:
        if schedule.crosses(stage):
            return Action("SG", stage + 1, micro_batch)
        return Action("B" if (stage + 1, micro_batch) in whole else "I", stage + 1, micro_batch)
    return None
