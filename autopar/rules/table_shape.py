"""Rules of operators that move elements: views, slices, joins, indexing. What they do is linear in the moved tensor."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Node, Ref
from autopar.rules.regroup import regroup
from autopar.rules.spelling import (
    LETTERS,
    Table,
    Types,
    Writer,
    all_locked,
    arg,
    as_dims,
    foreign,
    linear,
    shape_of,
    spell,
)


def view(node: Node, types: Types) -> str:
    return regroup(types[0].shape, shape_of(node)) + " | 0"


def squeeze(node: Node, types: Types) -> str:
    """A shard of size one must not be squeezed away: where torch might, a body reshapes instead."""
    shape = types[0].shape
    dims = as_dims(arg(node, 1, "dim"), len(shape))
    words = spell(shape, body={dim: "reshape" for dim in dims})
    kept = [word for dim, word in enumerate(words.split()) if dim not in dims or shape[dim] > 1] if shape else []
    return f"{words} -> {' '.join(kept) or '.'} | 0"


def expand(node: Node, types: Types) -> str:
    shape = shape_of(node)
    return f"{spell(types[0].shape, LETTERS[len(shape) - len(types[0].shape) :])} -> {spell(shape)} | 0"


def permute(node: Node, types: Types) -> str:
    shape, rank = types[0].shape, len(types[0].shape)
    order = list(range(rank))
    if node.op == "aten.permute.default":
        order = [dim % rank for dim in node.args[1]]
    elif node.op == "aten.transpose.int":
        a, b = (dim % rank for dim in node.args[1:3]) if rank else (0, 0)
        order[a : a + 1], order[b : b + 1] = order[b : b + 1], order[a : a + 1]
    elif rank == 2:  # aten.t, which leaves vectors alone
        order = [1, 0]
    words = spell(shape).split()
    return f"{spell(shape)} -> {' '.join(words[dim] for dim in order) or '.'} | 0"


def at_dim(position: int, many: bool = False) -> Writer:
    """Result of the same rank: dims named by an argument are locked, the others go straight through."""

    def write(node: Node, types: Types) -> str:
        shape = types[0].shape
        given = arg(node, position, "dims" if many else "dim", ())
        words = spell(shape, lock=as_dims(given, len(shape)))
        return f"{words} -> {words} | 0"

    return write


def _pair(whole: Sequence[int], piece: Sequence[int]) -> tuple[str, str]:
    """Words of two tensors of one rank of which dims of different size are locked."""
    differ = {dim for dim, (old, new) in enumerate(zip(whole, piece, strict=True)) if old != new}
    return spell(whole, lock=differ), spell(
        piece, [LETTERS[d] + ("_cut" if d in differ else "") for d in range(len(piece))], differ
    )


def cut(node: Node, types: Types) -> str:
    """A slice and its backward: a dim that keeps its size is untouched."""
    left, right = _pair(types[0].shape, shape_of(node))
    return f"{left} -> {right} | 0"


def glu(node: Node, types: Types) -> str:
    whole, half = _pair(types[0].shape, shape_of(node))
    return f"{whole} -> {half}"


def glu_backward(node: Node, types: Types) -> str:
    whole, half = _pair(types[1].shape, types[0].shape)
    return f"{half}, {whole} -> {whole} | 0"


def complex_pairs(node: Node, types: Types) -> str:
    """view_as_real and back: the last dim of the real tensor holds real and imaginary part."""
    left, right = types[0].shape, shape_of(node)
    return f"{spell(left, lock=[len(right)])} -> {spell(right, lock=[len(left)])} | 0"


def fourier(node: Node, types: Types) -> str:
    """Every point of a transformed dim comes from all of it. Real transforms keep a half of the last of them."""
    before, after = types[0].shape, shape_of(node)
    dims = as_dims(node.args[1], len(before))
    made = [LETTERS[d] + ("_made" if d in dims else "") for d in range(len(after))]
    return f"{spell(before, lock=dims)} -> {spell(after, made, dims)} | 0"


def constant_pad(node: Node, types: Types) -> str:
    """Padding with zeros is linear. A dim that is cropped here and padded there keeps its size, not its place."""
    shape, pad = types[0].shape, node.args[1]
    padded = {len(shape) - 1 - place // 2 for place, amount in enumerate(pad) if amount}
    after = [LETTERS[d] + ("_pad" if d in padded else "") for d in range(len(shape))]
    zero = not arg(node, 2, "value", 0)
    return f"{spell(shape, lock=padded)} -> {spell(shape_of(node), after, padded)}{' | 0' if zero else ''}"


def slice_scatter(node: Node, types: Types) -> str:
    whole, piece = _pair(types[0].shape, types[1].shape)
    return f"{whole}, {piece} -> {whole} | 01"


def select(node: Node, types: Types) -> str:
    return _without(types[0].shape, node.args[1]) + " | 0"


def _without(shape: Sequence[int], dim: int, back: bool = False) -> str:
    whole = spell(shape, lock=[dim % len(shape)])
    part = spell(
        [s for d, s in enumerate(shape) if d != dim % len(shape)],
        [n for d, n in enumerate(LETTERS) if d != dim % len(shape)],
    )
    return f"{part} -> {whole}" if back else f"{whole} -> {part}"


def select_backward(node: Node, types: Types) -> str:
    return _without(shape_of(node), node.args[2], back=True) + " | 0"


def select_scatter(node: Node, types: Types) -> str:
    whole, _, part = _without(types[0].shape, node.args[2]).partition(" -> ")
    return f"{whole}, {part} -> {whole} | 01"


def unbind(node: Node, types: Types) -> str:
    whole, _, part = _without(types[0].shape, arg(node, 1, "dim", 0)).partition(" -> ")
    return f"{whole} -> {', '.join([part] * len(node.outputs))} | 0"


def stack(node: Node, types: Types) -> str:
    shape = shape_of(node)
    part, _, whole = _without(shape, arg(node, 1, "dim", 0), back=True).partition(" -> ")
    return f"{', '.join([part] * len(types))} -> {whole} | *"


def split(node: Node, types: Types) -> str:
    shape = types[0].shape
    dim = as_dims(arg(node, 2, "dim", 0), len(shape))[0]
    parts = [
        spell(out.shape, [n + (f"_p{place}" if d == dim else "") for d, n in enumerate(LETTERS)], lock=[dim])
        for place, out in enumerate(node.outputs)
        if out is not None
    ]
    return f"{spell(shape, lock=[dim])} -> {', '.join(parts)} | 0"


def cat(node: Node, types: Types) -> str:
    shape = shape_of(node)
    dim = as_dims(arg(node, 1, "dim", 0), len(shape))[0]
    parts = [
        spell(type.shape, [n + (f"_p{place}" if d == dim else "") for d, n in enumerate(LETTERS)], lock=[dim])
        if len(type.shape) == len(shape)
        else foreign(type.shape, f"none{place}_")  # torch lets empty vectors of shape [0] pass
        for place, type in enumerate(types)
    ]
    return f"{', '.join(parts)} -> {spell(shape, lock=[dim])} | *"


def repeat(node: Node, types: Types) -> str:
    """Repeats are the major factor of a dim. A dim that is repeated once stays its own factor."""
    repeats, shape = node.args[1], shape_of(node)
    names = LETTERS[len(shape) - len(types[0].shape) :]
    words: list[str] = []
    for dim, (size, times) in enumerate(zip(shape, repeats, strict=True)):
        old = size // times if times else 0
        word = [f"r{dim}={times}"] * (times > 1) + [LETTERS[dim]] * (old > 1)
        words.append("1" if not word else word[0].partition("=")[0] if len(word) == 1 else f"({' '.join(word)})")
    if 0 in shape:
        return f"{foreign(types[0].shape, 'x')} -> {foreign(shape, 'y')} | 0"
    return f"{spell(types[0].shape, names)} -> {' '.join(words) or '.'} | 0"


def locked_last(count: int) -> Writer:
    """The last `count` dims are locked, their sizes stay."""

    def write(node: Node, types: Types) -> str:
        shape = types[0].shape
        words = spell(shape, lock=range(len(shape) - count, len(shape)))
        return f"{words} -> {words} | 0"

    return write


def leading(position: int, *alternatives: str) -> Writer:
    """Tensors that share the dims before the last `position` ones; the rest is locked and each one's own."""

    def write(node: Node, types: Types) -> str:
        free = len(types[0].shape) - position

        def words(shape: Sequence[int], place: str) -> str:
            names = [*LETTERS[:free], *(f"{place}{d}" for d in range(len(shape) - free))]
            return spell(shape, names, lock=range(free, len(shape)))

        left = ", ".join(words(type.shape, f"x{place}_") for place, type in enumerate(types))
        right = ", ".join(
            "-" if out is None else words(out.shape, f"y{place}_") for place, out in enumerate(node.outputs)
        )
        return f"{left} -> {right}" + linear(*alternatives)

    return write


