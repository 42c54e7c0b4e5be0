"""Where the elements of a tensor lie in memory: its strides, in elements, and what torch makes of them.

Strides say whether a view can be had without a copy. Those of dims of size one mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, ...]
Strides = tuple[int, ...]
Placed = tuple[Shape, Strides]  # a tensor: its local shape, and its strides


def contiguous(shape: Sequence[int]) -> Strides:
    return packed(shape, range(len(shape)))


def packed(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Without gaps, with these dims from the outermost in memory inwards."""
    found, step = [0] * len(shape), 1
    for dim in reversed(order):
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)


def viewed(shape: Shape, strides: Strides, wanted: Shape) -> Strides | None:
    """Of a view of that shape; None where it takes a copy. As `computeStride` of ATen's TensorUtils.cpp finds it: dims
    that lie behind each other without a gap are one chunk, and each chunk is cut anew.
    """
    if 0 in shape:
        return strides if shape == wanted else contiguous(wanted)
    chunks: list[tuple[int, int]] = []  # (elements, stride of the innermost), from the outermost
    for size, step in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if chunks and chunks[-1][1] == size * step:
            chunks[-1] = chunks[-1][0] * size, step
        else:
            chunks.append((size, step))
    found = [1] * len(wanted)
    left, step = 1, 1
    for dim in range(len(wanted) - 1, -1, -1):
        if left == 1 and wanted[dim] != 1:
            if not chunks:
                return None
            left, step = chunks.pop()
        if left % wanted[dim]:
            return None
        found[dim] = step
        left //= wanted[dim]
        step *= wanted[dim]
    return tuple(found) if left == 1 and not chunks else None


def elementwise(shape: Shape, operands: Sequence[tuple[Shape, Strides]]) -> Strides:
    """Of a result that torch makes element by element of operands that broadcast: dims in the order in which the first
    operand that tells them apart has them, without gaps (`reorder_dimensions` of ATen's TensorIterator.cpp).
    """
    rank = len(shape)
    steps = [
        (*[0] * (rank - len(of)), *(0 if size != full else step for size, step, full in _aligned(of, given, shape)))
        for of, given in operands
    ]

    def comes_first(one: int, other: int) -> int:
        for given in steps:
            if given[one] and given[other] and given[one] != given[other]:
                return -1 if given[one] < given[other] else 1
            if given[one] and given[other] and shape[one] > shape[other]:
                return 1
        return 0

    order = [dim for dim in reversed(range(rank)) if shape[dim] != 1]  # from the innermost
    for start in range(1, len(order)):
        at = start
        for place in range(start - 1, -1, -1):  # where nothing tells two dims apart, it goes on to the next
            if (found := comes_first(order[place], order[at])) > 0:
                order[place], order[at] = order[at], order[place]
                at = place
            elif found < 0:
                break
    ones = [dim for dim in range(rank) if shape[dim] == 1]
    return packed(shape, [*ones, *reversed(order)])


def _aligned(of: Shape, given: Strides, shape: Shape) -> list[tuple[int, int, int]]:
    return list(zip(of, given, shape[len(shape) - len(of) :], strict=True))
