"""What is timed on each rank by itself: products, attention, convolution, operators over memory, copies, optimizers."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar.emit import ops
from autopar.ir.equation import EINSUM, equation_of
from autopar.machine.device import host_threads, tf32_here
from autopar.price.pricer import OPTIMIZER_STATES
from cost_models.steps import Compute, Move

ROTATED_BYTES = 40 * 2**20  # of operands that take turns: more than a rank's part of the last cache
AROUND_MALLOC = (30 * 2**20, 2**25)  # results from 32 MiB on glibc puts into new pages each time
KEPT_BYTES = 16 * 2**20  # of results that stay for a while
TRAINED_BYTES = 2**27  # of parameters with gradients and states: a step's optimizer finds little of them in caches
MOST_SETS = 16
WIDTH = 256  # of the rows of softmax, norms and losses


@dataclass(frozen=True)
class Bench:
    """A call to be timed, the step that it is, and the curve to which it counts."""

    curve: str
    step: Compute | Move
    call: Callable[[], object]
    held: bool = False
    counts: int = 1  # how many times the call does the step


Made = Iterator[Bench]


def _nbytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, (tuple, list)) else 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _work(
    op: str, kind: str, flops: float, target: Callable[..., Any], *args: Any, own: bool = False, held: object = False,
) -> Bench:  # fmt: skip
    """The bench of an operator: bytes are those of operands and results; it has its own curve or its kind's."""
    result = target(*args)
    first = result if isinstance(result, Tensor) else result[0]
    dtype = _name(first.dtype)
    if dtype == "float32" and kind in tf32_here(first.device.type):
        dtype = "tf32"
    step = Compute(op, flops, float(_nbytes(args) + _nbytes(result)), dtype, 1, kind)
    call = _in_turn(target, args, _nbytes(result))
    return Bench(f"ops.{op}.{dtype}" if own else f"{kind}.{dtype}", step, call, bool(held))


def _in_turn(target: Callable[..., Any], args: tuple[Any, ...], made: int) -> Callable[[], object]:
    """The call, each time on other operands, and with its last results kept: as in a program, where what an operator
    reads, and where its result will lie, is seldom in the caches. `made`: bytes of the result.
    """
    sets = [args, *(_copied(args) for _ in range(_count(_nbytes(args), _rotated_bytes(args)) - 1))]
    following, kept = itertools.cycle(sets), deque[object](maxlen=_count(made, KEPT_BYTES))

    def call() -> None:
        kept.append(target(*next(following)))

    return call


def _rotated_bytes(args: tuple[Any, ...]) -> int:
    """So many bytes of operands take turns that none is in the last cache when it is read again: on CUDA four times as
    many as its L2 holds.
    """
    device = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
    if device is None or device.type != "cuda":
        return ROTATED_BYTES
    return max(ROTATED_BYTES, 4 * torch.cuda.get_device_properties(device).L2_cache_size)