def diagonal(node: Node, types: Types) -> str:
    shape = types[0].shape
    a, b = arg(node, 2, "dim1", 0) % len(shape), arg(node, 3, "dim2", 1) % len(shape)
    rest = [d for d in range(len(shape)) if d not in (a, b)]
    kept = spell([shape[d] for d in rest], [LETTERS[d] for d in rest])
    return (
        f"{spell(shape, lock=[a, b])} -> {'' if kept == '.' else kept} {'1' if shape_of(node)[-1] == 1 else 'z!'} | 0"
    )


def index(node: Node, types: Types) -> str | None:
    """x[i, :, j]: indexed dims are locked, the dims of the indices (broadcast) are factors of their own."""
    words = _indexed(node, types)
    return None if words is None else f"{words[0]}, {words[1]} -> {words[2]} | 0"


def index_put(node: Node, types: Types) -> str | None:
    """Every rank would add to `x`, so the dims of the indices are locked; the values broadcast to the indexed shape."""
    words = _indexed(node, types, lock=True)
    if words is None:
        return None
    picked, shape = words[2].split(), types[-1].shape
    value = " ".join("1" if size == 1 else picked[len(picked) - len(shape) + d] for d, size in enumerate(shape)) or "."
    return f"{words[0]}, {words[1]}, {value} -> {words[0]} | 0{len(types) - 1}"


