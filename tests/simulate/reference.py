"""A second simulator, slow and obviously right: it advances a clock by one second and looks at every stream each time.

Durations are whole seconds. And random schedules for both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from cost_models.simulator import COMPUTE, Event, Hold

STREAMS = (COMPUTE, "comm:data", "comm:tensor", "h2d")


@dataclass
class Watched:
    """`held[t]`: tier -> bytes held between t and t + 1. `main_idle`: seconds in which the main stream stood still."""

    starts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    held: list[dict[str, int]] = field(default_factory=list)
    main_idle: int = 0

    @property
    def seconds(self) -> int:
        return len(self.held)


def watch(events: Sequence[Event]) -> Watched:
    seen = Watched()
    queues = {stream: [n for n, e in enumerate(events) if e.stream == stream] for stream in {e.stream for e in events}}
    clock = 0
    while True:
        moving = True
        while moving:  # an event that takes no time may set others free at once
            moving = False
            for queue in queues.values():
                if not queue:
                    continue
                head = queue[0]
                if head not in seen.starts and all(
                    seen.ends.get(other, clock + 1) <= clock for other in events[head].after
                ):
                    seen.starts[head], moving = clock, True
                if head in seen.starts and seen.starts[head] + events[head].seconds == clock:
                    seen.ends[head], moving = clock, True
                    queue.pop(0)
        if not any(queues.values()):
            break
        running = {events[queue[0]].stream for queue in queues.values() if queue and queue[0] in seen.starts}
        seen.main_idle += COMPUTE not in running
        clock += 1
        seen.held.append({})
    for second, level in enumerate(seen.held):
        for number, event in enumerate(events):
            for hold in event.holds:
                if hold.resident or _is_held(hold, number, second, seen):
                    level[hold.tier] = level.get(hold.tier, 0) + hold.nbytes
    return seen


def _is_held(hold: Hold, number: int, second: int, seen: Watched) -> bool:
    begin = seen.starts[number] if hold.since is None else seen.ends[hold.since]
    end = seen.seconds if hold.until is None else max(seen.ends[reader] for reader in (number, *hold.until))
    return begin <= second < end


def random_events(seed: int, *, least: int = 0, most: int = 25, streams: Sequence[str] = STREAMS) -> list[Event]:
    rng = random.Random(seed)
    count = rng.randint(1, most)
    phases = sorted(
        rng.choices(["forward", "backward", "optimizer"], k=count), key=["forward", "backward", "optimizer"].index
    )
    events: list[Event] = []
    for number in range(count):
        after = tuple(sorted(rng.sample(range(number), min(number, rng.choice([0, 0, 1, 1, 2, 3])))))
        holds = tuple(_random_hold(rng, number, count) for _ in range(rng.choice([0, 1, 1, 2])))
        events.append(
            Event(f"event {number}", rng.choice(streams), rng.randint(least, 6), after, holds, phases[number])
        )
    return events


def _random_hold(rng: random.Random, number: int, count: int) -> Hold:
    tier, nbytes = rng.choice(["hbm", "hbm", "host"]), rng.randint(1, 100)
    name = f"tenant {rng.randint(0, 5)}"
    match rng.randint(0, 4):
        case 0:
            return Hold(name, nbytes, tier, resident=True)
        case 1:
            return Hold(name, nbytes, tier, until=None)
        case 2 if number:
            return Hold(name, nbytes, tier, since=rng.randrange(number), until=(number,))
        case _:
            return Hold(name, nbytes, tier, until=tuple(rng.sample(range(count), min(count, rng.randint(0, 3)))))
