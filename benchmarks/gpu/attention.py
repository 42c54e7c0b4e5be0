"""Every kernel of attention against the formula in float64 on the CPU, forward and backward, and how fast each is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.emit import ops
from autopar.emit.attention import capability_of, cudnn_first
from autopar.ir.attention import kernel_of
from autopar.ir.graph import TensorType
from benchmarks.gpu.stage import Row, Setting, Wrong, near

SCALE, DROPOUT = 0.3, 0.25
ALLOWED = {torch.float32: 5e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of the largest entry
DTYPES = tuple(ALLOWED)


class Form(NamedTuple):
    heads: int = 4
    kv: int = 4
    queries: int = 128
    keys: int = 128
    d: int = 64
    e: int = 64
    bias: str = ""  # which dims of the bias are of full size, of b, h, s, t
    causal: bool = False


FORMS = {
    "plain": Form(),
    "causal": Form(causal=True),
    "grouped, causal": Form(heads=8, kv=2, causal=True),
    "long, causal": Form(queries=384, keys=384, causal=True),
    "long, oblong": Form(kv=2, keys=384),
    "one kv head": Form(heads=6, kv=1, d=128, e=128),
    "odd length, causal": Form(queries=197, keys=197, causal=True),
    "odd length, oblong": Form(queries=101, keys=197),
    "bias": Form(bias="bhst"),
    "bias of all heads, odd length": Form(queries=197, keys=197, bias="bst"),
    "bias of keys": Form(bias="bt", keys=100),
    "other values": Form(kv=2, e=32, bias="hst"),
    "causal, oblong": Form(queries=64, keys=128, causal=True),
}
PICKED = {"cuda": ("flash", "efficient", "math", "cudnn"), "cpu": ("cpu", "math")}
EXTRA = {"cuda": ("cudnn",), "cpu": ()}  # on what nothing picks it for, an error of it says that nothing may
DROPPED = {"dropout": Form(queries=64, keys=64), "dropout, grouped, causal": Form(8, 2, 64, 64, causal=True)}


def takes(kernel: str, form: Form, dtype: torch.dtype, dropout: float = 0.0) -> bool:
    """What each kernel is for, as `kernel_of` has it."""
    half = dtype != torch.float32
    match kernel:
        case "flash" | "cudnn":
            oblong = form.causal and form.queries != form.keys
            return half and form.d == form.e and not oblong and not (form.bias and kernel == "flash")
        case "cpu":
            return form.d == form.e and not dropout
        case _:
            return True


def extra(kernel: str, form: Form, dtype: torch.dtype, dropout: float = 0.0) -> bool:
    """Whether nothing picks the kernel for this on the GPU here."""
    if kernel not in EXTRA["cuda"]:
        return False
    q, k, v = (
        TensorType((3, n, length, width), str(dtype).removeprefix("torch."))
        for n, length, width in (
            (form.heads, form.queries, form.d), (form.kv, form.keys, form.d), (form.kv, form.keys, form.e)
        )
    )  # fmt: skip
    return kernel != kernel_of(
        "cuda", q, k, v, q.dtype if form.bias else None, causal=form.causal, dropout=dropout, bias_grad=False,
        capability=capability_of("cuda"), cudnn=cudnn_first("cuda"),
    )  # fmt: skip


def made(form: Form, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    b, f = 3, form
    q, k, v = (
        torch.randn(b, n, length, width).to(dtype).to(device)
        for n, length, width in ((f.heads, f.queries, f.d), (f.kv, f.keys, f.d), (f.kv, f.keys, f.e))
    )
    if not form.bias:
        return q, k, v, None
    sizes = {"b": b, "h": f.heads, "s": f.queries, "t": f.keys}
    bias = torch.randn([sizes[dim] if dim in form.bias else 1 for dim in "bhst"])
    return q, k, v, bias.to(dtype).to(device)


def wanted_of(
    leaves: list[Tensor], causal: bool, grad: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The formula in float64 on the CPU; `mask`: what the probabilities are multiplied by."""
    leaves = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    q, k, v = leaves[:3]
    bias = leaves[3] if len(leaves) > 3 else None
    if mask is None:
        with sdpa_kernel(SDPBackend.MATH):
            out = functional.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=SCALE, enable_gqa=True)
    else:
        out = (_scores(leaves, causal).softmax(-1) * mask) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return out, torch.autograd.grad(out, leaves, grad.cpu().double())