def _indexed(node: Node, types: Types, lock: bool = False) -> tuple[str, str, str] | None:
    """Words of x, of the indices, and of x[indices]. None where a mask makes the shape depend on values."""
    listed, shape = node.args[1], types[0].shape
    tensors = types[1 : 1 + sum(isinstance(one, Ref) for one in listed)]
    if any(type.dtype in ("bool", "uint8") for type in tensors):
        return None
    at = [dim for dim, one in enumerate(listed) if one is not None]
    rank = max(len(type.shape) for type in tensors)
    names = [f"i{d}" for d in range(rank)]
    common = [max([t.shape[d - rank + len(t.shape)] for t in tensors if d >= rank - len(t.shape)]) for d in range(rank)]
    marks = range(rank) if lock else ()
    ids = [spell(t.shape, names[rank - len(t.shape) :], lock=range(len(t.shape)) if lock else ()) for t in tensors]
    word = spell(shape, lock=at).split()
    block = [] if rank == 0 else spell(common, names, lock=marks).split()
    adjacent = at == list(range(at[0], at[-1] + 1))
    kept = [w if shape[d] == 1 else LETTERS[d] for d, w in enumerate(word) if d not in at]
    front = at[0] if adjacent else 0
    return " ".join(word), ", ".join(ids), " ".join(kept[:front] + block + kept[front:]) or "."


def _along(node: Node, types: Types, body: str = "") -> tuple[str, str]:
    """Words of x and of an index tensor of the same rank; dims where they differ in size are locked."""
    shape, ids = types[0].shape, types[1].shape
    dim = as_dims(node.args[1], len(shape))[0]
    differ = {d for d in range(len(shape)) if d != dim and shape[d] != ids[d]}
    names = [LETTERS[d] + ("_id" if d == dim or d in differ else "") for d in range(len(shape))]
    whole = spell(shape, lock=differ | (set() if body else {dim}), body={dim: body} if body else {})
    return whole, spell(ids, names, lock=differ | (set() if body else {dim}))


def gather(node: Node, types: Types) -> str:
    whole, ids = _along(node, types, "masked_gather")
    return f"{whole}, {ids} -> {ids} | 0"


