"""The functions that emitted code calls besides ATen: products, pieces of tensors for collectives.

Each is a plain function of tensors without rank or group in it; where ranks differ, the difference comes in as a
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.emit.attention import KERNELS, Asked, kernel_for


def _plan(equation: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    left, result = equation.split("->")
    a, b = left.split(",")
    return tuple(a.split()), tuple(b.split()), tuple(result.split())


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """`b s k, n k -> b s n`: one matrix product (batched if a letter stands in all three), without copies of views.

    A dim of size one may be written `1`. Letters of both operands that the result lacks are summed.
    """
    names_a, names_b, names_out = _plan(equation)
    shared = [n for n in names_a if n in names_b and n in names_out and n != "1"]
    summed = [n for n in names_a if n in names_b and n not in names_out and n != "1"]
    rows = [n for n in names_a if n not in names_b and n != "1"]
    columns = [n for n in names_b if n not in names_a and n != "1"]
    size = {n: s for n, s in (*zip(names_a, a.shape, strict=True), *zip(names_b, b.shape, strict=True)) if n != "1"}
    flat_a = _matrix(a, names_a, (shared, rows, summed), size)
    flat_b = _matrix(b, names_b, (shared, summed, columns), size)
    product = torch.bmm(flat_a, flat_b) if shared else torch.mm(flat_a, flat_b)
    made = [*shared, *rows, *columns]
    product = product.reshape([size[n] for n in made])
    wanted = [n for n in names_out if n != "1"]
    if wanted != made:
        product = product.permute([made.index(n) for n in wanted])
    return product if len(wanted) == len(names_out) else product.reshape([size.get(n, 1) for n in names_out])


def _matrix(x: Tensor, names: Sequence[str], parts: Sequence[Sequence[str]], size: dict[str, int]) -> Tensor:
    """x with its dims gathered into the given parts; a leading empty part (no batch) is left out."""
    x = x.reshape([size[n] for n in names if n != "1"]) if "1" in names else x
    have = [n for n in names if n != "1"]
    want = [n for part in parts for n in part]
    if want != have:
        x = x.permute([have.index(n) for n in want])
    shape = [math.prod(size[n] for n in part) for part in parts]
    return x.reshape(shape if parts[0] else shape[1:])


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


def panel(x: Tensor, dim: int, parts: int, number: int) -> Tensor:
    """One of `parts` equal pieces of `dim`, that dim in front, in memory of its own."""
    return in_front(x.narrow(dim, number * (x.shape[dim] // parts), x.shape[dim] // parts), dim)


def in_front(x: Tensor, dim: int) -> Tensor:
    """A contiguous copy with `dim` in front."""
    return x.movedim(dim, 0).clone(memory_format=torch.contiguous_format)


def place_panel(x: Tensor, made: Tensor, dim: int, parts: int, number: int) -> Tensor:
    """Write to `x` where `panel` reads."""
    size = x.shape[dim] // parts
    x.narrow(dim, number * size, size).copy_(made.movedim(0, dim))
    return x


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
    aten = torch.ops.aten
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
    backward = torch.ops.aten.native_batch_norm_backward
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
    its_lse = its_lse.masked_fill(coordinate < turn, -torch.inf)
    both = torch.logaddexp(lse, its_lse)
    total.mul_((lse - both).exp_().unsqueeze(-1))
    total.addcmul_(part, (its_lse - both).exp_().unsqueeze(-1))
    torch.ops.aten.copy_.default(lse, both)  # not by a method: fake CUDA tensors have none where CUDA is not
    return total


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