def _count(nbytes: int, room: int) -> int:
    return max(1, min(MOST_SETS, room // nbytes)) if nbytes else 1


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(map(_copied, value)) if isinstance(value, (tuple, list)) else value


# (m, k, n, held out of the fit); on CUDA each dim is GROWS_ON_CUDA times as large
PRODUCTS = (
    (8, 8, 8, 0), (32, 32, 32, 0), (64, 64, 64, 0), (96, 96, 96, 1), (128, 128, 128, 0), (256, 256, 256, 0),
    (384, 384, 384, 1),
    (512, 512, 512, 0), (1024, 1024, 1024, 0),
    (4096, 16, 16, 0), (8192, 64, 64, 0), (64, 8192, 64, 0), (64, 64, 8192, 0),
    (2048, 128, 128, 1), (4096, 256, 256, 0),
    (1, 1024, 1024, 0), (4, 1024, 1024, 0), (16, 1024, 1024, 0), (32, 512, 2048, 1), (64, 1024, 2048, 0),
    (2048, 8, 512, 0), (512, 768, 768, 1), (1, 64, 64, 0), (128, 256, 1024, 0), (256, 1024, 256, 1),
)  # fmt: skip
# Weights beyond the caches, and with some results beyond what malloc keeps; on CUDA only m grows.
WIDE = ((16, 2048, 4096, 0), (32, 2048, 2048, 1), (64, 3072, 4096, 0), (32, 4096, 4096, 0), (128, 2048, 2048, 0))
GROWS_ON_CUDA = 8
# Linear forward, its gradient of the input, and of the weight: three ways in which operands lie in memory.
EQUATIONS = ("m k, n k -> m n", "m n, n k -> m k", "m n, m k -> n k")


def products(device: torch.device, dtype: torch.dtype) -> Made:
    grow = GROWS_ON_CUDA if device.type == "cuda" else 1
    for i, (m, k, n, held) in enumerate(PRODUCTS):
        size = {"m": m * grow, "k": k * grow, "n": n * grow}
        yield _product(EQUATIONS[i % 3 if min(m, k, n) > 1 else 0], size, device, dtype, bool(held))
    for m, k, n, held in WIDE if grow > 1 or dtype is torch.float32 else WIDE[:2]:  # many processors emulate bfloat16
        size = {"m": m * grow, "k": k, "n": n}
        ways = [_product(equation, size, device, dtype, bool(held)) for equation in EQUATIONS]
        yield replace(ways[0], call=partial(_each, [way.call for way in ways]), counts=len(ways))
    for batch, rows, inner, held in ((16, 64, 64, 0), (32, 128, 64, 1), (8, 256, 64, 0), (64, 32, 32, 0)):
        size = {"b": batch, "s": rows * grow, "t": rows * grow, "k": inner}
        yield _product("b s k, b t k -> b s t", size, device, dtype, bool(held))


def _each(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _product(equation: str, size: dict[str, int], device: torch.device, dtype: torch.dtype, held: bool) -> Bench:
    terms = equation_of(equation)
    a, b = (torch.randn([size[n] for n in names], device=device).to(dtype) for names in (terms.left, terms.right))
    flops = 2.0 * math.prod(size.values())
    return _work(EINSUM, "matmul", flops, ops.einsum, equation, a, b, held=held)


def attentions(device: torch.device, dtype: torch.dtype) -> Made:
    """Forward and backward of causal attention as programs run it, (batch, heads, sequence, head size)."""
    shapes = ((1, 4, 64, 64, 0), (2, 4, 128, 64, 0), (1, 8, 192, 64, 1), (1, 4, 512, 64, 0), (1, 2, 256, 32, 0))
    for b, h, s, d, held in shapes:
        if device.type != "cpu":
            b, h, s = 2 * b, 2 * h, 8 * s
        q, k, v, g = (torch.randn(b, h, s, d, device=device).to(dtype) for _ in range(4))
        asked = None, True, d**-0.5, 0.0, False
        one = 2.0 * b * h * s * s * d / 2  # half of the square
        out, lse, _ = ops.attention(q, k, v, *asked)
        yield _work(
            "autopar.attention.causal", "attention", 2 * one, ops.attention, q, k, v, *asked, own=True, held=held
        )
        given = (g, q, k, v, None, out, lse, None, *asked[1:])
        yield _work(
            "autopar.attention_backward.causal",
            "attention",
            5 * one,
            ops.attention_backward,
            *given,
            own=True,
            held=held,
        )


def convolutions(device: torch.device, dtype: torch.dtype) -> Made:
    conv, back = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    for b, c, o, hw, kernel, held in (
        (4, 3, 16, 32, 3, 0), (4, 16, 32, 32, 3, 0), (4, 32, 32, 32, 3, 1), (8, 32, 64, 16, 3, 0),
        (2, 64, 64, 14, 3, 0),
        (8, 64, 128, 8, 1, 0), (16, 3, 32, 32, 3, 0), (16, 32, 32, 32, 3, 0), (1, 128, 128, 28, 3, 1),
    ):  # fmt: skip
        if device.type == "cuda":
            b *= 16
        x, w = (torch.randn(shape, device=device).to(dtype) for shape in ((b, c, hw, hw), (o, c, kernel, kernel)))
        rest = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
        g = torch.randn_like(conv(x, w, None, *rest))
        flops = 2.0 * g.numel() * math.prod(w.shape[1:])
        yield _work(str(conv), "conv", flops, conv, x, w, None, *rest, own=True, held=held)
        yield _work(str(back), "conv", flops, back, g, x, w, None, *rest, [True, True, False], own=True, held=held)


def streams(device: torch.device, dtype: torch.dtype) -> Made:
    """Memory without a fresh result: reads two tensors, writes a third over and over."""
    for size in ladder(device, 2**14, 2**26, 4):
        a, b, c = (torch.ones(size // 3 // dtype.itemsize, device=device, dtype=dtype) for _ in range(3))
        step = Compute("stream", 0.0, float(_nbytes((a, b, c))), _name(dtype), 1, "stream")
        yield Bench(f"stream.{_name(dtype)}", step, partial(torch.add, a, b, out=c))


def elementwise(device: torch.device, dtype: torch.dtype) -> Made:
    """What most operators cost: bytes in and out, the result in fresh memory."""
    aten = torch.ops.aten
    steps = ladder(device, 2**9, 2**27, 2)
    if device.type == "cpu":
        steps = sorted([*steps, *(3 * size for size in AROUND_MALLOC)])
    for i, size in enumerate(steps):
        held = i % 4 == 2 and size < 2**26
        n = max(1, size // 3 // dtype.itemsize)
        a, b = (torch.ones(n, device=device, dtype=dtype) for _ in range(2))
        yield _work("aten.add.Tensor", "elementwise", float(n), aten.add.Tensor, a, b, held=held)


def ladder(device: torch.device, least: int, most: int, factor: int) -> list[int]:
    """Sizes from `least` to `most` bytes; a GPU needs larger ones to be busy."""
    if device.type == "cuda":
        most *= 16
    found = [least]
    while found[-1] * factor <= most:
        found.append(found[-1] * factor)
    return found


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, WIDTH)


def _operators(n: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(operator, its arguments) on tensors of about n elements."""
    rows = max(1, n // WIDTH)
    n = rows * WIDTH
    x, g = (torch.rand(rows, WIDTH, device=device).to(dtype) for _ in range(2))
    vector = torch.ones(WIDTH, device=device, dtype=dtype)
    labels = torch.randint(0, WIDTH, (rows,), device=device)
    for name in ("gelu", "tanh", "silu", "relu", "exp", "sigmoid", "rsqrt", "neg"):
        yield f"aten.{name}.default", (x,)
    yield "aten.pow.Tensor_Scalar", (x, 3.0)
    yield "aten.mul.Scalar", (x, 0.5)
    yield "aten.div.Scalar", (x, 3.0)
    for name in ("gelu", "tanh", "silu", "sigmoid"):
        yield f"aten.{name}_backward.default", (g, x)
    yield "aten.threshold_backward.default", (g, x, 0)
    yield "aten.sum.dim_IntList", (x, [0])
    yield "aten.clone.default", (x.view(rows // 4 or 1, -1, WIDTH).transpose(0, 1),)
    yield "aten._softmax.default", (x, -1, False)
    yield "aten._safe_softmax.default", (x, -1)
    yield "aten._softmax_backward_data.default", (g, x, -1, dtype)
    yield "aten._log_softmax.default", (x, 1, False)
    yield "aten._log_softmax_backward_data.default", (g, x, 1, dtype)
    total = torch.tensor(float(rows), device=device).to(dtype)
    yield "aten.nll_loss_forward.default", (x, labels, None, 1, -100)
    yield "aten.nll_loss_backward.default", (total, x, labels, None, 1, -100, total)
    yield "aten.native_layer_norm.default", (x, [WIDTH], vector, vector, 1e-5)
    _, mean, rstd = torch.ops.aten.native_layer_norm.default(x, [WIDTH], vector, vector, 1e-5)
    yield "aten.native_layer_norm_backward.default", (g, x, [WIDTH], mean, rstd, vector, vector, [True, True, True])
    yield "aten.embedding_dense_backward.default", (g, labels, max(WIDTH, rows), -1, False)
    image = x.view(-1, 16, 4, 4)
    pooled, places = torch.ops.aten.max_pool2d_with_indices.default(image, [2, 2], [2, 2])
    yield "aten.max_pool2d_with_indices.default", (image, [2, 2], [2, 2])
    yield (
        "aten.max_pool2d_with_indices_backward.default",
        (pooled, image, [2, 2], [2, 2], [0, 0], [1, 1], False, places),
    )


def operators(device: torch.device, dtype: torch.dtype) -> Made:
    """Operators that are not as quick as their bytes: each has its own curve."""
    for size, held in ((2**14, 0), (2**17, 0), (2**19, 1), (2**20, 0), (2**23, 0)):
        for op, args in _operators(size // dtype.itemsize, device, dtype):
            _, name, overload = op.split(".")
            target = getattr(getattr(torch.ops.aten, name), overload)
            yield _work(op, "elementwise", 0.0, target, *args, own=True, held=held)
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size in ladder(device, 2**13, 2**25, 8):  # the copies around collectives, as `Reshard.steps` counts them
        x = torch.ones(4, max(2, size // 4 // dtype.itemsize), device=device, dtype=dtype)
        for op, call, args, moved in (
            ("reorder", ops.to_front, (x, 1, 2), 2 * _nbytes(x)),
            ("slice", ops.piece, (x, 1, 2, index), _nbytes(x)),
        ):
            step = Compute(op, 0.0, float(moved), _name(dtype), 1, "elementwise")
            yield Bench(f"ops.{op}.{_name(dtype)}", step, _in_turn(call, args, moved // 2))


def optimizers(device: torch.device, mesh: DeviceMesh | None) -> Made:
    """AdamW's step of parameters kept as training keeps them: DTensors. And fused AdamW in the host's memory."""
    passes = 3 + 2 * OPTIMIZER_STATES["adamw"]
    ways: list[tuple[str, str, dict[str, Any], torch.device, bool]] = [
        ("optimizer", "elementwise", {}, device, True),
        ("optimizer_foreach", "elementwise", {"foreach": True}, device, True),
        ("optimizer_fused", "elementwise", {"fused": True}, device, True),
        ("optimizer", "host", {"fused": True}, torch.device("cpu"), False),
    ]
    sizes = (2**10, 2**14, 2**18, 2**20, 2**22, 2**24)
    for op, kind, options, where, as_training in ways:
        for size in (*sizes, *AROUND_MALLOC, 2**26) if not options else sizes:
            parameters = max(2, min(64, TRAINED_BYTES // (4 * size)))  # four: it, its gradient, its states
            held: list[torch.nn.Parameter] = []
            for _ in range(parameters):
                values: Tensor = torch.zeros(size // 4, device=where)
                gradient: Tensor = torch.ones(size // 4, device=where)
                if mesh is not None and as_training:
                    values, gradient = (DTensor.from_local(t, mesh, [Shard(0)] * mesh.ndim) for t in (values, gradient))
                held.append(torch.nn.Parameter(values))
                held[-1].grad = gradient
            step = Compute(op, 0.0, float(passes * size), "float32", 1, kind)
            curve = "host.float32" if kind == "host" else f"ops.{op}.float32"
            update = torch.optim.AdamW(held, 1e-6, **options).step
            if kind == "host" and device.type == "cuda":
                update = partial(_with_threads, host_threads(), update)
            yield Bench(curve, step, update, counts=parameters)


def _with_threads(threads: int, call: Callable[[], object]) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def copies(device: torch.device) -> Made:
    """Between host and device: pinned, each way alone, then both at once on two streams. On CPU: within memory."""
    for size in ladder(device, 2**12, 2**24, 8):
        step_in, step_out = Move("host", "hbm", size), Move("hbm", "host", size)
        if device.type != "cuda":
            x = torch.ones(size, dtype=torch.uint8)
            yield Bench("copy.h2d", step_in, x.clone)
            yield Bench("copy.d2h", step_out, x.clone)
            continue
        pinned = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        here = torch.ones(size, dtype=torch.uint8, device=device)
        back, there = torch.empty_like(pinned).pin_memory(), torch.ones_like(here)
        side = torch.cuda.Stream(device)
        yield Bench("copy.h2d", step_in, partial(here.copy_, pinned, non_blocking=True))
        yield Bench("copy.d2h", step_out, partial(back.copy_, here, non_blocking=True))
        yield Bench("copy.duplex", step_in, partial(_both_ways, side, back, there, here, pinned))


def _both_ways(side: torch.cuda.Stream, back: Tensor, there: Tensor, here: Tensor, pinned: Tensor) -> None:
    with torch.cuda.stream(side):
        back.copy_(there, non_blocking=True)
    here.copy_(pinned, non_blocking=True)


def settle_memory(device: torch.device) -> None:
    """Let malloc keep what is freed, as in a program that has freed large tensors before (glibc: up to 32 MiB)."""
    if device.type == "cpu":
        for _ in range(3):
            torch.empty(31 * 2**20, dtype=torch.uint8).fill_(1)


def everything(device: torch.device, mesh: DeviceMesh | None) -> Sequence[tuple[str, Made]]:
    """(what it is, its benches), in the order of importance."""
    low = has_bfloat16(device)
    found: list[tuple[str, Made]] = []
    for dtype in (torch.float32, *((torch.bfloat16,) if low else ())):
        about = _name(dtype)
        found += [
            (f"matrix products, {about}", products(device, dtype)),
            (f"memory, {about}", elementwise(device, dtype)),
        ]
    found += [
        ("memory in place", streams(device, torch.float32)),
        ("operators, float32", operators(device, torch.float32)),
    ]
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            found += [("matrix products, tf32", _with_tf32(products(device, torch.float32)))]
        if low:
            found += [("operators, bfloat16", operators(device, torch.bfloat16))]
    for dtype in (torch.float32, *((torch.bfloat16,) if low else ())):
        found.append((f"attention, {_name(dtype)}", attentions(device, dtype)))
        found.append((f"convolution, {_name(dtype)}", convolutions(device, dtype)))
    found += [("AdamW", optimizers(device, mesh)), ("copies", copies(device))]
    return found


def _with_tf32(made: Made) -> Made:
    """The same, made and timed with TF32 allowed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield from made
    finally:
        torch.set_float32_matmul_precision(before)


def probes(device: torch.device) -> Sequence[tuple[str, Made]]:
    """A few of them, to see how much slower compute is among more ranks."""

    def made() -> Made:
        wanted = {(256, 256, 256), (64, 1024, 2048), (128, 128, 128)}
        for i, (m, k, n, _) in enumerate(PRODUCTS):
            if (m, k, n) in wanted:
                yield _product(EQUATIONS[i % 3], {"m": m, "k": k, "n": n}, device, torch.float32, False)
        sizes = ladder(device, 2**9, 2**27, 2)
        yield from itertools.islice(elementwise(device, torch.float32), 0, len(sizes), 3)

    return [("compute among more ranks", made())]


def has_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are worth measuring: not on a GPU that emulates them."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
