"""The search for a chunk size: every chunk is equally large, and parameters are packed in the order of first use.

    base       32 MiB, doubled until it holds the largest parameter
    most       3 base
    k          2^24 // (2 next_power_of_2(parameters))       how many sizes are tried
    interval   max(1024 bytes, (most - base) // k)
    blocks     room // size - (2 if overlap)
    cost       move_count(chunks of each step, min(blocks, chunks)) size

The least cost wins; of equals, the smallest size. Elixir, arXiv 2212.05339. Its own loop never ends where the two
blocks kept for overlap leave none; here every loop goes up in size and stops at the largest that fits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from autopar.search.elixir.belady import move_count

FIRST_BASE_BYTES = 32 * 2**20
LEAST_INTERVAL_BYTES = 1024
SEARCH_EFFORT = 2**24
OVERLAP_BLOCKS = 2  # counted as taken by chunks on their way; nothing is allocated for them


class DoesNotFit(ValueError):
    """The model cannot be trained in this memory with chunks of one size; the message says what is short, and of it."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """`numel` elements. A tied one is used by several modules: it gets a chunk and a block of its own."""

    name: str
    numel: int
    tied: bool = False

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise ValueError(f"parameter {self.name!r} has {self.numel} elements; at least 1 is needed")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The chunk sizes to try, in elements: multiples of `interval` from `base` to `most`."""

    base: int
    most: int
    interval: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Chunks of `elements` each: the chunk of every parameter, how many are cached in blocks, and moves per step."""

    elements: int
    chunk_of: tuple[int, ...]
    blocks: int
    moves: int

    @property
    def chunks(self) -> int:
        return self.chunk_of[-1] + 1 if self.chunk_of else 0


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def sizes_to_try(numels: Sequence[int], parameter_bytes: int) -> Sizes:
    """The range and the step of the sweep, for parameters of `parameter_bytes` per element."""
    base = FIRST_BASE_BYTES
    while base < max(numels) * parameter_bytes:
        base *= 2
    gap = 2 * base
    tries = SEARCH_EFFORT // (2 * (1 << (len(numels) - 1).bit_length()))
    interval = LEAST_INTERVAL_BYTES if tries > gap // LEAST_INTERVAL_BYTES else gap // max(tries, 1)
    return Sizes(base // parameter_bytes, (base + gap) // parameter_bytes, interval // parameter_bytes)


def pack(numels: Sequence[int], size: int) -> tuple[int, ...]:
    """The chunk of every parameter: the next chunk is opened as soon as one does not fit, and none spans two."""
    chunk_of: list[int] = []
    chunk, left = -1, 0
    for numel in numels:
        if numel > left:
            chunk, left = chunk + 1, size
        left -= numel
        chunk_of.append(chunk)
    return tuple(chunk_of)


def sweep(
    numels: Sequence[int], steps: Sequence[Collection[int]], room: int, sizes: Sizes, *, reserved: int
) -> Packing | None:
    """The size of least cost, or None if no size leaves as many blocks as the widest step uses chunks.

    `steps`: positions in `numels`. `room`: elements for blocks, `reserved` of which are not to be filled. While the
    packing stays the same, a larger size has no more blocks, so no fewer moves, and costs more: only the first size of
    each packing is looked at, some 20 of 8193 for OPT.
    """
    size = round_up(max(*numels, sizes.base), sizes.interval)
    best: Packing | None = None
    while size <= min(sizes.most, room) and room // size > reserved:
        chunk_of = pack(numels, size)
        blocks = min(room // size - reserved, chunk_of[-1] + 1)
        found = packed(size, chunk_of, steps, blocks)
        if found and (best is None or found.moves * size < best.moves * best.elements):
            best = found
        size = round_up(min(_roomier(numels, chunk_of), default=sizes.most + 1), sizes.interval)
    return best


def packed(size: int, chunk_of: tuple[int, ...], steps: Sequence[Collection[int]], blocks: int) -> Packing | None:
    """None if a step uses more chunks than there are blocks."""
    trace = [{chunk_of[position] for position in step} for step in steps]
    if max(map(len, trace), default=0) > blocks:
        return None
    return Packing(size, chunk_of, blocks, move_count(trace, blocks))


def _roomier(numels: Sequence[int], chunk_of: Sequence[int]) -> list[int]:
    """For every chunk but the last: the size at which it would also hold the first parameter of the next."""
    starts = [p for p, (before, chunk) in enumerate(pairwise((-1, *chunk_of))) if chunk != before]
    ends = list(accumulate(numels))
    return [ends[after] - ends[start] + numels[start] for start, after in pairwise(starts)]


def choose_chunks(
    parameters: Sequence[Parameter],
    steps: Sequence[Collection[int]],
    room: int,
    *,
    parameter_bytes: int,
    overlap: bool,
    ranks: int,
) -> Packing:
    """Chunk size, blocks and moves for parameters that are not tied, in the order of first use.

    `steps`: the positions in `parameters` that each traced step uses. `room`: elements of GPU memory for blocks. The
    size is a multiple of `ranks`. Raises DoesNotFit.
    """
    numels = [parameter.numel for parameter in parameters]
    if not numels:
        return Packing(0, (), 0, 0)
    sizes, total = sizes_to_try(numels, parameter_bytes), sum(numels)
    if total <= sizes.base:
        found, size, blocks = None, round_up(total, ranks), 1
    else:
        reserved = OVERLAP_BLOCKS if overlap else 0
        found = sweep(numels, steps, room, sizes, reserved=reserved)
        if found is None:
            raise DoesNotFit(_why(parameters, steps, room, sizes, reserved))
        size, blocks = round_up(found.elements, ranks), found.blocks
    if blocks * size > room:
        raise DoesNotFit(
            f"{blocks} blocks of {size:,} elements (a multiple of {ranks} ranks) take {blocks * size:,}, but there is "
            f"room for {room:,}: {blocks * size - room:,} too few. Give more GPU memory or use smaller batches."
        )
    if found is None or size != found.elements:
        chunk_of = pack(numels, size)
        found = packed(size, chunk_of, steps, min(blocks, chunk_of[-1] + 1))
        assert found, "a larger chunk made a step use more chunks"
    return found


def _why(
    parameters: Sequence[Parameter], steps: Sequence[Collection[int]], room: int, sizes: Sizes, reserved: int
) -> str:
    largest = max(parameters, key=lambda parameter: parameter.numel)
    size = round_up(max(largest.numel, sizes.base), sizes.interval)
    kept = f" beside the {reserved} kept free for overlap" if reserved else ""
    least = (1 + reserved) * size
    if room < least:
        return (
            f"not one block fits{kept}: the smallest chunk has {size:,} elements (the largest parameter, "
            f"{largest.name!r}, has {largest.numel:,}), so at least {least:,} elements are needed, but there is room "
            f"for {room:,}: {least - room:,} too few. Give more GPU memory, use smaller batches or recompute more."
        )
    chunk_of = pack([parameter.numel for parameter in parameters], size)
    trace = [{chunk_of[position] for position in step} for step in steps]
    widest = max(range(len(trace)), key=lambda step: len(trace[step]))
    return (
        f"step {widest} uses {len(trace[widest])} chunks of {size:,} elements at once, and room for {room:,} elements "
        f"gives {room // size - reserved} blocks{kept}; no larger chunk does better. Give more GPU memory, or split "
        "that module: its parameters are needed together."
    )
