"""Who holds what, as holds of a step's events: the instants of `Referee.holdings`, told in events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import ceil, floor

from autopar.assemble import DEVICE, HOST
from autopar.decide import ROW, Holding
from autopar.graph import Ref
from autopar.liveness import Liveness, Read
from cost_models.simulator import Hold

# There before the step, and after it.
RESIDENT = ("parameter ", "buffer ", "constant ", "optimizer states of ", "count of updates of ", "coordinates")


@dataclass(frozen=True, slots=True)
class Way:
    """One layout change: its first event, its last, and the one since whose end it holds anything (None: since
    its first begins).
    """

    first: int
    last: int
    since: int | None


@dataclass(slots=True)
class Marks:
    """What the events of a step say of the instants of `liveness`.

    `begins`, `closes`: the first event of an instant, and the one at whose end it is over. `ways`: the events of a
    sequence of layout changes, of each that has any, by its place.
    `readers[value]`: un-waited events that read its storage; `latest[value]`: the last event of its readers so far,
    without the one that holds it by itself.
    `issued[node]`: the event of a store or fetch, and the one since whose end it holds what it makes.
    """

    begins: dict[int, int] = field(default_factory=dict[int, int])
    closes: dict[int, int] = field(default_factory=dict[int, int])
    ways: dict[Read | int, Mapping[int, Way]] = field(default_factory=dict[Read | int, Mapping[int, Way]])
    readers: dict[Ref, list[int]] = field(default_factory=lambda: defaultdict(list))
    latest: dict[Ref, int] = field(default_factory=dict[Ref, int])
    issued: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def mark(self, instant: int, first: int, last: int) -> None:
        """The instant has the events from `first` to `last`; none if there are none."""
        if first <= last:
            self.begins[instant], self.closes[instant] = first, last


def holds_of(holdings: Collection[Holding], live: Liveness, marks: Marks, *, overlap: bool) -> Mapping[int, list[Hold]]:
    """Event -> its holds. An instant without events of its own is one with those that follow, and those before it.

    With overlap a layout change holds memory from where it was issued, and what it reads until it has been waited for.
    """
    begins, closes = _filled(marks, live.instants)
    events: dict[str, list[tuple[int, int]]] = defaultdict(list)  # node -> (result, event of a reader)
    for ref, numbers in marks.readers.items():
        events[ref.name] += [(ref.index, number) for number in numbers]
    for ref, number in marks.latest.items():
        events[ref.name].append((ref.index, number))
    found: dict[int, list[Hold]] = defaultdict(list)
    for held in holdings:
        start, end = floor(held.start), ceil(held.end)
        event, since, until = begins[start], None, [closes[end - 1]]
        if overlap and held.tenant == ROW:
            continue
        if overlap and held.read in marks.ways:
            ways = marks.ways[held.read]
            if held.part is not None:
                if held.part not in ways:
                    continue  # among one rank: what it makes is what it starts from
                way = ways[held.part]
                event, since, until = way.first, way.since, [way.last]
            elif held.tier == HOST:
                event = ways[min(ways)].first
            else:
                event = since = ways[max(ways)].last
        elif overlap and held.node in marks.issued and held.start == live.at[held.node] and held.tier == DEVICE:
            event, since = marks.issued[held.node]
        elif overlap and held.taken_over and start:  # what the reader waits for in between has no instant
            event = since = closes[start - 1]
        elif not overlap and until[0] < event:
            continue
        if overlap and held.node:
            until += [number for index, number in events[held.node] if held.index in (None, index)]
        last_of = None if end == live.instants else tuple(dict.fromkeys(until))
        resident = held.tenant.startswith(RESIDENT)
        found[event].append(Hold(held.tenant, held.nbytes, held.tier, since, last_of, resident))
    return found


def _filled(marks: Marks, instants: int) -> tuple[list[int], list[int]]:
    begins, closes = [0] * instants, [0] * instants
    following = max(marks.begins.values(), default=0)
    for instant in reversed(range(instants)):
        begins[instant] = following = marks.begins.get(instant, following)
    before = 0
    for instant in range(instants):
        closes[instant] = before = marks.closes.get(instant, before)
    return begins, closes
