"""The rule of a reshape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from autopar.rules.spelling import LETTERS, foreign


def regroup(source: Sequence[int], target: Sequence[int]) -> str:
    """The rule of a reshape: the coarsest factors of which both shapes are made.

    Dims are walked from the major end. Stretches of equal product are independent; within one, the sizes of the factors
    are the ratios of neighbouring suffix products of both shapes. Where these do not divide one another (6 4 -> 4 6),
    only the common part of the two outermost dims may be split, and the rest is locked.
    """
    if 0 in source or 0 in target:
        return f"{foreign(source, 'x')} -> {foreign(target, 'y')}"
    left, right, letters = ["1"] * len(source), ["1"] * len(target), iter(LETTERS)
    i = j = 0
    ins, outs = (
        [dim for dim, size in enumerate(source) if size > 1],
        [dim for dim, size in enumerate(target) if size > 1],
    )
    while i < len(ins):
        first, second = i, j
        a, b, i, j = source[ins[i]], target[outs[j]], i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * source[ins[i]], i + 1
            else:
                b, j = b * target[outs[j]], j + 1
        dims, wants = ins[first:i], outs[second:j]
        cuts = sorted({*_suffixes([source[d] for d in dims]), *_suffixes([target[d] for d in wants])}, reverse=True)
        if all(big % small == 0 for big, small in pairwise(cuts)):
            names = {big: (next(letters), big // small) for big, small in pairwise(cuts)}
            for words, shape, places in ((left, source, dims), (right, target, wants)):
                rest = math.prod(shape[d] for d in places)
                for d in places:
                    inside = [names[cut] for cut in cuts if rest // shape[d] < cut <= rest]
                    words[d] = inside[0][0] if len(inside) == 1 else "(" + " ".join(f"{n}={s}" for n, s in inside) + ")"
                    rest //= shape[d]
        else:
            common, name = math.gcd(source[dims[0]], target[wants[0]]), next(letters)
            for words, shape, places in ((left, source, dims), (right, target, wants)):
                for place, d in enumerate(places):
                    words[d] = next(letters) + "!"
                    if place == 0 and common > 1:
                        words[d] = name if shape[d] == common else f"({name}={common} {words[d]})"
    return f"{' '.join(left) or '.'} -> {' '.join(right) or '.'}"


def _suffixes(sizes: list[int]) -> list[int]:
    return [math.prod(sizes[place:]) for place in range(len(sizes) + 1)]
