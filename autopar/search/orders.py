"""Which schedules a pipeline may have, and how many stages they put on each rank."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.mesh import Mesh
from autopar.ir.words import count_of
from autopar.pipeline import make_schedule
from autopar.pipeline.generate import recipe_of
from autopar.search.micro_batches import AUTO

PIPE = "pipe"  # the axis of stages
WHOLE = ("1f1b", "gpipe", "interleaved")  # schedules, in the order of preference
IN_HALVES = ("zb-h1", "zb-h2", "zb-v", "interleaved-zb")  # backward in two: of inputs, and of weights
SCHEDULES = (*WHOLE, *IN_HALVES)
CHUNKS = (1, 2, 3, 4)  # stages per rank that are tried where nobody says

Orders = Sequence[tuple[int, tuple[str, ...]]]  # (stages per rank, schedules that can be played of one cut)


def orders_of(schedule: str, ranks: int, micro_batches: int, stages_per_rank: int | None) -> Orders:
    """What is tried, in that order. Raises ValueError, with a sentence that says what to give, where nothing is left.
    `stages_per_rank`: None for what the schedules allow.
    """
    if stages_per_rank is not None and stages_per_rank < 1:
        raise ValueError(f"{stages_per_rank} stages per rank are too few; give 1 or more")
    names = SCHEDULES if schedule == AUTO else (schedule,)
    found: list[tuple[int, tuple[str, ...]]] = []
    for chunks in CHUNKS if stages_per_rank is None else (stages_per_rank,):
        for group in (WHOLE, IN_HALVES):
            fits = tuple(one for one in group if one in names and _can(one, ranks, micro_batches, chunks))
            if fits:
                found.append((chunks, fits))
    if found:
        return found
    if schedule == AUTO:
        raise ValueError(
            f"no schedule has {count_of(stages_per_rank or 1, 'stage')} on each of {count_of(ranks, 'rank')} and "
            f"{count_of(micro_batches, 'micro-batch', 'micro-batches')}; interleaved has several where the "
            "micro-batches are a multiple of the ranks"
        )
    if stages_per_rank is not None and (recipe := recipe_of(schedule)).fixed and recipe.chunks != stages_per_rank:
        others = [one for one in SCHEDULES if _can(one, ranks, ranks, stages_per_rank)]
        raise ValueError(
            f"{schedule} has {count_of(recipe.chunks, 'stage')} on each rank, and {stages_per_rank} are asked for; "
            f"take one of {', '.join(others)} for that"
        )
    make_schedule(schedule, ranks, micro_batches, stages_per_rank)  # which says why not
    raise AssertionError(schedule)


def can_be_ordered(schedule: str, ranks: int, micro_batches: int, stages_per_rank: int | None) -> bool:
    """Whether there is one."""
    try:
        return bool(orders_of(schedule, ranks, micro_batches, stages_per_rank))
    except ValueError:
        return False


def _can(name: str, ranks: int, micro_batches: int, chunks: int) -> bool:
    recipe = recipe_of(name)
    return (chunks == recipe.chunks if recipe.fixed else chunks > 1) and not (recipe.grouped and micro_batches % ranks)


def ranks_of(mesh: Mesh) -> int:
    """Ranks along the axis of stages. Raises ValueError where that is not the first."""
    if mesh.names[0] != PIPE:
        raise ValueError(f"mesh {mesh}: stages lie farthest apart, so that {PIPE} has to be its first axis")
    return mesh.sizes[0]


def within_stage(mesh: Mesh) -> Mesh:
    """The mesh of one stage."""
    return Mesh(mesh.names[1:] or ("data",), mesh.sizes[1:] or (1,))
