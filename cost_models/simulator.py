"""Plays events on the streams of one rank: how long a step takes, who waits for whom, and what memory holds meanwhile.

A stream ("compute", "comm:<axis>", "h2d", "d2h", "host") is a queue: it runs its events one at a time, in the order of
the list. An event starts as soon as its stream is free and the events of `after` have ended:

    start_e = max(end of the event before it on its stream, end of each event in after_e)
    end_e = start_e + seconds_e

All of `after` stands earlier in the list, so one pass over it is the whole simulation. Whoever writes the list says
what a runtime would do: that a collective waits for the kernels issued ahead of it is one more entry of `after`.

Of memory changes at one instant, those of an earlier event come first, and its release before the next one's
allocation. So an event that takes no time is still an instant of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Hold:
    """`tenant` holds `nbytes` of a memory tier.

    From the start of its event, or from the end of event `since`; until its event and all of `until` (the readers) have
    ended, or with `until` None until the end of the step. `resident`: before the step, throughout it, and after it;
    with `at_first_update` of the first step only from its update on. `kind`: what it is for, as whoever wrote it says.
    """

    tenant: str
    nbytes: int
    tier: str = "hbm"
    since: int | None = None
    until: tuple[int, ...] | None = ()
    resident: bool = False
    at_first_update: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that occupies one stream for `seconds`. Events are called by their places in the list, from 0.

    `after`: events that must have ended before it starts, all earlier in the list. `phase`: the part of the step it
    counts to. `about`: what a viewer shows of it, as (name, value). `by`: what it is an event of, for who wrote it.
    """

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    holds: tuple[Hold, ...] = ()
    phase: str = ""
    about: tuple[tuple[str, str | int], ...] = ()
    by: object = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.seconds < inf:
            raise ValueError(f"event {self.name!r} takes {self.seconds} s, must be finite and not negative")


@dataclass(frozen=True, slots=True)
class Bubble:
    """The main stream stands still: event `waiting` (-1: the end of the step) waits for event `behind`."""

    begin: float
    end: float
    waiting: int
    behind: int


@dataclass(frozen=True)
class Memory:
    """One tier over time: from times[i] on, levels[i] bytes are held. The first entry is what is held before the step.

    `peak_at`: the instant of the peak; `peak_event`: the event that brings it about. `holders`: (tenant, bytes) at the
    peak, the largest first; they add up to it.
    """

    times: tuple[float, ...]
    levels: tuple[int, ...]
    peak_bytes: int
    peak_at: float
    peak_event: int
    holders: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A hold begins (`sign` 1) or ends (-1) at event `at`; what is there before the step begins at event -1."""

    seconds: float
    at: int
    hold: Hold
    sign: int
    span: int  # which of the spans: a hold's begin and its end have the same


@dataclass(frozen=True)
class Timeline:
    """What `play` saw.

    Per event: `starts`, `ends`, `cause` (the event whose end let it start; -1: none), and `exposed_of`, the seconds for
    which the main stream stood still because of it. `seconds`: the step. `busy_s`: seconds that each stream works.
    `bubbles`: where the main stream stands still.
    """

    events: tuple[Event, ...]
    main: str
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    cause: tuple[int, ...]
    exposed_of: tuple[float, ...]
    seconds: float
    busy_s: Mapping[str, float]
    bubbles: tuple[Bubble, ...]
    memory: Mapping[str, Memory]

    @property
    def idle_s(self) -> dict[str, float]:
        """Seconds of the step in which a stream does nothing."""
        return {stream: max(0.0, self.seconds - busy) for stream, busy in self.busy_s.items()}

    @property
    def utilisation(self) -> dict[str, float]:
        """The share of the step in which a stream works."""
        return {stream: busy / self.seconds if self.seconds else 0.0 for stream, busy in self.busy_s.items()}

    @cached_property
    def exposed_s(self) -> dict[str, float]:
        """Seconds for which the main stream waits for each other one; with those it works itself, the whole step."""
        total: dict[str, float] = dict.fromkeys((stream for stream in self.busy_s if stream != self.main), 0.0)
        for event, exposed in zip(self.events, self.exposed_of, strict=True):
            if exposed:
                total[event.stream] += exposed
        return total

    @cached_property
    def phases(self) -> tuple[tuple[str, float, float], ...]:
        """(phase, begin, end) of what the main stream does, one behind the other over the whole step.

        A wait between two phases counts to the earlier one, if it is for something of that phase; else to who waits.
        """
        found: list[tuple[str, float, float]] = []
        for number, event in enumerate(self.events):
            if event.stream != self.main:
                continue
            end, cause = self.ends[number], self.cause[number]
            if not found:
                found.append((event.phase, 0.0, end))
                continue
            phase, begin, until = found[-1]
            if phase == event.phase:
                found[-1] = (phase, begin, end)
                continue
            if cause >= 0 and self.events[cause].phase == phase:
                until = self.starts[number]
            found[-1] = (phase, begin, until)
            found.append((event.phase, until, end))
        if found:
            found[-1] = (*found[-1][:2], self.seconds)
        return tuple(found)

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds of each phase, waits included; together the step, if anything runs on the main stream."""
        total: dict[str, float] = defaultdict(float)
        for phase, begin, end in self.phases:
            total[phase] += end - begin
        return dict(total)