def scatter(*alternatives: str) -> Writer:
    def write(node: Node, types: Types) -> str:
        whole, ids = _along(node, types)
        if len(types) > 2 and types[2].shape != types[1].shape:  # torch takes the corner of a larger source
            return all_locked(node, types)
        fit = alternatives if node.op != "aten.scatter.value" or node.args[3] == 0 else ()
        return f"{', '.join([whole] + [ids] * (len(types) - 1))} -> {whole}" + linear(*fit)

    return write


def index_select(node: Node, types: Types) -> str:
    shape = types[0].shape
    if not shape:
        return all_locked(node, types)
    dim = as_dims(node.args[1], len(shape))[0]
    picked = [LETTERS[d] + ("_id" if d == dim else "") for d in range(len(shape))]
    return f"{spell(shape, lock=[dim])}, {spell(types[1].shape, [picked[dim]])} -> {spell(shape_of(node), picked)} | 0"


def index_add(node: Node, types: Types) -> str:
    shape = types[0].shape
    if not shape:
        return all_locked(node, types)
    dim = as_dims(node.args[1], len(shape))[0]
    picked = [LETTERS[d] + ("_id" if d == dim else "") for d in range(len(shape))]
    whole = spell(shape, lock=[dim])
    return (
        f"{whole}, {spell(types[1].shape, [picked[dim]], [0])}, {spell(types[2].shape, picked, [dim])} -> {whole} | 02"
    )


SHAPE: Table = {
    "aten.view.default": view,
    "aten._unsafe_view.default": view,
    "aten.reshape.default": view,
    "aten._reshape_copy.default": view,
    "aten.view_copy.default": view,
    "aten.unsqueeze.default": view,
    "aten.squeeze.default": squeeze,
    "aten.squeeze.dim": squeeze,
    "aten.squeeze.dims": squeeze,
    "aten.expand.default": expand,
    "aten.permute.default": permute,
    "aten.transpose.int": permute,
    "aten.t.default": permute,
    "aten.slice.Tensor": cut,
    "aten.slice_backward.default": cut,
    "aten.slice_scatter.default": slice_scatter,
    "aten.select.int": select,
    "aten.select_backward.default": select_backward,
    "aten.select_scatter.default": select_scatter,
    "aten.unbind.int": unbind,
    "aten.stack.default": stack,
    "aten.split.Tensor": split,
    "aten.split_with_sizes.default": split,
    "aten.cat.default": cat,
    "aten.repeat.default": repeat,
    "aten.view_as_real.default": complex_pairs,
    "aten.view_as_complex.default": complex_pairs,
    "aten._fft_r2c.default": fourier,
    "aten._fft_c2r.default": fourier,
    "aten._fft_c2c.default": fourier,
    "aten.glu.default": glu,
    "aten.glu_backward.default": glu_backward,
    "aten.flip.default": at_dim(1, many=True),
    "aten.roll.default": at_dim(2, many=True),
    "aten.cumsum.default": at_dim(1),
    "aten.tril.default": locked_last(2),
    "aten.triu.default": locked_last(2),
    "aten.reflection_pad1d.default": leading(1, "0"),
    "aten.reflection_pad2d.default": leading(2, "0"),
    "aten.replication_pad1d.default": leading(1, "0"),
    "aten.replication_pad2d.default": leading(2, "0"),
    "aten.reflection_pad1d_backward.default": leading(1, "0"),
    "aten.reflection_pad2d_backward.default": leading(2, "0"),
    "aten.replication_pad1d_backward.default": leading(1, "0"),
    "aten.replication_pad2d_backward.default": leading(2, "0"),
    "aten.diagonal.default": diagonal,
    "aten.index.Tensor": index,
    "aten._unsafe_index.Tensor": index,
    "aten.index_put.default": index_put,
    "aten._unsafe_index_put.default": index_put,
    "aten.gather.default": gather,
    "aten.scatter.src": scatter("02"),
    "aten.scatter.value": scatter("0"),
    "aten.scatter_add.default": scatter("02"),
    "aten.index_select.default": index_select,
    "aten.index_add.default": index_add,
    "aten.constant_pad_nd.default": constant_pad,
}
