"""The functions that emitted code calls besides ATen: products, pieces of tensors for collectives.

Each is a plain function of tensors without rank or group in it; where ranks differ, the difference comes in as a
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from autopar.emit.attention import KERNELS, Asked, kernel_for
from autopar.emit.experts import picked, products, sorted_by_expert, weight_products
from autopar.emit.in_order import batch_norm_backward
from autopar.ir.equation import read

aten = torch.ops.aten


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """The product of `autopar.ir.equation`: one product of matrices (batched if a letter stands in all three), without
    copies of views.
    """
    find = _product if torch.compiler.is_compiling() else _known_product  # Dynamo warns of caches
    left, right, made, is_batched = find(equation, a.shape, b.shape)
    a, b = _viewed(a, left), _viewed(b, right)
    return _viewed(torch.bmm(a, b) if is_batched else torch.mm(a, b), made)


# In turn, each left out where it would change nothing: a shape, an order of dims, another shape.
_View = tuple[list[int] | None, list[int] | None, list[int] | None]


def _viewed(x: Tensor, view: _View) -> Tensor:
    before, order, after = view
    if before is not None:
        x = x.reshape(before)
    if order is not None:
        x = x.permute(order)
    return x if after is None else x.reshape(after)


def _product(equation: str, a: Sequence[int], b: Sequence[int]) -> tuple[_View, _View, _View, bool]:
    """How operands of these shapes become matrices, and their product the result; whether these are batches."""
    terms = read(equation)
    named = (*zip(terms.left, a, strict=True), *zip(terms.right, b, strict=True))
    size = {n: s for n, s in named if n != "1"}
    parts_a, parts_b = terms.parts
    wanted = [n for n in terms.result if n != "1"]
    shape = [size.get(n, 1) for n in terms.result]
    return (
        _matrix(list(a), terms.left, parts_a, size),
        _matrix(list(b), terms.right, parts_b, size),
        _view(_shape((terms.shared, terms.rows, terms.columns), size), terms.made, size, wanted, shape),
        bool(terms.shared),
    )


_known_product = lru_cache(maxsize=4096)(_product)  # emitted code asks at every call


def _matrix(shape: list[int], names: Sequence[str], parts: Sequence[Sequence[str]], size: dict[str, int]) -> _View:
    """Gathers the dims of a tensor into the given parts; a leading empty part (no batch) is left out."""
    have = [n for n in names if n != "1"]
    return _view(shape, have, size, [n for part in parts for n in part], _shape(parts, size))


def _shape(parts: Sequence[Sequence[str]], size: dict[str, int]) -> list[int]:
    shape = [math.prod([size[n] for n in part]) for part in parts]  # lists, as Dynamo breaks the graph at generators
    return shape if parts[0] else shape[1:]


def _view(
    before: list[int], have: Sequence[str], size: dict[str, int], wanted: Sequence[str], after: list[int]
) -> _View:
    """From a shape that has the dims `have`, as they are or gathered, to one that has them in the order `wanted`."""
    if [*wanted] == [*have]:
        return None, None, None if after == before else after
    apart, order = [size[n] for n in have], [have.index(n) for n in wanted]
    turned = [size[n] for n in wanted]
    return None if apart == before else apart, order, None if after == turned else after


def add_up(so_far: Sequence[Tensor], place: int, value: Tensor) -> None:
    """Add a gradient to those of the micro-batches before, in their precision."""
    so_far[place].add_(value)


def to_front(x: Tensor, dim: int, parts: int) -> Tensor:
    """Cut `dim` into equal parts and stack them along dim 0, as a reduce-scatter or all-to-all wants them."""
    if math.prod(x.shape[:dim]) == 1:
        shape = list(x.shape)
        shape[dim] //= parts
        shape[0] *= parts
        return torch.ops.aten.contiguous.default(x.reshape(shape))
    # A collective sends memory as it lies, and cat keeps the order of channels_last pieces.
    return torch.ops.aten.contiguous.default(torch.cat(x.chunk(parts, dim), 0))


def from_front(x: Tensor, dim: int, parts: int) -> Tensor:
    """Inverse of `to_front`: equal parts stacked along dim 0 go side by side along `dim`, as after an all-gather."""
    if dim == 0:
        return x
    if math.prod(x.shape[:dim]) == parts:
        shape = list(x.shape)
        shape[0] //= parts
        shape[dim] *= parts
        return x.reshape(shape)
    return torch.cat(x.chunk(parts, 0), dim)


def piece(x: Tensor, dim: int, parts: int, index: Tensor) -> Tensor:
    """The `index`-th of `parts` equal pieces of `dim`, as a copy of its own."""
    return x.unflatten(dim, (parts, x.shape[dim] // parts)).index_select(dim, index.reshape(1)).squeeze(dim)


def cut_at(x: Tensor, dim: int, parts: int, coordinate: Tensor, turn: int) -> Tensor:
    """The piece of `dim` that came from the rank `turn` places before this one on a ring of so many."""
    return piece(x, dim, parts, torch.remainder(coordinate - turn, parts))


def place_at(x: Tensor, made: Tensor, dim: int, parts: int, coordinate: Tensor, turn: int) -> Tensor:
    """Write to `x`, which is contiguous, where `cut_at` reads."""
    index = torch.remainder(coordinate - turn, parts).reshape(1)
    x.unflatten(dim, (parts, x.shape[dim] // parts)).index_copy_(dim, index, made.unsqueeze(dim))
    return x


def panel(x: Tensor, dim: int, blocks: int, parts: int, number: int) -> Tensor:
    """Of each of the `blocks` of `dim` one of its `parts` equal pieces, that dim in front, in memory of its own."""
    pieces = _pieces(x, dim, blocks, parts, number).movedim((dim, dim + 1), (0, 1))
    return pieces.clone(memory_format=torch.contiguous_format).flatten(0, 1)


def in_front(x: Tensor, dim: int) -> Tensor:
    """A contiguous copy with `dim` in front."""
    return x.movedim(dim, 0).clone(memory_format=torch.contiguous_format)


def place_panel(x: Tensor, made: Tensor, dim: int, blocks: int, parts: int, number: int) -> Tensor:
    """Write to `x`, which is contiguous, where `panel` reads."""
    pieces = _pieces(x, dim, blocks, parts, number)
    pieces.copy_(made.movedim(0, dim).unflatten(dim, pieces.shape[dim : dim + 2]))
    return x


def _pieces(x: Tensor, dim: int, blocks: int, parts: int, number: int) -> Tensor:
    size = x.shape[dim] // (blocks * parts)
    return x.unflatten(dim, (blocks, parts, size)).select(dim + 1, number)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All elements of all tensors in one row, so that they travel together."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(row: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Inverse of `flatten`: views of the row."""
    pieces = row.split([math.prod(shape) for shape in shapes])
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def view_as_complex(x: Tensor) -> Tensor:
    """Pairs along the last dim as complex numbers: a view where they lie side by side, else of a copy. They may lie
    otherwise than in the model, where the view was possible.
    """
    beside = x.stride(-1) == 1 and all(stride % 2 == 0 for stride in x.stride()[:-1])
    return torch.view_as_complex(x if beside else x.clone(memory_format=torch.contiguous_format))