def play(events: Sequence[Event], main: str = COMPUTE) -> Timeline:
    """Run the events. `main`: the stream whose waiting counts as exposed. The same events give the same timeline.

    Raises ValueError where an event waits for one that does not stand before it in the list.
    """
    starts: list[float] = []
    ends: list[float] = []
    causes: list[int] = []
    latest: dict[str, int] = {}  # stream -> its last event so far
    busy_s: dict[str, float] = {}
    for number, event in enumerate(events):
        stream = event.stream
        cause = latest.get(stream, -1)
        start = ends[cause] if cause >= 0 else 0.0
        for other in event.after:
            if not 0 <= other < number:
                raise ValueError(
                    f"event {number} ({event.name!r}) waits for event {other}, which does not stand before it"
                )
            if ends[other] > start:
                start, cause = ends[other], other
        starts.append(start)
        ends.append(start + event.seconds)
        causes.append(cause)
        latest[stream] = number
        busy_s[stream] = busy_s.get(stream, 0.0) + event.seconds
    seconds = max(ends, default=0.0)
    exposed_of, bubbles = _waits(events, main, starts, ends, causes, seconds)
    return Timeline(
        tuple(events), main, tuple(starts), tuple(ends), tuple(causes), tuple(exposed_of), seconds, busy_s,
        tuple(bubbles), _memory(events, starts, ends, seconds),
    )  # fmt: skip


def _last(ends: Sequence[float]) -> int:
    """The event that ends last, the first of several; -1 if there is none."""
    return max(range(len(ends)), key=lambda number: (ends[number], -number), default=-1)


def _waits(
    events: Sequence[Event], main: str, starts: list[float], ends: list[float], causes: list[int], seconds: float
) -> tuple[list[float], list[Bubble]]:
    """Seconds of waiting that each event causes, and where the main stream waits.

    An event starts at the very instant at which its cause ends. So the causes, followed backwards from who waits, fill
    the whole wait without a gap, and each of them is to blame for the part of the wait in which it runs.
    """
    exposed_of = [0.0] * len(events)
    bubbles: list[Bubble] = []

    def blame(begin: float, end: float, waiting: int, behind: int) -> None:
        bubbles.append(Bubble(begin, end, waiting, behind))
        while behind >= 0 and ends[behind] > begin:
            exposed_of[behind] += ends[behind] - max(starts[behind], begin)
            behind = causes[behind]

    free = 0.0
    for number, event in enumerate(events):
        if event.stream == main:
            if starts[number] > free:
                blame(free, starts[number], number, causes[number])
            free = ends[number]
    if seconds > free:
        blame(free, seconds, -1, _last(ends))
    return exposed_of, bubbles


Key = tuple[float, int, int]  # instant, event, and: 0 at its start, 1 at its end, 2 just after


@dataclass(frozen=True, slots=True)
class _Span:
    """A hold in time: from the key `begin` until before the key `end`."""

    begin: Key
    end: Key
    hold: Hold


def _memory(events: Sequence[Event], starts: list[float], ends: list[float], seconds: float) -> dict[str, Memory]:
    spans, always = _spans(events, starts, ends, seconds)
    return {tier: _one_tier(spans[tier], always[tier]) for tier in sorted({*spans, *always})}


def changes(timeline: Timeline, tier: str) -> list[Change]:
    """Every change of what a tier holds, in the order in which `Memory` counts them; what is resident comes first."""
    spans, always = _spans(timeline.events, timeline.starts, timeline.ends, timeline.seconds)
    found = [(span.begin, span.hold.nbytes, number, span.hold, 1) for number, span in enumerate(spans[tier])]
    found += [(span.end, -span.hold.nbytes, number, span.hold, -1) for number, span in enumerate(spans[tier])]
    found.sort(key=lambda one: one[:3])
    resident = [Change(0.0, -1, hold, 1, -1 - number) for number, hold in enumerate(always[tier])]
    return resident + [Change(key[0], key[1], hold, sign, number) for key, _, number, hold, sign in found]


def _spans(
    events: Sequence[Event], starts: Sequence[float], ends: Sequence[float], seconds: float
) -> tuple[dict[str, list[_Span]], dict[str, list[Hold]]]:
    """Tier -> what it holds for a time, and throughout the step."""
    spans: dict[str, list[_Span]] = defaultdict(list)
    always: dict[str, list[Hold]] = defaultdict(list)
    for number, event in enumerate(events):
        for hold in event.holds:
            if hold.resident:
                always[hold.tier].append(hold)
                continue
            since = hold.since
            if since is None:
                begin = (starts[number], number, 0)
            elif 0 <= since <= number:
                begin = (ends[since], since, 2)
            else:
                raise ValueError(
                    f"event {number} ({event.name!r}): {hold.tenant} is held since event {since}, which comes later"
                )
            if hold.until is None:
                end = (seconds, len(events), 1)
            else:
                last = number
                for other in hold.until:
                    if ends[other] > ends[last] or (ends[other] == ends[last] and other > last):
                        last = other
                end = (ends[last], last, 1)
            if begin < end:
                spans[hold.tier].append(_Span(begin, end, hold))
    return spans, always


def _one_tier(spans: list[_Span], always: list[Hold]) -> Memory:
    changes = [(span.begin, span.hold.nbytes) for span in spans]
    changes += [(span.end, -span.hold.nbytes) for span in spans]
    changes.sort()
    level = sum(hold.nbytes for hold in always)
    peak: int = level
    peak_key: Key = (0.0, -1, 0)
    times, levels = [0.0], [level]
    for key, delta in changes:
        level += delta
        if level > peak:
            peak, peak_key = level, key
        times.append(key[0])
        levels.append(level)
    held: dict[str, int] = defaultdict(int)
    for hold in always:
        held[hold.tenant] += hold.nbytes
    for span in spans:
        if span.begin <= peak_key < span.end:
            held[span.hold.tenant] += span.hold.nbytes
    holders = sorted(
        ((tenant, nbytes) for tenant, nbytes in held.items() if nbytes), key=lambda item: (-item[1], item[0])
    )
    return Memory(tuple(times), tuple(levels), peak, peak_key[0], max(0, peak_key[1]), tuple(holders))
