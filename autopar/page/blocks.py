"""What is drawn of a timeline: blocks on streams, in as many as a page can bear.

An event is a block of its own, unless it is narrower than the grain: then it is put together with the events that
follow it within one grain. A block is as wide as its events take together, so that what is drawn of a stream adds up to
the seconds for which it works; it begins where the first of them does, and no event stands a grain from its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autopar.lower.program import Inner, Local, Operator, Run, Update
from autopar.plan.value import PlanValue, is_product
from autopar.price.reshard import Work
from cost_models.simulator import COMPUTE, Event, Timeline

PRODUCTS, OTHERS, REORDER, OPTIMIZER = "products, attention", "other operators", "layout changes", "optimizer"
COLLECTIVES, COPIES, HOST = "collectives", "copies to and from the host", "updates on the host"
WAITING = "exposed"  # compute waits, and what it waits for
MOST_BLOCKS = 5000  # of a page
FINEST = 2**15  # grains in a step, where few blocks are needed


@dataclass(frozen=True, slots=True)
class Piece:
    """`seconds` from `begin` on, of some sort, of which a reader is told."""

    begin: float
    seconds: float
    sort: str
    told: str


@dataclass(frozen=True, slots=True)
class Block:
    """Pieces drawn as one; `sort` and `told` are those of the longest of them."""

    begin: float
    seconds: float
    sort: str
    told: str
    count: int = 1


@dataclass(frozen=True)
class Blocks:
    """Of each stream its blocks, main stream first; `waits`: where the main stream stands still; `exposed`: by other
    stream, what it waits for meanwhile. `grain`: seconds, 0 where every event is a block.
    """

    streams: dict[str, tuple[Block, ...]]
    waits: tuple[Block, ...]
    exposed: dict[str, tuple[Block, ...]]
    grain: float


def blocks_of(timeline: Timeline, plan: PlanValue, most: int = MOST_BLOCKS) -> Blocks:
    """At most so many blocks in all, by the finest grain that allows it."""
    pieces = _pieces(timeline, plan)
    waits, exposed = _waits(timeline)
    grain, grains = 0.0, FINEST
    while True:
        found = Blocks(
            {stream: merged(ones, grain) for stream, ones in pieces.items()}, merged(waits, grain),
            {stream: merged(ones, grain) for stream, ones in exposed.items()}, grain,
        )  # fmt: skip
        every = (*found.streams.values(), found.waits, *found.exposed.values())
        if sum(map(len, every)) <= most or grains < 2:
            return found
        grain, grains = timeline.seconds / grains, grains // 2


def merged(pieces: Iterable[Piece], grain: float) -> tuple[Block, ...]:
    """Pieces in the order of time, put together where they lie within one grain."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        if groups and piece.begin + piece.seconds - groups[-1][0].begin <= grain:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return tuple(map(_block, groups))


def _block(pieces: Sequence[Piece]) -> Block:
    longest = max(pieces, key=lambda piece: piece.seconds)
    return Block(pieces[0].begin, sum(p.seconds for p in pieces), longest.sort, longest.told, len(pieces))


def _pieces(timeline: Timeline, plan: PlanValue) -> dict[str, list[Piece]]:
    sort_of = _sorts(plan)
    found: dict[str, list[Piece]] = {
        stream: [] for stream in sorted(timeline.busy_s, key=lambda name: (name != timeline.main, name))
    }
    for event, start in zip(timeline.events, timeline.starts, strict=True):
        if event.seconds:
            found[event.stream].append(Piece(start, event.seconds, sort_of(event), told(event)))
    return {stream: pieces for stream, pieces in found.items() if pieces or stream == timeline.main}


def _sorts(plan: PlanValue) -> Callable[[Event], str]:
    products = {name for name, choice in plan.choices.items() if is_product(choice)}

    def sort_of(event: Event) -> str:
        if event.stream != COMPUTE:
            return COLLECTIVES if event.stream.startswith("comm:") else HOST if event.stream == "host" else COPIES
        match event.by:
            case Run(what=Operator(node) | Inner(node)):
                return PRODUCTS if node in products else OTHERS
            case Run(what=Update() | Local(Work.ADD_UP)):
                return OPTIMIZER
            case Run(what=Local()):
                return REORDER
            case _:
                return OTHERS

    return sort_of


def told(event: Event) -> str:
    """Its name, and the module that it belongs to."""
    about = dict(event.about)
    where = about.get("module") or about.get("target") or ""
    return f"{event.name} ({where})" if where and str(where) not in event.name else event.name


def _waits(timeline: Timeline) -> tuple[list[Piece], dict[str, list[Piece]]]:
    """Where the main stream stands still, and by stream what it waits for: the causes of the wait, backwards, fill it
    without a gap (`cost_models.simulator`).
    """
    waits: list[Piece] = []
    exposed: dict[str, list[Piece]] = defaultdict(list)
    for bubble in timeline.bubbles:
        behind = bubble.behind
        name = timeline.events[behind].name if behind >= 0 else ""
        waits.append(Piece(bubble.begin, bubble.end - bubble.begin, WAITING, f"compute waits for {name}"))
        while behind >= 0 and timeline.ends[behind] > bubble.begin:
            event, begin = timeline.events[behind], max(timeline.starts[behind], bubble.begin)
            if timeline.ends[behind] > begin:
                piece = Piece(begin, timeline.ends[behind] - begin, WAITING, f"compute waits for {event.name}")
                exposed[event.stream].append(piece)
            behind = timeline.cause[behind]
    return waits, {stream: sorted(ones, key=lambda one: one.begin) for stream, ones in sorted(exposed.items())}