def mse_loss(x: Tensor, y: Tensor, *reduction: int) -> Tensor:
    """aten.mse_loss, whose result keeps the storage of all the squares, in storage of its own."""
    return torch.ops.aten.mse_loss.default(x, y, *reduction).clone()


def batch_norm_in_parts(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, parts: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Batch norm of each of `parts` equal parts of dim 0 by its own statistics. Returns y, and in one row for each part
    mean, 1 / sqrt(variance + eps), new running mean and new running variance (None without running ones).
    """
    made: list[tuple[Tensor, ...]] = []
    for index, part in enumerate(x.chunk(parts)):
        if running_mean is None or running_var is None:
            made.append(aten._native_batch_norm_legit.no_stats(part, weight, bias, True, momentum, eps))
        else:
            mean, var = (s[index] if s.dim() > 1 else s for s in (running_mean, running_var))
            made.append(aten._native_batch_norm_legit_functional(part, weight, bias, mean, var, True, momentum, eps))
    y, *statistics = zip(*made, strict=True)
    stacked = [torch.stack(rows) if parts > 1 else rows[0].unsqueeze(0) for rows in statistics]
    none = [None] * (4 - len(stacked))
    return (torch.cat(y) if parts > 1 else y[0], *stacked, *none)


def batch_norm_in_parts_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, eps: float, parts: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, weight and bias; the latter two are sums over the parts."""
    backward = batch_norm_backward
    pieces = zip(grad.chunk(parts), x.chunk(parts), mean, rstd, strict=True)
    made = [backward(g, part, weight, None, None, m, r, True, eps, mask) for g, part, m, r in pieces]
    if parts == 1:
        return tuple(one if wanted else None for one, wanted in zip(made[0], mask, strict=True))
    dx, dweight, dbias = zip(*made, strict=True)
    return (
        torch.cat(dx) if mask[0] else None,
        torch.stack(dweight).sum(0) if mask[1] else None,
        torch.stack(dbias).sum(0) if mask[2] else None,
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, dropout: float, bias_grad: bool,
    kernel: str = "",
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(out, lse, state) as `autopar.attention` has them, by the kernel of that name, or by the one for such tensors."""
    asked = Asked(causal, scale, dropout, bias_grad)
    return KERNELS[kernel or kernel_for(q, k, v, bias, asked)][0](q, k, v, bias, asked)


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    state: Tensor | None, causal: bool, scale: float, dropout: float, bias_grad: bool, kernel: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dbias); None where the bias has no gradient."""
    asked = Asked(causal, scale, dropout, bias_grad)
    return KERNELS[kernel or kernel_for(q, k, v, bias, asked)][1](grad, q, k, v, bias, out, lse, state, asked)


def attention_part_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    state: Tensor | None, causal: bool, scale: float, dropout: float, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, None) of a part of the keys, where `out` and `lse` are of all of them."""
    asked = Asked(causal, scale, dropout, bias_grad, in_parts=True)
    return KERNELS[kernel_for(q, k, v, bias, asked)][1](grad, q, k, v, bias, out, lse, state, asked)


def merge_attention(total: Tensor, lse: Tensor, part: Tensor, its_lse: Tensor, coordinate: Tensor, turn: int) -> Tensor:
    """Add attention over one part of the keys to `total`, over others, and its lse to `lse`, in place; a part that came
    round the ring, to a rank whose rows lie before it, adds nothing.
    """
    _merge(total, lse, part, its_lse.masked_fill(coordinate < turn, -torch.inf))
    return total


def _merge(total: Tensor, lse: Tensor, part: Tensor, its_lse: Tensor) -> None:
    both = torch.logaddexp(lse, its_lse)
    total.mul_((lse - both).exp_().unsqueeze(-1))
    total.addcmul_(part, (its_lse - both).exp_().unsqueeze(-1))
    torch.ops.aten.copy_.default(lse, both)  # not by a method: fake CUDA tensors have none where CUDA is not


def lse_of_seen(lse: Tensor, coordinate: Tensor, turn: int) -> Tensor:
    """`lse`, or infinity where the block of this turn lies behind all of the rank's rows: they see nothing of it."""
    return lse.masked_fill(coordinate < turn, torch.inf)


def take_group(x: Tensor, dim: int, groups: int, ranks: int, coordinate: Tensor) -> Tensor:
    """The piece of `dim` that belongs to the group of ranks in which this one is: as many in each, side by side."""
    return piece(x, dim, groups, torch.floor_divide(coordinate, ranks // groups))


def place_group(made: Tensor, dim: int, groups: int, ranks: int, coordinate: Tensor) -> Tensor:
    """Zeros, with `made` where `take_group` reads."""
    shape = list(made.shape)
    shape[dim] *= groups
    index = torch.floor_divide(coordinate, ranks // groups).reshape(1)
    x = made.new_zeros(shape)
    x.unflatten(dim, (groups, made.shape[dim])).index_copy_(dim, index, made.unsqueeze(dim))
    return x


def expert_mm(rows: Tensor, weight: Tensor, ids: Tensor, turned: bool) -> Tensor:
    """rows [tokens, k or 1, i] by weight [experts, i, o], or [experts, o, i] where it is `turned`: each row by the
    matrix of its expert in ids [tokens, k].
    """
    order, ends = sorted_by_expert(ids, weight.shape[0])
    made = products(picked(rows, order, ids.shape[1]), weight.transpose(1, 2) if turned else weight, ends)
    return torch.empty_like(made).index_copy_(0, order, made).view(*ids.shape, -1)


def expert_mm_weight(left: Tensor, right: Tensor, ids: Tensor, experts: int) -> Tensor:
    """The gradient of `weight` in `expert_mm`, of so many experts: [experts, width of left, width of right], where one
    of both are the rows, the other is their gradient.
    """
    order, ends = sorted_by_expert(ids, experts)
    return weight_products(picked(left, order, ids.shape[1]), picked(right, order, ids.shape[1]), ends)


# --- the zigzag ring (`autopar.rules.zigzag`): rows are dim 2, in two halves ------------------------------------------


def later_half(x: Tensor, dim: int) -> Tensor:
    """As a copy of its own."""
    half = x.shape[dim] // 2
    return x.narrow(dim, half, half).clone(memory_format=torch.contiguous_format)


def zigzag_in(x: Tensor, came: Tensor, coordinate: Tensor, ranks: int) -> Tensor:
    """The earlier half of `x`, and what came from the mirror rank: the one that lies before the other first."""
    late = _is_late(coordinate, ranks)
    halves = torch.stack([x.narrow(2, 0, came.shape[2]), came], 2)
    return halves.index_select(2, torch.stack([late, 1 - late])).flatten(2, 3)


def zigzag_away(x: Tensor, coordinate: Tensor, ranks: int) -> Tensor:
    """The half that came from the mirror rank."""
    return piece(x, 2, 2, 1 - _is_late(coordinate, ranks))


def zigzag_out(x: Tensor, came: Tensor, coordinate: Tensor, ranks: int) -> Tensor:
    """The half that the rank had itself, and behind it what came home."""
    return torch.cat([piece(x, 2, 2, _is_late(coordinate, ranks)), came], 2)


def zigzag_pair(x: Tensor, half: int, coordinate: Tensor, turn: int, ranks: int) -> Tensor:
    """That half of `x`, and behind it along the batch the one that this turn asks for."""
    asked = _asked(coordinate, turn, ranks)
    index = torch.stack([torch.full_like(asked, half), asked])
    return _halves(x).movedim(2, 0).index_select(0, index).flatten(0, 1)


def zigzag_add(x: Tensor, pair: Tensor, half: int, coordinate: Tensor, turn: int, ranks: int) -> Tensor:
    """Add to `x`, in place, where `zigzag_pair` reads."""
    halves, (first, second) = _halves(x).unbind(2), pair.chunk(2)
    halves[half].add_(first)
    asked = _asked(coordinate, turn, ranks)
    for index, rows in enumerate(halves):
        rows.addcmul_(second, (asked == index).to(x.dtype))
    return x


def zigzag_spread(pair: Tensor, half: int, coordinate: Tensor, turn: int, ranks: int) -> Tensor:
    """Zeros, to which `zigzag_add` adds."""
    x = pair.new_zeros(pair.shape[0] // 2, pair.shape[1], 2 * pair.shape[2], *pair.shape[3:])
    return zigzag_add(x, pair, half, coordinate, turn, ranks)


def zigzag_merge(
    total: Tensor, lse: Tensor, pair: Tensor, its_lse: Tensor, half: int, coordinate: Tensor, turn: int, ranks: int
) -> Tensor:
    """`merge_attention`, where `zigzag_pair` reads."""
    halves, logs = _halves(total).unbind(2), _halves(lse).unbind(2)
    (first, second), (first_lse, second_lse) = pair.chunk(2), its_lse.chunk(2)
    _merge(halves[half], logs[half], first, first_lse)
    asked = _asked(coordinate, turn, ranks)
    for index in range(2):
        _merge(halves[index], logs[index], second, second_lse.masked_fill(asked != index, -torch.inf))
    return total


def _halves(x: Tensor) -> Tensor:
    return x.unflatten(2, (2, x.shape[2] // 2))


def _is_late(coordinate: Tensor, ranks: int) -> Tensor:
    """1 where the half that a rank keeps lies behind the one that it is given, else 0."""
    return (2 * coordinate >= ranks).long()


def _asked(coordinate: Tensor, turn: int, ranks: int) -> Tensor:
    """0 where this turn's keys begin before the rank's own rows: the early halves meet; 1: the late ones do."""

    def first(rank: Tensor) -> Tensor:
        return torch.where(2 * rank < ranks, 2 * rank, 2 * ranks - 1 - 2 * rank)

    return (first(torch.remainder(coordinate - turn, ranks)) > first(coordinate)).long()
