"""The schedules that users know by name, as lists of computing that `with_messages` completes.

P ranks, r from 0; M micro-batches; V stages per rank. Stages of a rank are looped (r, r + P, r + 2P, ...) or, where
V = 2, laid as a V (r, 2P - 1 - r). Micro-batches ascend for each stage and kind, so that gradients add up in the order
in which one rank would add them.

    gpipe               all forwards, then all backwards (Huang et al., arXiv 1811.06965)
    1f1b                PipeDream-Flush (Narayanan et al., arXiv 2006.09503)
    interleaved    Narayanan et al., arXiv 2104.04473, section 2.2
    looped-bfs          breadth first: all micro-batches of a stage, then the rank's next one (Lamy-Poirier, arXiv
                        2211.05953); backwards ascend here, in torch.distributed.pipelining they descend
    zb-h1, zb-h2, zb-v  Qi et al., arXiv 2401.10241, sections 2 and 6, and arXiv 2405.15362; of ZB-V the handcrafted
                        order for F = I = W, which torch.distributed.pipelining has, too
    interleaved-zb      zb-h1 over looped stages, as torch.distributed.pipelining has it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from autopar.pipeline.messages import with_messages
from autopar.pipeline.schedule import Action, Kind, Schedule

Rows = Iterator[Action]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one schedule is made.

    row       (P, r, M, V) -> what rank r computes, in order
    chunks    V where the user gives none
    fixed     no other V is possible
    grouped   M has to be a multiple of P
    vee       stages lie as a V, not looped
    """

    row: Callable[[int, int, int, int], Rows]
    chunks: int = 1
    fixed: bool = True
    grouped: bool = False
    vee: bool = False