def _scores(leaves: list[Tensor], causal: bool) -> Tensor:
    """In float64 on the CPU."""
    q, k, _, *bias = (leaf.cpu().double() for leaf in leaves)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * SCALE
    scores = scores + bias[0] if bias else scores
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def attention(setting: Setting) -> Iterator[Row]:
    torch.manual_seed(0)
    for kernel in PICKED[setting.device]:
        yield from _forms(kernel, setting, extras=False)
    for kernel in PICKED[setting.device]:
        if takes(kernel, FORMS["bias"], torch.float32):
            yield _tried(kernel, "sees nothing", torch.float32, False, lambda k=kernel: _blind(k, setting))
    for kernel in EXTRA[setting.device]:
        yield from _forms(kernel, setting, extras=True)


def _forms(kernel: str, setting: Setting, *, extras: bool) -> Iterator[Row]:
    """Rows of the forms that it takes: of those that it is picked for, or of the others."""
    plain = ((name, form, 0.0, _plain) for name, form in FORMS.items())
    dropped = ((name, form, DROPOUT, _dropped) for name, form in DROPPED.items())
    for name, form, dropout, run in (*plain, *dropped):
        for dtype in DTYPES:
            if takes(kernel, form, dtype, dropout) and extra(kernel, form, dtype, dropout) == extras:
                yield _tried(kernel, name, dtype, extras, lambda f=form, d=dtype, run=run: run(kernel, f, d, setting))


def _tried(kernel: str, form: str, dtype: torch.dtype, may_fail: bool, run: Callable[[], tuple[float, float]]) -> Row:
    row: Row = {"kernel": kernel, "form": form, "dtype": str(dtype).removeprefix("torch.")}
    try:
        out, gradient = run()
    except Wrong as error:
        if may_fail:
            return row | {"out off": "wrong", "gradient off": str(error)}
        raise Wrong(f"{kernel}, {form}, {dtype}: {error}") from None
    except RuntimeError as error:
        if may_fail:
            return row | {"out off": "refused", "gradient off": str(error).splitlines()[0][:100]}
        raise RuntimeError(f"{kernel}, {form}, {dtype}: {error}") from error
    return row | {"out off": out, "gradient off": gradient}


def _plain(kernel: str, form: Form, dtype: torch.dtype, setting: Setting) -> tuple[float, float]:
    q, k, v, bias = made(form, dtype, setting.device)
    bias_grad = bias is not None and kernel in ("math", "efficient") and "h" in form.bias
    asked = form.causal, SCALE, 0.0, bias_grad
    out, lse, state = ops.attention(q, k, v, bias, *asked, kernel)
    grad = torch.randn_like(out)
    found = ops.attention_backward(grad, q, k, v, bias, out, lse, state, *asked, kernel)
    leaves = [q, k, v] if bias is None else [q, k, v, bias]
    wanted, gradients = wanted_of(leaves, form.causal, grad)
    near(lse, _scores(leaves, form.causal).logsumexp(-1), ALLOWED[dtype], "its lse")  # another kernel may read it
    return near(out, wanted, ALLOWED[dtype], "its result"), _worst(found, gradients, dtype, bias_grad)


def _worst(found: Any, wanted: tuple[Tensor, ...], dtype: torch.dtype, bias_grad: bool) -> float:
    names = ("dq", "dk", "dv", "dbias") if bias_grad else ("dq", "dk", "dv")
    return max(
        near(ours, theirs, ALLOWED[dtype], name) for name, ours, theirs in zip(names, found, wanted, strict=False)
    )


