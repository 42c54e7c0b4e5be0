"""How often chunks must move between host and GPU when the whole training step is known in advance.

    move_count = 2 (evictions + chunks still in a block at the end)

A step uses some chunks at once; each must sit in one of the GPU's `blocks`. Belady's rule evicts the chunk whose next
use is farthest, never one that the step itself uses. Each chunk that comes up also goes down again, hence the 2, and
evictions + chunks left at the end = uploads. Elixir, arXiv 2212.05339: the count its chunk search minimises.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence


def move_count(chunks_per_step: Sequence[Collection[int]], blocks: int) -> int:
    """The least number of moves, uploads and downloads together, for the steps in this order; all start on the host.

    Raises ValueError if a step uses more chunks than there are blocks.
    """
    end = len(chunks_per_step)
    next_use: dict[int, int] = {}
    next_uses: list[dict[int, int]] = []  # for each step: chunk -> the step after it that uses it next, or `end`
    for step in reversed(range(end)):
        used = set(chunks_per_step[step])
        if len(used) > blocks:
            raise ValueError(f"step {step} uses {len(used)} chunks at once, but there are {blocks} blocks")
        next_uses.append({chunk: next_use.get(chunk, end) for chunk in sorted(used)})
        next_use.update(dict.fromkeys(used, step))
    next_uses.reverse()

    cached: dict[int, int] = {}  # chunk -> its next use
    farthest: list[tuple[int, int]] = []  # a heap of (-next use, chunk); true only while `cached` says the same
    evictions = 0
    for used in next_uses:
        missing = len(used.keys() - cached.keys())
        while len(cached) + missing > blocks:
            negative, chunk = heapq.heappop(farthest)
            if cached.get(chunk) == -negative:  # the chunks of this step come last, being used now
                del cached[chunk]
                evictions += 1
        for chunk, following in used.items():
            cached[chunk] = following
            heapq.heappush(farthest, (-following, chunk))
    return 2 * (evictions + len(cached))