def make_schedule(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule of that name, with its messages.

    `chunks`: stages per rank, where the schedule leaves that open; 2 without. Raises ValueError for an unknown name,
    for numbers below 1, for chunks that the schedule cannot have, and for micro-batches that do not go into groups of
    the ranks where it needs such groups.
    """
    recipe = recipe_of(name)
    for what, number in (("ranks", ranks), ("micro-batches", micro_batches)):
        if number < 1:
            raise ValueError(f"{name} over {number} {what}; at least 1 is needed")
    chunks = recipe.chunks if chunks is None else chunks
    if recipe.fixed and chunks != recipe.chunks:
        raise ValueError(
            f"{name} has {recipe.chunks} stage{'s' * (recipe.chunks > 1)} on each rank, and {chunks} are asked for; "
            f"take one of {', '.join(one for one, other in SCHEDULES.items() if not other.fixed)} for that"
        )
    if not recipe.fixed and chunks < 2:
        raise ValueError(f"{name} has several stages on each rank, and {chunks} is asked for; give 2 or more")
    if recipe.grouped and micro_batches % ranks:
        below, above = micro_batches // ranks * ranks, -(-micro_batches // ranks) * ranks
        raise ValueError(
            f"{name} runs micro-batches in groups of its {ranks} ranks, and {micro_batches} is no multiple of {ranks}; "
            f"give {f'{below} or ' if below else ''}{above}, or take 1f1b or zb-h1"
        )
    rank_of = placed(name, ranks, chunks)
    rows = [[*recipe.row(ranks, rank, micro_batches, chunks)] for rank in range(ranks)]
    return with_messages(name, micro_batches, rank_of, rows)


def placed(name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each stage, of so many per rank."""
    if recipe_of(name).vee:
        return (*range(ranks), *reversed(range(ranks)))
    return (*range(ranks),) * chunks


def recipe_of(name: str) -> Recipe:
    """How the schedule of that name is made. Raises ValueError with the nearest name."""
    if name not in SCHEDULES:
        near = get_close_matches(name.lower().replace("_", "-").replace(" ", "-"), SCHEDULES, 1, 0.0)
        raise ValueError(f"no schedule {name!r}; did you mean {near[0]}? There are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


# --- rows ------------------------------------------------------------------------------------------------------------


def _breadth_first(ranks: int, rank: int, micro_batches: int, chunks: int) -> Rows:
    """All forwards of a stage, then of the rank's next; backwards of the stages from the last."""
    stages = range(rank, ranks * chunks, ranks)
    yield from (Action("F", stage, number) for stage in stages for number in range(micro_batches))
    yield from (Action("B", stage, number) for stage in reversed(stages) for number in range(micro_batches))


def _in_turns(hop: int, split: bool) -> Callable[[int, int, int, int], Rows]:
    """Forwards until the first backward can run, then one forward, one backward, then backwards.

    The first backward is `hop` forwards later on each rank towards the first: 1, or 2 as interleaved 1F1B has it. With
    `split`, a backward is I, and rank r keeps the W of r of them back, so that it has them when forwards run out.
    """

    def row(ranks: int, rank: int, micro_batches: int, chunks: int) -> Rows:
        count = micro_batches * chunks
        ahead = min(count, (chunks - 1) * ranks + hop * (ranks - 1 - rank))

        def at(kind: Kind, k: int) -> Action:
            """The k-th of a kind: each stage in turn takes a group of P micro-batches, backwards from the last."""
            turn = k // ranks % chunks
            chunk = turn if kind == "F" else chunks - 1 - turn
            return Action(kind, chunk * ranks + rank, k // (ranks * chunks) * ranks + k % ranks)

        yield from (at("F", k) for k in range(ahead))
        for k in range(count):
            if ahead + k < count:
                yield at("F", ahead + k)
            yield at("I" if split else "B", k)
            if split and k >= rank:
                yield at("W", k - rank)
        if split:
            yield from (at("W", k) for k in range(max(0, count - rank), count))

    return row


def _zb_h2(ranks: int, rank: int, micro_batches: int, chunks: int) -> Rows:
    """Forwards until the first rank has none to wait for, then I and the next forward, W as late as its rank allows."""
    del chunks
    ahead, late = min(micro_batches, 2 * (ranks - rank) - 1), 2 * rank
    yield from (Action("F", rank, k) for k in range(ahead))
    for k in range(micro_batches):
        yield Action("I", rank, k)
        if ahead + k < micro_batches:
            yield Action("F", rank, ahead + k)
        if k >= late:
            yield Action("W", rank, k - late)
    yield from (Action("W", rank, k) for k in range(max(0, micro_batches - late), micro_batches))


def _zb_v(ranks: int, rank: int, micro_batches: int, chunks: int) -> Rows:
    """The order for at least 2P - 1 micro-batches, less those that there are not."""
    counted: dict[tuple[Kind, int], int] = {}
    for kind, down in _zb_v_kinds(ranks, rank, max(micro_batches, chunks * ranks - 1)):
        stage = rank if down else chunks * ranks - 1 - rank
        number = counted.get((kind, stage), 0)
        counted[kind, stage] = number + 1
        if number < micro_batches:
            yield Action(kind, stage, number)


def _zb_v_kinds(ranks: int, rank: int, micro_batches: int) -> Iterator[tuple[Kind, bool]]:
    """(kind, whether it is of the stage on the way down) of rank `rank`, in order; micro-batches ascend in each."""
    left = ranks - rank
    down: list[tuple[Kind, bool]] = [("F", True), ("I", True), ("W", True)]
    up: list[tuple[Kind, bool]] = [("F", False), ("I", False), ("W", False)]
    yield from [down[0]] * (2 * left - 1)
    yield from [up[0], down[0]] * rank
    yield from up * left
    forwards = micro_batches - (2 * left - 1 + rank)
    for k in range(micro_batches - ranks):
        yield from down[k >= forwards :]
        yield from up
    yield from [down[1], up[1]] * rank
    yield from down[1:] * left
    yield from [up[2]] * rank
    yield from [down[2]] * rank


SCHEDULES: Mapping[str, Recipe] = MappingProxyType(
    {
        "gpipe": Recipe(_breadth_first),
        "1f1b": Recipe(_in_turns(1, split=False)),
        "interleaved": Recipe(_in_turns(2, split=False), chunks=2, fixed=False, grouped=True),
        "looped-bfs": Recipe(_breadth_first, chunks=2, fixed=False),
        "zb-h1": Recipe(_in_turns(1, split=True)),
        "zb-h2": Recipe(_zb_h2),
        "interleaved-zb": Recipe(_in_turns(1, split=True), chunks=2, fixed=False, grouped=True),
        "zb-v": Recipe(_zb_v, chunks=2, vee=True),
    }
)
