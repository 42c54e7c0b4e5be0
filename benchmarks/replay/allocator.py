"""What PyTorch's caching allocator reserves for a step's holds, with `expandable_segments:True`, which torchtitan's
scripts set (run_llama_train.sh, run_train.sh).

After c10/cuda/CUDACachingAllocator.cpp. A stream has one segment that grows. A request is rounded to 512 bytes and put
into the smallest free block that is large enough; the block at the end of the segment counts as the largest of all,
and the segment grows by pages of 20 MiB where it is too small. Free neighbours become one block, and nothing is given
back: what is reserved is how far the segment has grown. Requests of at most 1 MiB have a segment of their own, with
pages of 2 MiB.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cost_models.simulator import Event, Hold

ROUND, SMALL, SMALL_PAGE, PAGE = 512, 1 << 20, 2 << 20, 20 << 20
AT_FIRST_UPDATE = ("optimizer states of ", "count of updates of ")  # torch.optim makes them in the first step


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
class Stream:
    """What one stream has reserved."""

    large: Segment = field(default_factory=lambda: Segment(PAGE))
    small: Segment = field(default_factory=lambda: Segment(SMALL_PAGE))

    def allocate(self, nbytes: int) -> tuple[Segment, int, int]:
        """Segment, address and bytes of a new block."""
        nbytes = -(-nbytes // ROUND) * ROUND
        segment = self.small if nbytes <= SMALL else self.large
        return segment, segment.allocate(nbytes), nbytes

    @property
    def reserved(self) -> int:
        return self.large.mapped + self.small.mapped


def reserved_by(events: Sequence[Event], steps: int = 3) -> Mapping[str, int]:
    """Bytes by stream (the holds' tier) after so many steps of these events.

    Holds come and go in the order in which the program issues its events, whatever the streams do by then: that is when
    Python asks for memory and lets go of it.
    """
    streams: dict[str, Stream] = defaultdict(Stream)
    kept: list[Hold] = [hold for event in events for hold in event.holds if hold.resident]
    for hold in kept:
        if not hold.tenant.startswith(AT_FIRST_UPDATE):
            streams[hold.tier].allocate(hold.nbytes)
    for step in range(steps):
        ends: dict[int, list[tuple[Segment, int, int]]] = defaultdict(list)
        for number, event in enumerate(events):
            for hold in event.holds:
                if not hold.resident:
                    last = len(events) - 1 if hold.until is None else max((number, *hold.until))
                    ends[last].append(streams[hold.tier].allocate(hold.nbytes))
            if step == 0 and number == len(events) - 1:
                for hold in kept:
                    if hold.tenant.startswith(AT_FIRST_UPDATE):
                        streams[hold.tier].allocate(hold.nbytes)
            for segment, at, nbytes in ends.pop(number, ()):
                segment.release(at, nbytes)
    return {tier: stream.reserved for tier, stream in streams.items()}
