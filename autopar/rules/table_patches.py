"""Rules of operators that cut tensors into patches or windows, and put them together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.graph import Node
from autopar.rules.spelling import LETTERS, Table, Types, as_dims, shape_of, spell


def pixel_shuffle(node: Node, types: Types) -> str:
    r = node.args[1]
    free = spell(types[0].shape[:-3])
    lead = "" if free == "." else free
    return f"{lead} (x i={r} j={r}) y z -> {lead} x (y i) (z j) | 0"


def pixel_unshuffle(node: Node, types: Types) -> str:
    r = node.args[1]
    free = spell(types[0].shape[:-3])
    lead = "" if free == "." else free
    return f"{lead} x (y i={r}) (z j={r}) -> {lead} (x i={r} j={r}) y z | 0"


def im2col(node: Node, types: Types) -> str:
    """(x, kernel, dilation, padding, stride) -> patches [n, c * kernel, places]. A channel's patches lie together."""
    return _patches(node, types[0].shape, shape_of(node), node.args[1], back=False)


def col2im(node: Node, types: Types) -> str:
    """(patches, size, kernel, dilation, padding, stride) -> x, in which patches that overlap are added."""
    return _patches(node, shape_of(node), types[0].shape, node.args[2], back=True)


def _patches(node: Node, picture: Sequence[int], patches: Sequence[int], kernel: Sequence[int], back: bool) -> str:
    lead = "n " * (len(picture) - 3)
    left, right = f"{lead}c y! x!", f"{lead}(c k={math.prod(kernel)}) places!"
    return f"{right} -> {left} | 0" if back else f"{left} -> {right} | 0"


def unfold(node: Node, types: Types) -> str:
    """(x, dim, size, step) -> windows of one dim, which may overlap: their number stands in its place, `size` last."""
    shape, dim = types[0].shape, as_dims(node.args[1], len(types[0].shape))
    if not shape:
        return ". -> w! | 0"
    names = [*(n + ("_windows" if d in dim else "") for d, n in enumerate(LETTERS[: len(shape)])), "w"]
    return f"{spell(shape, lock=dim)} -> {spell(shape_of(node), names, lock=(*dim, len(shape)))} | 0"


def unfold_backward(node: Node, types: Types) -> str:
    """(grad, sizes, dim, size, step) -> dx."""
    shape, dim = shape_of(node), as_dims(node.args[2], len(shape_of(node)))
    names = [*(n + ("_windows" if d in dim else "") for d, n in enumerate(LETTERS[: len(shape)])), "w"]
    return f"{spell(types[0].shape, names, lock=(*dim, len(shape)))} -> {spell(shape, lock=dim)} | 0"


PATCHES: Table = {
    "aten.pixel_shuffle.default": pixel_shuffle,
    "aten.pixel_unshuffle.default": pixel_unshuffle,
    "aten.im2col.default": im2col,
    "aten.col2im.default": col2im,
    "aten.unfold.default": unfold,
    "aten.unfold_backward.default": unfold_backward,
}
