"""What PyTorch's caching allocator reserves for a step's holds.

After c10/cuda/CUDACachingAllocator.cpp (torch 2.13). A request is rounded to 512 bytes and put into the smallest free
block of its stream and size class that is large enough; free neighbours become one block. Requests of at most 1 MiB are
a class of their own. Nothing is given back: what is reserved is what was ever taken from the driver. Where no block is
large enough, that is

    by default      a new segment: of 2 MiB for a small request, 20 MiB for one below 10 MiB, else as large as the
                    request, rounded to 2 MiB. What is left of a block becomes a block of its own if it is larger than
                    1 MiB (of a small one: 512 bytes); a smaller rest is wasted. Blocks of two segments stay two
    expandable      (`expandable_segments:True`, which torchtitan's scripts set: run_llama_train.sh, run_train.sh) more
                    pages of 20 MiB, or 2 MiB, at the end of the class's one segment, whose last block counts as the
                    largest of all

A real allocator that is refused memory gives back segments that are wholly free and asks again, which stops the device.
A plan is to hold without that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from cost_models.simulator import Event, Hold

ROUND, SMALL, SMALL_PAGE, PAGE = 512, 1 << 20, 2 << 20, 20 << 20
LARGE, ROUND_LARGE = 10 << 20, 2 << 20  # from here on a request has a segment of its own size


@dataclass(slots=True)
class Segment:
    """Free blocks (address -> bytes), none of which touch, below `end`, the first address never used."""

    page: int
    free: dict[int, int] = field(default_factory=dict[int, int])
    end: int = 0
    mapped: int = 0

    def allocate(self, nbytes: int) -> int:
        """The address of a new block."""
        fitting = [(size, at) for at, size in self.free.items() if size >= nbytes and at + size < self.end]
        if fitting:
            size, at = min(fitting)
        else:
            at = next((at for at, size in self.free.items() if at + size == self.end), self.end)
            size = max(self.free.get(at, 0), nbytes)
            self.end = max(self.end, at + nbytes)
            self.mapped = max(self.mapped, -(-self.end // self.page) * self.page)
        self.free.pop(at, None)
        if size > nbytes:
            self.free[at + nbytes] = size - nbytes
        return at

    def release(self, at: int, nbytes: int) -> None:
        before = next((one for one, size in self.free.items() if one + size == at), None)
        if before is not None:
            nbytes += self.free.pop(before)
            at = before
        nbytes += self.free.pop(at + nbytes, 0)
        self.free[at] = nbytes


@dataclass(slots=True)
class Segments:
    """Segments that do not grow, by number. `free`: (segment, place in it) -> bytes; `ends`: (segment, place behind a
    free block) -> where it begins; `taken`: block -> its bytes, which may be more than were asked for.
    """

    is_small: bool
    free: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    ends: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    taken: dict[int, tuple[int, int, int]] = field(default_factory=dict[int, tuple[int, int, int]])
    mapped: int = 0
    numbers: count[int] = field(default_factory=count)
    blocks: count[int] = field(default_factory=count)

    def allocate(self, nbytes: int) -> int:
        """The number of a new block."""
        fitting = [(size, at) for at, size in self.free.items() if size >= nbytes]
        if fitting:
            size, (segment, place) = min(fitting)
            self._take(segment, place)
        else:
            segment, place, size = next(self.numbers), 0, self._segment_bytes(nbytes)
            self.mapped += size
        rest = size - nbytes
        if rest >= ROUND if self.is_small else rest > SMALL:
            self._give(segment, place + nbytes, rest)
            size = nbytes
        block = next(self.blocks)
        self.taken[block] = segment, place, size
        return block

    def release(self, at: int, nbytes: int) -> None:
        segment, place, size = self.taken.pop(at)
        if (begin := self.ends.get((segment, place))) is not None:
            size += self._take(segment, begin)
            place = begin
        if (segment, place + size) in self.free:
            size += self._take(segment, place + size)
        self._give(segment, place, size)

    def _segment_bytes(self, nbytes: int) -> int:
        if self.is_small:
            return SMALL_PAGE
        return PAGE if nbytes < LARGE else -(-nbytes // ROUND_LARGE) * ROUND_LARGE

    def _take(self, segment: int, place: int) -> int:
        size = self.free.pop((segment, place))
        del self.ends[segment, place + size]
        return size

    def _give(self, segment: int, place: int, size: int) -> None:
        self.free[segment, place], self.ends[segment, place + size] = size, place


Class = Segment | Segments


@dataclass(slots=True)
class Stream:
    """What one stream has reserved."""

    large: Class
    small: Class

    @staticmethod
    def of(expandable: bool) -> Stream:
        return Stream(Segment(PAGE), Segment(SMALL_PAGE)) if expandable else Stream(Segments(False), Segments(True))

    def allocate(self, nbytes: int) -> tuple[Class, int, int]:
        """Class, address and bytes of a new block."""
        nbytes = -(-nbytes // ROUND) * ROUND
        segment = self.small if nbytes <= SMALL else self.large
        return segment, segment.allocate(nbytes), nbytes

    @property
    def reserved(self) -> int:
        return self.large.mapped + self.small.mapped


def reserved_by(
    events: Sequence[Event],
    steps: int = 3,
    *,
    expandable: bool = False,
    beside: Mapping[str, Sequence[int]] | None = None,
) -> Mapping[str, int]:
    """Bytes by stream (the holds' tier) after so many steps of these events.

    Holds come and go in the order in which the program issues its events, whatever the streams do by then: that is when
    Python asks for memory and lets go of it. `beside`: blocks of a stream that nobody gives back, as workspaces are.
    """
    streams: dict[str, Stream] = defaultdict(lambda: Stream.of(expandable))
    kept: list[Hold] = [hold for event in events for hold in event.holds if hold.resident and hold.nbytes]
    for hold in kept:
        if not hold.at_first_update:
            streams[hold.tier].allocate(hold.nbytes)
    for tier, blocks in (beside or {}).items():
        for nbytes in blocks:
            streams[tier].allocate(nbytes)
    before, behind = _asked(events)
    for step in range(steps):
        ends: dict[int, list[tuple[Class, int, int]]] = defaultdict(list)

        for number in range(len(events)):
            for last, hold in before[number]:
                ends[last].append(streams[hold.tier].allocate(hold.nbytes))
            if step == 0 and number == len(events) - 1:
                for hold in kept:
                    if hold.at_first_update:
                        streams[hold.tier].allocate(hold.nbytes)
            for segment, at, nbytes in ends.pop(number, ()):
                segment.release(at, nbytes)
            for last, hold in behind[number]:
                ends[last].append(streams[hold.tier].allocate(hold.nbytes))
        for left in ends.values():
            for segment, at, nbytes in left:
                segment.release(at, nbytes)
    return {tier: stream.reserved for tier, stream in streams.items()}


def _asked(events: Sequence[Event]) -> tuple[list[list[tuple[int, Hold]]], list[list[tuple[int, Hold]]]]:
    """What is asked for as each event begins, and once it has let go of what ends with it: (last event, hold)."""
    before: list[list[tuple[int, Hold]]] = [[] for _ in events]
    behind: list[list[tuple[int, Hold]]] = [[] for _ in events]
    for number, event in enumerate(events):
        for hold in event.holds:
            if hold.resident or not hold.nbytes:  # of no bytes the allocator makes no block
                continue
            last = len(events) - 1 if hold.until is None else max((number, *hold.until))
            if hold.since is None:
                before[number].append((last, hold))
            elif last > hold.since:
                behind[hold.since].append((last, hold))
            else:  # of no length: it comes and goes as its event ends
                before[number].append((last, hold))
    return before, behind
