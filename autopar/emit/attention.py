"""The kernels of attention (`autopar.attention`), each with the same arguments and results.

Which of them runs is picked when a program is emitted (`kernel_of`). Those of torch differ in what they take and give:
grouped heads, the shape of a bias, rows of `lse` that are padded, two numbers or one for the random state. Here they
are made alike.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.ir.attention import block_of, kernel_of
from autopar.ir.graph import TensorType

aten = torch.ops.aten


class Asked(NamedTuple):
    """What goes with the tensors; `autopar.attention` says what each means. `in_parts`: keys and values are a part of
    those that `lse` is of, and backward has to take its probabilities from that.
    """

    causal: bool
    scale: float
    dropout: float
    bias_grad: bool
    in_parts: bool = False


def capability_of(device: str) -> tuple[int, int]:
    """Of the GPU here; of one that has every kernel where programs are written without it."""
    return torch.cuda.get_device_capability() if device == "cuda" and torch.cuda.is_available() else (8, 0)


CUDNN = 91500  # up to this version its numbers are wrong at lengths that 128 does not divide (pytorch issue 169849)
AGAINST = ("TORCH_CUDNN_SDPA_DEPRIORITIZED", "TORCH_CUDNN_SDPA_AVOID_RECOMPILE")  # the latter gives lse other strides


def cudnn_first(device: str) -> bool:
    """Whether cuDNN is to be asked before flash on the GPU here: where torch's own attention asks it first
    (check_prefer_cudnn_attention in its sdp_utils.cpp) and would be let (torch.backends.cuda.enable_cudnn_sdp).
    """
    if device != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return False
    if torch.cuda.get_device_capability() not in ((9, 0), (10, 0), (10, 3)):
        return False
    allowed = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    against = any(os.environ.get(name) == "1" for name in AGAINST)
    return allowed and not against and (torch.backends.cudnn.version() or 0) > CUDNN


def kernel_for(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, asked: Asked, *, cudnn: bool = False
) -> str:  # fmt: skip
    """The kernel that `kernel_of` picks for these tensors: without `cudnn` not cuDNN's, which may be forbidden between
    a forward and a backward call that each pick for themselves.
    """
    return kernel_of(
        q.device.type, _type(q), _type(k), _type(v), None if bias is None else _type(bias).dtype, causal=asked.causal,
        dropout=asked.dropout, bias_grad=asked.bias_grad, capability=capability_of(q.device.type),
        cudnn=cudnn,
    )  # fmt: skip


def _type(tensor: Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


Forward = tuple[Tensor, Tensor, Tensor | None]
Backward = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _rows(*tensors: Tensor | None) -> list[Any]:
    """Kernels want the last dim to be contiguous."""
    return [t if t is None or t.stride(-1) == 1 else aten.contiguous.default(t) for t in tensors]


# --- the CPU's flash kernel -----------------------------------------------------------------------------------------


def cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, asked: Asked) -> Forward:
    q, k, v = _rows(q, k, v)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, asked.causal, attn_mask=bias, scale=asked.scale
    )
    return out, lse, None


def cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    state: Tensor | None, asked: Asked,
) -> Backward:  # fmt: skip
    grad, q, k, v, out = _rows(grad, q, k, v, out)
    made = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, q, k, v, out, lse, 0.0, asked.causal, attn_mask=bias, scale=asked.scale
    )
    return (*made, None)


# --- FlashAttention-2 on CUDA ---------------------------------------------------------------------------------------


def flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, asked: Asked) -> Forward:
    out, lse, _, _, _, _, state, _, _ = aten._scaled_dot_product_flash_attention.default(
        *_rows(q, k, v), asked.dropout, asked.causal, False, scale=asked.scale
    )
    return out, lse, _kept(state.view(torch.int64), q, asked)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    state: Tensor | None, asked: Asked,
) -> Backward:  # fmt: skip
    # Without dropout the kernel reads no state, and takes none for an answer.
    numbers = torch.empty(2, dtype=torch.int64, device=q.device) if state is None else _numbers(state).clone()
    grad, q, k, v, out = _rows(grad, q, k, v, out)
    made = aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], asked.dropout, asked.causal,
        numbers.view(torch.uint64), torch.empty((), dtype=torch.uint64, device=q.device), scale=asked.scale,
    )  # fmt: skip
    return (*made, None)


# --- the memory-efficient kernel on CUDA ----------------------------------------------------------------------------

ROWS = 32  # its lse has rows in multiples of so many
ALIGNED = 8  # the rows of its bias start at multiples of so many elements, and cuDNN's of what it reads: 16 bytes


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, asked: Asked) -> Forward:
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention.default(
        *_rows(q, _each_head(k, q), _each_head(v, q)), _whole(bias, q, k), True, asked.dropout, asked.causal,
        scale=asked.scale,
    )  # fmt: skip
    numbers = torch.stack([seed, offset]).view(torch.int64)
    return out, aten.contiguous.default(lse.narrow(2, 0, q.shape[2])), _kept(numbers, q, asked)


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    state: Tensor | None, asked: Asked,
) -> Backward:  # fmt: skip
    seed, offset = (torch.zeros(2, dtype=torch.int64) if state is None else _numbers(state)).unbind()
    lse = aten.constant_pad_nd.default(lse, (0, -lse.shape[-1] % ROWS), torch.inf)  # as forward fills them
    dq, dk, dv, dbias = aten._scaled_dot_product_efficient_attention_backward.default(
        *_rows(grad, q, _each_head(k, q), _each_head(v, q)), _whole(bias, q, k), *_rows(out), lse, seed, offset,
        asked.dropout,
        [True, True, True, asked.bias_grad], asked.causal, scale=asked.scale,
    )  # fmt: skip
    gradient = dbias.sum_to_size(bias.shape) if bias is not None and asked.bias_grad else None
    return dq, _each_group(dk, k), _each_group(dv, v), gradient


def _whole(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A bias for each batch entry and head, with aligned rows."""
    if bias is None:
        return None
    keys = k.shape[2]
    more = -keys % ALIGNED
    if bias.shape[-1] == 1:
        padded = aten.contiguous.default(bias.expand(*bias.shape[:-1], keys + more))
    else:
        padded = aten.constant_pad_nd.default(bias, (0, more)) if more else bias
    return padded.narrow(-1, 0, keys).expand(q.shape[0], q.shape[1], q.shape[2], keys)