def _dropped(kernel: str, form: Form, dtype: torch.dtype, setting: Setting) -> tuple[float, float]:
    """Values that are unit vectors show the probabilities that were kept; backward has to drop the same."""
    q, k, v, _ = made(form, dtype, setting.device)
    v = torch.eye(form.keys, dtype=dtype, device=setting.device).expand(v.shape).contiguous()
    q, k = q / 4, k / 4  # no probability so small that it is zero
    asked = form.causal, SCALE, DROPOUT, False
    out, lse, state = ops.attention(q, k, v, None, *asked, kernel)
    grad = torch.randn_like(out)
    found = ops.attention_backward(grad, q, k, v, None, out, lse, state, *asked, kernel)
    kept = (out != 0).cpu()
    seen = form.queries * (form.queries + 1) / 2 if form.causal else form.queries * form.keys
    share, chance = kept.sum().item() / (q.shape[0] * form.heads * seen), 1 - DROPOUT
    if abs(share - chance) > 6 * (chance * DROPOUT / (q.shape[0] * form.heads * seen)) ** 0.5:
        raise Wrong(f"{share:.4f} of the probabilities are kept, {chance} should be")
    wanted, gradients = wanted_of([q, k, v], form.causal, grad, kept / chance)
    return near(out, wanted, ALLOWED[dtype], "its result"), _worst(found, gradients, dtype, False)


def _blind(kernel: str, setting: Setting) -> tuple[float, float]:
    """A query that sees nothing gets zeros and gives none."""
    q, k, v, bias = made(FORMS["bias"], torch.float32, setting.device)
    assert bias is not None
    bias[:, :, 4] = -torch.inf
    asked = False, SCALE, 0.0, False
    out, lse, _ = ops.attention(q, k, v, bias, *asked, kernel)
    found = ops.attention_backward(torch.randn_like(out), q, k, v, bias, out, lse, None, *asked, kernel)
    if out[:, :, 4].any() or not out[:, :, 5].all() or found[0][:, :, 4].any():
        raise Wrong("a query that sees nothing does not get zeros")
    if not all(x.isfinite().all() for x in found[:3]):
        raise Wrong("gradients beside a query that sees nothing are not finite")
    return 0.0, 0.0


# --- how fast --------------------------------------------------------------------------------------------------------

TOKENS = 16384  # of all sequences together: enough work for every length
LENGTHS = {"cuda": (1024, 2048, 4096, 8192), "cpu": (256,)}
ROUNDS = 10


def times(setting: Setting) -> Iterator[Row]:
    """Milliseconds and flop rates of each kernel: causal or not, grouped heads, dims, lengths; random bfloat16."""
    torch.manual_seed(0)
    tokens = TOKENS if setting.is_cuda else 256
    for kernel in ("flash", "cudnn", "efficient") if setting.is_cuda else ("cpu",):
        for d in (64, 128):
            heads = 2048 // d if setting.is_cuda else 2
            for kv in (heads, max(1, heads // 4)):
                for causal in (False, True):
                    for length in LENGTHS[setting.device]:
                        yield _timed(kernel, (tokens // length, heads, kv, length, d), causal, setting)


def _timed(kernel: str, sizes: tuple[int, int, int, int, int], causal: bool, setting: Setting) -> Row:
    batch, heads, kv, s, d = sizes
    row: Row = {"kernel": kernel, "d": d, "heads": heads, "kv heads": kv, "causal": "yes" if causal else "no", "s": s}
    q, grad = (torch.randn(batch, heads, s, d, dtype=torch.bfloat16, device=setting.device) for _ in range(2))
    k, v = (torch.randn(batch, kv, s, d, dtype=torch.bfloat16, device=setting.device) for _ in range(2))
    asked = causal, d**-0.5, 0.0, False
    flops = 4 * batch * heads * s * s * d / (2 if causal else 1)
    try:
        out, lse, state = ops.attention(q, k, v, None, *asked, kernel)
        forward = seconds(lambda: ops.attention(q, k, v, None, *asked, kernel), setting)
        backward = seconds(
            lambda: ops.attention_backward(grad, q, k, v, None, out, lse, state, *asked, kernel), setting
        )
    except RuntimeError as error:
        return row | dict.fromkeys(("forward ms", "TFLOP/s", "backward ms", "its TFLOP/s"), str(error)[:40])
    return row | {
        "forward ms": round(forward * 1e3, 3), "TFLOP/s": round(flops / forward / 1e12, 1),
        "backward ms": round(backward * 1e3, 3), "its TFLOP/s": round(2.5 * flops / backward / 1e12, 1),
    }  # fmt: skip


def seconds(call: Callable[[], object], setting: Setting, rounds: int = ROUNDS) -> float:
    """The median of some calls, by the device's own clock."""
    found: list[float] = []
    for number in range(rounds + 3):
        if setting.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            one = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            call()
            one = time.perf_counter() - start
        if number >= 3:
            found.append(one)
    return statistics.median(found)
