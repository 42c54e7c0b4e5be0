"""What is timed on each rank by itself: products, attention, convolution, operators over memory, copies, optimizers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar.calibrate.attentions import attentions
from autopar.calibrate.bench import Bench, Made, in_turn, name_of, nbytes_of, work
from autopar.emit import ops
from autopar.ir.equation import EINSUM, equation_of
from autopar.machine.device import host_threads, threads
from autopar.price.pricer import OPTIMIZER_STATES
from cost_models.steps import Compute, Move

AROUND_MALLOC = (30 * 2**20, 2**25)  # results from 32 MiB on glibc puts into new pages each time
TRAINED_BYTES = 2**27  # of parameters with gradients and states: a step's optimizer finds little of them in caches
# Beside a GPU: caches of servers hold some hundred MB (an H200's host updated 128 MiB at twice the rate of its memory),
# and embeddings are parameters of up to some GB.
ON_HOST_BYTES, LARGE_ON_HOST = 2**30, (2**26, 2**28)
WIDTH, WIDTH_ON_CUDA = 256, 1024  # of the rows of softmax, norms and losses
CLASSES_ON_CUDA = 32768  # of losses that are large: other kernels than for narrow rows


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
    return work(EINSUM, "matmul", flops, ops.einsum, equation, a, b, held=held)


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
        yield work(str(conv), "conv", flops, conv, x, w, None, *rest, own=True, held=held)
        yield work(str(back), "conv", flops, back, g, x, w, None, *rest, [True, True, False], own=True, held=held)


def streams(device: torch.device, dtype: torch.dtype) -> Made:
    """Memory without a fresh result: reads two tensors, writes a third over and over."""
    for size in ladder(device, 2**14, 2**26, 4):
        a, b, c = (torch.ones(size // 3 // dtype.itemsize, device=device, dtype=dtype) for _ in range(3))
        step = Compute("stream", 0.0, float(nbytes_of((a, b, c))), name_of(dtype), 1, "stream")
        yield Bench(f"stream.{name_of(dtype)}", step, partial(torch.add, a, b, out=c))


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
        yield work("aten.add.Tensor", "elementwise", float(n), aten.add.Tensor, a, b, held=held)


def ladder(device: torch.device, least: int, most: int, factor: int) -> list[int]:
    """Sizes from `least` to `most` bytes; a GPU needs larger ones to be busy."""
    if device.type == "cuda":
        most *= 16
    found = [least]
    while found[-1] * factor <= most:
        found.append(found[-1] * factor)
    return found


def _operators(n: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(operator, its arguments) on tensors of about n elements."""
    width = WIDTH_ON_CUDA if device.type == "cuda" else WIDTH
    rows = max(1, n // width)
    n = rows * width
    x, g = (torch.rand(rows, width, device=device).to(dtype) for _ in range(2))
    vector = torch.ones(width, device=device, dtype=dtype)
    for name in ("gelu", "tanh", "silu", "relu", "exp", "sigmoid", "rsqrt", "neg"):
        yield f"aten.{name}.default", (x,)
    yield "aten.pow.Tensor_Scalar", (x, 3.0)
    yield "aten.mul.Scalar", (x, 0.5)
    yield "aten.div.Scalar", (x, 3.0)
    for name in ("gelu", "tanh", "silu", "sigmoid"):
        yield f"aten.{name}_backward.default", (g, x)
    yield "aten.threshold_backward.default", (g, x, 0)
    yield "aten.sum.dim_IntList", (x, [0])
    yield "aten.clone.default", (x.view(rows // 4 or 1, -1, width).transpose(0, 1),)
    yield "aten._softmax.default", (x, -1, False)
    yield "aten._safe_softmax.default", (x, -1)
    yield "aten._softmax_backward_data.default", (g, x, -1, dtype)
    yield from _losses(n, device, dtype)
    yield "aten.native_layer_norm.default", (x, [width], vector, vector, 1e-5)
    _, mean, rstd = torch.ops.aten.native_layer_norm.default(x, [width], vector, vector, 1e-5)
    yield "aten.native_layer_norm_backward.default", (g, x, [width], mean, rstd, vector, vector, [True, True, True])
    labels = torch.randint(0, width, (rows,), device=device)
    yield "aten.embedding_dense_backward.default", (g, labels, max(width, rows), -1, False)
    image = x.view(-1, 16, 4, 4)
    pooled, places = torch.ops.aten.max_pool2d_with_indices.default(image, [2, 2], [2, 2])
    yield "aten.max_pool2d_with_indices.default", (image, [2, 2], [2, 2])
    given = (pooled, image, [2, 2], [2, 2], [0, 0], [1, 1], False, places)
    yield "aten.max_pool2d_with_indices_backward.default", given


def _losses(n: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    width = WIDTH if device.type != "cuda" else CLASSES_ON_CUDA if n >= 2**22 else WIDTH_ON_CUDA
    rows = max(1, n // width)
    x, g = (torch.rand(rows, width, device=device).to(dtype) for _ in range(2))
    labels = torch.randint(0, width, (rows,), device=device)
    yield "aten._log_softmax.default", (x, 1, False)
    yield "aten._log_softmax_backward_data.default", (g, x, 1, dtype)
    total = torch.tensor(float(rows), device=device).to(dtype)
    yield "aten.nll_loss_forward.default", (x, labels, None, 1, -100)
    yield "aten.nll_loss_backward.default", (total, x, labels, None, 1, -100, total)


def operators(device: torch.device, dtype: torch.dtype) -> Made:
    """Operators that are not as quick as their bytes: each has its own curve."""
    on_cpu, on_cuda = (2**14, 2**17, 2**19, 2**20, 2**23), (2**14, 2**20, 2**25, 2**23, 2**27)
    for size, held in zip(on_cuda if device.type == "cuda" else on_cpu, (0, 0, 1, 0, 0), strict=True):
        for op, args in _operators(size // dtype.itemsize, device, dtype):
            _, name, overload = op.split(".")
            target = getattr(getattr(torch.ops.aten, name), overload)
            yield work(op, "elementwise", 0.0, target, *args, own=True, held=held)
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size in ladder(device, 2**13, 2**25, 8):  # the copies around collectives, as `Reshard.steps` counts them
        x = torch.ones(4, max(2, size // 4 // dtype.itemsize), device=device, dtype=dtype)
        for op, call, args, moved in (
            ("reorder", ops.to_front, (x, 1, 2), 2 * nbytes_of(x)),
            ("slice", ops.piece, (x, 1, 2, index), nbytes_of(x)),
        ):
            step = Compute(op, 0.0, float(moved), name_of(dtype), 1, "elementwise")
            yield Bench(f"ops.{op}.{name_of(dtype)}", step, in_turn(call, args, moved // 2))


def optimizers(device: torch.device, mesh: DeviceMesh | None) -> Made:
    """AdamW's step of parameters kept as training keeps them: DTensors. And fused AdamW in the host's memory."""
    passes = 3 + 2 * OPTIMIZER_STATES["adamw"]
    ways: list[tuple[str, str, dict[str, Any], torch.device, bool]] = [
        ("optimizer", "elementwise", {}, device, True),
        ("optimizer_foreach", "elementwise", {"foreach": True}, device, True),
        ("optimizer_fused", "elementwise", {"fused": True}, device, True),
        ("optimizer", "host", {"fused": True} if device.type == "cuda" else {}, torch.device("cpu"), False),  # Streamed
    ]
    sizes = (2**10, 2**14, 2**18, 2**20, 2**22, 2**24)
    for op, kind, options, where, as_training in ways:
        beside_gpu = kind == "host" and device.type == "cuda"
        more = LARGE_ON_HOST if beside_gpu else () if options else (*AROUND_MALLOC, 2**26)
        for size in (*sizes, *more):
            trained = ON_HOST_BYTES if beside_gpu else TRAINED_BYTES
            parameters = max(2, min(64, trained // (4 * size)))  # four: it, its gradient, its states
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
            if beside_gpu:
                update = partial(_with_threads, host_threads(size // 4), update)
            yield Bench(curve, step, update, counts=parameters)


def _with_threads(count: int, call: Callable[[], object]) -> object:
    with threads(count):
        return call()


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
        about = name_of(dtype)
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
        found.append((f"attention, {name_of(dtype)}", attentions(device, dtype)))
        found.append((f"convolution, {name_of(dtype)}", convolutions(device, dtype)))
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