# --- cuDNN ----------------------------------------------------------------------------------------------------------


def cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, asked: Asked) -> Forward:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention.default(
        *_placed(q, k, v), _each_entry(bias, q, k), True, asked.dropout, asked.causal, False, scale=asked.scale
    )
    state = _kept(torch.stack([seed, offset]).view(torch.int64), q, asked) if asked.dropout else None
    return out, lse.squeeze(-1), state


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    state: Tensor | None, asked: Asked,
) -> Backward:  # fmt: skip
    # It reads them with dropout only, but wants them beside the others.
    numbers = torch.zeros(2, dtype=torch.int64, device=q.device) if state is None else _numbers(state)
    seed, offset = numbers.unbind()
    q, k, v = _placed(q, k, v)
    made = aten._scaled_dot_product_cudnn_attention_backward.default(
        _lying_as(q, grad), q, k, v, _lying_as(q, out), aten.contiguous.default(lse).unsqueeze(-1), seed, offset,
        _each_entry(bias, q, k), None, None, q.shape[2], k.shape[2], asked.dropout, asked.causal, scale=asked.scale,
    )  # fmt: skip
    return (*made, None)


def _placed(*tensors: Tensor) -> list[Tensor]:
    """Rows that do not start at 16 bytes stop a GPU with an error that stays, and torch leaves that to who calls."""
    return [t if _starts(t) and _steps(t) else _copied(t) for t in tensors]


def _starts(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or x.storage_offset() % ALIGNED == 0  # Dynamo has no number for it


def _steps(x: Tensor) -> bool:
    steps = [step for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return x.stride(-1) == 1 and all([step > 0 and step % ALIGNED == 0 for step in steps])


def _copied(x: Tensor) -> Tensor:
    return aten.clone.default(x, memory_format=torch.contiguous_format)


def _lying_as(q: Tensor, x: Tensor) -> Tensor:
    """x with its dims in the order in memory of those of q, as forward gives its result. torch keeps the plan of a
    backward call by the strides of q, k and v alone, and reads whatever lies otherwise in the next call wrongly
    (MHAParams in its MHA.cpp).
    """
    strides = q.stride()
    order = sorted(range(4), key=lambda dim: -strides[dim])
    x = x.permute(order)
    x = x if x.is_contiguous() and _starts(x) else _copied(x)
    return x.permute([order.index(dim) for dim in range(4)])


def _each_entry(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


# --- plain products of blocks, on any device ------------------------------------------------------------------------


def math(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, asked: Asked) -> Forward:
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(q.shape[:3], dtype=_wide(q))
    state = drawn = None
    if asked.dropout:
        seed = torch.randint(2**31, (), device=q.device)
        state, drawn = seed.expand(*q.shape[:2], 2).clone(), _generator(seed)
    for at, groups in _blocks(q, k):
        chances = _scores(_cut(q, at), _cut(k, groups), _part(bias, at), asked)
        _write(_cut(lse, at), _probabilities(chances))
        if drawn is not None:
            chances.mul_(_factors(chances, asked.dropout, drawn))
        _write(_cut(out, at), chances @ _wide_heads(_cut(v, groups), chances))
        del chances
    return out, lse, state


def math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    state: Tensor | None, asked: Asked,
) -> Backward:  # fmt: skip
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dbias = torch.zeros_like(bias) if bias is not None and asked.bias_grad else None
    drawn = None if state is None else _generator(_numbers(state).select(0, 0))
    for at, groups in _blocks(q, k):
        query, key, value = _cut(q, at), _cut(k, groups), _cut(v, groups)
        chances = _scores(query, key, _part(bias, at), asked)
        if asked.in_parts:
            chances.sub_(_cut(lse, at).unsqueeze(-1)).exp_()
        else:
            _probabilities(chances)
        wide = _cut(grad, at).to(chances.dtype)
        slopes = wide @ _wide_heads(value, chances).transpose(-1, -2)
        dropped = chances
        if drawn is not None:
            dropped = _factors(chances, asked.dropout, drawn)
            slopes.mul_(dropped)
            dropped.mul_(chances)
        _write(_cut(dv, groups), _each_group(dropped.transpose(-1, -2) @ wide, value))
        del dropped
        means = (wide * _cut(out, at)).sum(-1, keepdim=True)
        slopes.sub_(means).mul_(chances)
        if dbias is not None:
            part = _part(dbias, at)
            part.add_(slopes.sum_to_size(part.shape))
        slopes.mul_(asked.scale)
        _write(_cut(dq, at), slopes @ _wide_heads(key, slopes))
        _write(_cut(dk, groups), _each_group(slopes.transpose(-1, -2) @ query.to(slopes.dtype), key))
        del chances, slopes
    return dq, dk, dv, dbias


Block = tuple[tuple[int, int], tuple[int, int]]  # (first, how many) batch entries, and heads


def _blocks(q: Tensor, k: Tensor) -> list[tuple[Block, Block]]:
    """What is worked on at a time: batch entries and query heads, and the same entries and their kv heads."""
    batch, heads, queries, _ = q.shape
    group = heads // k.shape[1]
    entries, together = block_of(batch, heads, group, queries * k.shape[2])
    found: list[tuple[Block, Block]] = []
    for b in range(0, batch, entries):
        part = b, min(entries, batch - b)
        for head in range(0, heads, together):
            count = min(together, heads - head)
            found.append(((part, (head, count)), (part, (head // group, count // group))))
    return found


def _cut(x: Tensor, block: Block) -> Tensor:
    """A view. (By `narrow`, and written to by an operator: Python's own ways need CUDA for fake CUDA tensors.)"""
    return x.narrow(0, *block[0]).narrow(1, *block[1])


def _write(place: Tensor, values: Tensor) -> None:
    aten.copy_.default(place, values)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, asked: Asked) -> Tensor:
    wide = q.to(_wide(q))
    scores = (wide @ _wide_heads(k, wide).transpose(-1, -2)).mul_(asked.scale)
    if bias is not None:
        scores.add_(bias)
    if asked.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def _probabilities(scores: Tensor) -> Tensor:
    """Their softmax, in their place; zeros for who sees nothing. The logs of the sums of their exponentials are
    returned, from which backward could not make them again: behind a mask of large numbers they lose what counts.
    """
    most = scores.amax(-1, keepdim=True)
    most.masked_fill_(most == -torch.inf, 0.0)
    scores.sub_(most).exp_()
    sums = scores.sum(-1, keepdim=True)
    scores.div_(sums.masked_fill(sums == 0, 1.0))
    logs = sums.log().add_(most).squeeze(-1)
    return logs.masked_fill_(logs == -torch.inf, torch.inf)


def _part(bias: Tensor | None, block: Block) -> Any:
    """What a bias says of a block; one of size 1 says the same of all."""
    if bias is None:
        return None
    for dim, (first, count) in enumerate(block):
        bias = bias if bias.shape[dim] == 1 else bias.narrow(dim, first, count)
    return bias


def _wide(tensor: Tensor) -> torch.dtype:
    """In which scores are made: never in halves."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _wide_heads(x: Tensor, like: Tensor) -> Tensor:
    return _each_head(x, like).to(like.dtype)


def _each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, one for each query head."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, 1)


def _each_group(made: Tensor, like: Tensor) -> Tensor:
    """The sums over query heads that share a kv head."""
    group = made.shape[1] // like.shape[1]
    return made if group == 1 else made.unflatten(1, (-1, group)).sum(2)


def _generator(seed: Tensor) -> torch.Generator:
    generator = torch.Generator(device=seed.device)
    generator.manual_seed(int(seed))
    return generator


def _factors(chances: Tensor, dropout: float, drawn: torch.Generator) -> Tensor:
    """What each probability is multiplied by: 0, or 1 / (1 - dropout)."""
    kept = torch.empty_like(chances, memory_format=torch.contiguous_format)
    if dropout >= 1.0:
        return kept.zero_()
    return kept.bernoulli_(1.0 - dropout, generator=drawn).div_(1.0 - dropout)


def _kept(numbers: Tensor, q: Tensor, asked: Asked) -> Tensor | None:
    """Two numbers of a random state, for each head."""
    return numbers.expand(*q.shape[:2], 2).clone() if asked.dropout else None


def _numbers(state: Tensor) -> Tensor:
    """Those of the first head, which are those of all."""
    return state.flatten(0, 1).select(0, 0)


KERNELS = {
    "cpu": (cpu, cpu_backward),
    "flash": (flash, flash_backward),
    "efficient": (efficient, efficient_backward),
    "cudnn": (cudnn, cudnn_backward),
    "math": (math, math_backward),
}
