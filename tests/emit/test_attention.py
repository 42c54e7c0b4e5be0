"""The kernels of attention against torch's own formula: numbers where a CPU runs them, shapes on fake CUDA tensors."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar._compat import FakeTensorMode
from autopar.emit import attention as kernels
from autopar.emit import emit, ops
from autopar.emit.attention import cudnn_first
from autopar.ir import attention
from autopar.ir.attention import ATTENTION, ATTENTION_BACKWARD, kernel_of, temporary_bytes
from autopar.ir.graph import Node, Ref, TensorType
from tests.emit.test_kernels import run_fake
from tests.support.check import mesh_of
from tests.support.families import Case
from tests.support.plans import PlanSampler

B, S, T, D = 3, 10, 14, 8
# heads, kv heads, dim of values, shape of the bias, causal
FORMS = {
    "plain": (4, 4, D, None, False),
    "causal": (4, 4, D, None, True),
    "grouped": (6, 2, D, None, True),
    "one kv head": (6, 1, D, None, False),
    "bias": (4, 4, D, (B, 4, S, T), False),
    "bias of all heads": (4, 4, D, (B, 1, S, T), False),
    "bias of all entries": (4, 2, D, (1, 4, S, T), False),
    "bias of keys": (4, 4, D, (B, 1, 1, T), False),
    "other values": (4, 2, 12, (1, 1, S, T), False),
    "causal, other values": (6, 3, 4, None, True),
}


def _made(form: str, dtype: torch.dtype, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
    heads, kv, e, bias, causal = FORMS[form]
    q, k, v = torch.randn(B, heads, S, D), torch.randn(B, kv, keys, D), torch.randn(B, kv, keys, e)
    mask = None if bias is None else torch.randn(bias)
    return *(x.to(dtype) for x in (q, k, v)), None if mask is None else mask.to(dtype), causal


def _wanted(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, grad: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *([] if bias is None else [bias]))]
    with sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(
            *leaves[:3], leaves[3] if bias is not None else None, is_causal=causal, scale=0.3, enable_gqa=True
        )
    made = torch.autograd.grad(out, leaves, grad.double())
    return out, [*made, *([None] if bias is None else [])]


# The CPU's kernel takes values as wide as keys, and has blocks of its own.
CASES = [
    (form, kernel, block)
    for form in FORMS
    for kernel, block in (("math", attention.BLOCK), ("math", 300), ("cpu", attention.BLOCK))
    if kernel == "math" or FORMS[form][2] == D
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("form", "kernel", "block"), CASES)
def test_numbers_are_those_of_the_formula(
    form: str, kernel: str, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(sum(map(ord, form)))
    monkeypatch.setattr(attention, "BLOCK", block)
    q, k, v, bias, causal = _made(form, dtype, T if not FORMS[form][4] else S)
    bias_grad = bias is not None and kernel == "math"
    out, lse, state = ops.attention(q, k, v, bias, causal, 0.3, 0.0, bias_grad, kernel)
    grad = torch.randn_like(out)
    made = ops.attention_backward(grad, q, k, v, bias, out, lse, state, causal, 0.3, 0.0, bias_grad, kernel)
    wanted, gradients = _wanted(q, k, v, bias, causal, grad)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-2}[dtype]
    assert state is None and out.dtype == dtype
    assert torch.allclose(out.double(), wanted, atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(made, gradients if bias_grad else [*gradients[:3], None], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.dtype == dtype and ours.shape == theirs.shape
            assert (ours.double() - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("kernel", ["math", "cpu"])
def test_who_sees_nothing_gets_zeros_and_gives_none(kernel: str) -> None:
    q, k, v, bias, _ = _made("bias of all heads", torch.float64, T)
    assert bias is not None
    bias[:, :, 4] = -torch.inf
    out, lse, _ = ops.attention(q, k, v, bias, False, 0.3, 0.0, False, kernel)
    assert not out[:, :, 4].any() and out[:, :, 5].all()
    made = ops.attention_backward(torch.randn_like(out), q, k, v, bias, out, lse, None, False, 0.3, 0.0, False, kernel)
    assert not made[0][:, :, 4].any() and all(x is not None and x.isfinite().all() for x in made[:3])


@pytest.mark.parametrize("form", ["plain", "grouped", "bias", "causal, other values"])
@pytest.mark.parametrize("block", [attention.BLOCK, 300], ids=["whole", "in blocks"])
def test_backward_drops_what_forward_dropped(form: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are unit vectors show the probabilities that were kept, and so the mask."""
    monkeypatch.setattr(attention, "BLOCK", block)
    torch.manual_seed(3)
    q, k, v, bias, causal = _made(form, torch.float64, S if FORMS[form][4] else T)
    v = torch.eye(k.shape[2], dtype=torch.float64).expand(B, v.shape[1], -1, -1)
    asked = bias, causal, 0.3, 0.25, bias is not None
    out, lse, state = ops.attention(q, k, v, *asked, "math")
    mask = (out != 0) / 0.75
    seen = S * (S + 1) / 2 if causal else S * T
    share = (out != 0).sum() / (B * q.shape[1] * seen)
    assert abs(share - 0.75) < 5 * (0.25 * 0.75 / (B * q.shape[1] * seen)) ** 0.5
    grad = torch.randn_like(out)
    made = ops.attention_backward(grad, q, k, v, bias, out, lse, state, *asked[1:], "math")

    leaves = [x.detach().requires_grad_() for x in (q, k, v, *([] if bias is None else [bias]))]
    group = q.shape[1] // k.shape[1]
    scores = leaves[0] @ leaves[1].repeat_interleave(group, 1).transpose(-1, -2) * 0.3
    scores = scores + leaves[3] if bias is not None else scores
    if causal:
        scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    wanted = (scores.softmax(-1) * mask) @ leaves[2].repeat_interleave(group, 1)
    assert torch.allclose(out, wanted, atol=1e-12)
    for ours, theirs in zip(made, torch.autograd.grad(wanted, leaves, grad), strict=False):
        assert ours is not None and torch.allclose(ours, theirs, atol=1e-12)


def test_a_state_draws_the_same_again_and_each_call_other_numbers() -> None:
    q = torch.randn(2, 4, 64, 8)
    torch.manual_seed(1)
    first, second = (ops.attention(q, q, q, None, False, 0.3, 0.5, False)[0] for _ in range(2))
    torch.manual_seed(1)
    assert first.equal(ops.attention(q, q, q, None, False, 0.3, 0.5, False)[0]) and not first.equal(second)


# --- on fake CUDA tensors ---------------------------------------------------------------------------------------------

CUDA = {
    # kernel: dtype, heads, kv heads, dim of values, bias, causal, dropout, bias has a gradient
    "flash": (torch.bfloat16, 8, 2, 16, None, True, 0.1, False),
    "flash, all": (torch.float16, 8, 8, 16, None, False, 0.0, False),
    "efficient": (torch.float32, 8, 2, 16, (1, 8, S, T), False, 0.1, True),
    "efficient, causal": (torch.float32, 8, 8, 24, None, True, 0.0, False),
    "efficient, keys": (torch.bfloat16, 8, 8, 16, (B, 1, 1, T), False, 0.0, False),
    "cudnn": (torch.bfloat16, 8, 4, 16, (1, 1, S, T), False, 0.0, False),
    "cudnn, causal": (torch.bfloat16, 8, 4, 16, None, True, 0.0, False),
    "cudnn, dropout": (torch.float16, 8, 2, 16, None, True, 0.25, False),
    "math": (torch.float64, 8, 2, 12, (1, 1, S, T), False, 0.0, True),
}


@pytest.mark.parametrize("name", CUDA)
def test_kernels_of_cuda_take_and_give_the_same_shapes(name: str) -> None:
    dtype, heads, kv, e, bias, causal, dropout, bias_grad = CUDA[name]
    kernel, keys = name.partition(",")[0], S if causal else T
    with FakeTensorMode():
        q, k, v = (
            torch.empty(B, n, length, width, dtype=dtype, device="cuda")
            for n, length, width in ((heads, S, 16), (kv, keys, 16), (kv, keys, e))
        )
        mask = None if bias is None else torch.empty(bias, dtype=dtype, device="cuda")
        asked = causal, 0.3, dropout, bias_grad
        if kernel != "cudnn":
            assert ops.kernel_for(q, k, v, mask, ops.Asked(*asked)) == kernel
        out, lse, state = ops.attention(q, k, v, mask, *asked, kernel)
        assert (out.shape, out.dtype) == ((B, heads, S, e), dtype)
        assert lse.shape == (B, heads, S) and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (state is None) == (not dropout) and (state is None or state.shape == (B, heads, 2))
        made = ops.attention_backward(torch.empty_like(out), q, k, v, mask, out, lse, state, *asked, kernel)
        for ours, like in zip(made, (q, k, v, mask if bias_grad else None), strict=True):
            assert (ours is None) == (like is None)
            assert ours is None or like is None or (ours.shape, ours.dtype) == (like.shape, like.dtype)


PICKS = [
    # device, dtype, d, e, keys, kv heads, dtype of the bias, causal, dropout, bias has a gradient, capability -> kernel
    (("cpu", "float32", 64, 64, 16, 4, None, True, 0.0, False, (8, 0)), "cpu"),
    (("cpu", "bfloat16", 64, 64, 16, 4, "bfloat16", False, 0.0, False, (8, 0)), "cpu"),
    (("cpu", "float32", 64, 64, 16, 2, None, True, 0.0, False, (8, 0)), "cpu"),
    (("cpu", "float32", 64, 64, 16, 2, "float32", False, 0.0, False, (8, 0)), "math"),
    (("cpu", "float32", 64, 64, 16, 4, None, True, 0.1, False, (8, 0)), "math"),
    (("cpu", "float32", 64, 64, 16, 4, "float32", False, 0.0, True, (8, 0)), "math"),
    (("cpu", "float32", 64, 32, 16, 4, None, False, 0.0, False, (8, 0)), "math"),
    (("cuda", "bfloat16", 128, 128, 16, 2, None, True, 0.1, False, (9, 0)), "flash"),
    (("cuda", "bfloat16", 128, 128, 24, 4, None, True, 0.0, False, (9, 0)), "efficient"),  # aligned at its end
    (("cuda", "bfloat16", 128, 128, 24, 4, None, False, 0.0, False, (9, 0)), "flash"),
    (("cuda", "bfloat16", 128, 128, 16, 4, "bfloat16", False, 0.0, False, (9, 0)), "efficient"),
    (("cuda", "bfloat16", 128, 128, 16, 4, "float32", False, 0.0, False, (9, 0)), "math"),  # its bias is of halves
    (("cuda", "float16", 128, 128, 16, 4, None, True, 0.0, False, (7, 0)), "efficient"),  # flash wants Ampere
    (("cuda", "float32", 64, 64, 16, 4, None, True, 0.0, False, (9, 0)), "efficient"),
    (("cuda", "bfloat16", 320, 320, 16, 4, None, True, 0.0, False, (9, 0)), "efficient"),
    (("cuda", "bfloat16", 12, 12, 16, 4, None, True, 0.0, False, (9, 0)), "math"),  # rows that are not aligned
    (("cuda", "float64", 64, 64, 16, 4, None, True, 0.0, False, (9, 0)), "math"),
]


@pytest.mark.parametrize(("case", "wanted"), PICKS, ids=[f"{case[0]} {case[1]} {kernel}" for case, kernel in PICKS])
def test_the_kernel_is_the_quickest_that_takes_it(case: tuple, wanted: str) -> None:
    device, dtype, d, e, keys, kv, bias, causal, dropout, bias_grad, capability = case
    q, k, v = (TensorType(shape, dtype) for shape in ((2, 4, 16, d), (2, kv, keys, d), (2, kv, keys, e)))
    picked = kernel_of(
        device, q, k, v, bias, causal=causal, dropout=dropout, bias_grad=bias_grad, capability=capability
    )
    assert picked == wanted


BY_CUDNN = ("bfloat16", (8, 16, 1024, 128), (8, 4, 1024, 128), 128, None, True, 0.0)
NOT_BY_CUDNN = [
    # what differs: at which place of the above, what stands there -> kernel
    (0, "float32", "efficient"),
    (4, "bfloat16", "efficient"),
    (6, 0.125, "flash"),  # what it drops is rounded
    (3, 64, "efficient"),
    (2, (8, 4, 2048, 128), "efficient"),  # oblong, causal
    (1, (8, 16, 1088, 128), "efficient"),
    (1, (2**16, 16, 1024, 128), "flash"),
]


def _picked(
    dtype: str, q: tuple[int, ...], k: tuple[int, ...], e: int, bias: str | None, causal: bool, dropout: float,
    cudnn: bool = True,
) -> str:  # fmt: skip
    types = (TensorType(shape, dtype) for shape in (q, k, (*k[:3], e)))
    return kernel_of(
        "cuda", *types, bias, causal=causal, dropout=dropout, bias_grad=False, capability=(9, 0), cudnn=cudnn
    )


def test_cudnn_is_picked_where_torch_asks_it_first() -> None:
    assert _picked(*BY_CUDNN) == "cudnn" and _picked(*BY_CUDNN, cudnn=False) == "flash"
    assert _picked("float16", (1, 4, 128, 8), (1, 4, 128, 8), 8, None, False, 0.0) == "cudnn"
    assert _picked("float16", (1, 4, 128, 64), (1, 4, 384, 64), 64, None, False, 0.0) == "cudnn"
    for place, other, kernel in NOT_BY_CUDNN:
        assert _picked(*BY_CUDNN[:place], other, *BY_CUDNN[place + 1 :]) == kernel


@pytest.mark.parametrize(
    ("queries", "keys", "d"),
    [(1, 128, 64), (128, 1, 64), (197, 197, 64), (192, 192, 64), (128, 192, 64), (128, 128, 136)],
)
def test_cudnn_gets_whole_tiles_and_no_wide_heads(queries: int, keys: int, d: int) -> None:
    """In backward the rest of a tile may make numbers that are not finite."""
    assert _picked("bfloat16", (2, 4, queries, d), (2, 4, keys, d), d, None, False, 0.0) == "flash"


def test_cudnn_is_asked_first_on_the_gpus_and_versions_of_torch_that_ask_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(capability: tuple[int, int], version: int | None) -> bool:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
        return cudnn_first("cuda")

    for name in kernels.AGAINST:
        monkeypatch.delenv(name, raising=False)
    assert first((9, 0), 91900) and first((10, 0), 91501) and first((10, 3), 91900)
    assert not first((8, 0), 91900) and not first((12, 0), 91900) and not first((9, 0), 91500)
    assert not first((9, 0), None) and first((9, 0), 91900) and not cudnn_first("cpu")
    for name in kernels.AGAINST:
        monkeypatch.setenv(name, "1")
        assert not first((9, 0), 91900)
        monkeypatch.setenv(name, "0")
        assert first((9, 0), 91900)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        assert not first((9, 0), 91900)
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert first((9, 0), 91900)
        torch.use_deterministic_algorithms(True)
        assert not first((9, 0), 91900)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_calls_that_pick_for_themselves_leave_cudnn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of one part of the keys each pick when they run."""
    monkeypatch.setattr(kernels, "cudnn_first", lambda device: True)
    with FakeTensorMode():
        q = torch.empty(2, 4, 128, 64, dtype=torch.bfloat16, device="cuda")
        assert ops.kernel_for(q, q, q, None, ops.Asked(True, 0.3, 0.0, False)) == "flash"


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, kv = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.q(x), self.kv(x)))
        return functional.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True).square().mean()


@pytest.mark.parametrize("first", [False, True])
def test_emitted_code_names_the_kernel_of_forward_and_of_backward(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emitting = import_module("autopar.emit.emit")  # the package has the function under this name
    monkeypatch.setattr(emitting, "cudnn_first", lambda device: first and device == "cuda")
    case = Case(Halves().to(torch.bfloat16), {"x": torch.randn(2, 128, 64, dtype=torch.bfloat16)})
    plan = PlanSampler(case.graph, mesh_of(1)).draw(1)
    kernel, other = ("cudnn", "flash") if first else ("flash", "cudnn")
    code = emit(plan, dict.fromkeys(plan.mesh.groups, ""), "cuda").code
    assert code.count(f"'{kernel}'") == 2 and other not in code
    assert "cudnn" not in emit(plan, dict.fromkeys(plan.mesh.groups, ""), "cpu").code
    assert f"aten._scaled_dot_product_{kernel}_attention_backward.default" in map(str, run_fake(plan, "cuda").ops)


# batch, heads, sequence, dim of a head -> as memory has it
LYING = {
    "heads outside": lambda x: x,
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "of one row": lambda x: torch.cat([x, x, x], -1).narrow(-1, 16, 16),
    "beside one number": lambda x: torch.cat([x.flatten(), x.flatten()]).narrow(0, 1, x.numel()).view(x.shape),
    "odd rows": lambda x: torch.cat([x, x[..., :3]], -1).narrow(-1, 0, 16),
    "all the same": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("name", LYING)
@pytest.mark.parametrize("gradient", LYING)
def test_what_backward_of_cudnn_gets_lies_by_its_operands_alone(name: str, gradient: str) -> None:
    """As forward makes the result: torch takes a plan that it has for such operands, whatever the others lie like."""
    q, x = (LYING[how](torch.randn(3, 4, 6, 16)) for how in (name, gradient))
    with FakeTensorMode():
        fake = torch.empty_strided(q.shape, q.stride(), device="cuda", dtype=torch.bfloat16)
        out, _, _ = kernels.cudnn(fake, fake, fake, None, ops.Asked(True, 0.3, 0.0, False))
    (placed,) = kernels._placed(q)
    found = kernels._lying_as(placed, x)
    assert found.equal(x) and placed.equal(q)
    assert found.stride() == torch.empty_like(placed).stride()
    if name != "beside one number":  # the fake one is not
        assert found.stride() == out.stride()
    for made in (placed, found):
        assert made.storage_offset() % 8 == 0 and made.stride(-1) == 1 and all(s % 8 == 0 for s in made.stride()[:-1])
    assert kernels._placed(placed)[0] is placed and kernels._lying_as(placed, found).data_ptr() == found.data_ptr()


@pytest.mark.parametrize("hidden", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_rows_that_a_large_number_hides_are_means(hidden: float) -> None:
    """All keys of a row, as a padded query has it: a thousandth of such a number is lost in float32, and with it the
    log of a sum.
    """
    q, k, v, bias, _ = _made("bias of all heads", torch.float32, T)
    assert bias is not None
    bias[:, :, 4] = hidden
    bias[:, :, 5, 3:] = hidden
    out, lse, _ = ops.attention(q, k, v, bias, False, 0.3, 0.0, True, "math")
    grad = torch.randn_like(out)
    made = ops.attention_backward(grad, q, k, v, bias, out, lse, None, False, 0.3, 0.0, True, "math")
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    with sdpa_kernel(SDPBackend.MATH):
        wanted = functional.scaled_dot_product_attention(*leaves, scale=0.3)
    assert torch.allclose(out, wanted, atol=1e-5)
    for ours, theirs in zip(made, torch.autograd.grad(wanted, leaves, grad), strict=True):
        assert ours is not None and (ours - theirs).abs().max() <= 1e-5 * max(1.0, theirs.abs().max().item())


def test_the_scores_of_a_block_are_all_that_plain_products_hold() -> None:
    """Whatever the batch, and only where that kernel runs."""

    def held(op: str, batch: int, dropout: float, length: int = 512) -> int:
        q = TensorType((batch, 8, length, 64), "float32")
        lse = TensorType(q.shape[:3], "float32")
        more = [q, lse] if op == ATTENTION_BACKWARD else []
        grad = [q] if op == ATTENTION_BACKWARD else []
        types = [*grad, q, q, q, *more]
        refs = [Ref(f"x{i}") for i in range(len(types))]
        tensors = [*refs[: len(grad) + 3], None, *refs[len(grad) + 3 :], *([None] if more else [])]
        return temporary_bytes(Node("a", op, (*tensors, False, 0.1, dropout, False), (), ()), types)

    assert held(ATTENTION, 4, 0.0) == held(ATTENTION_BACKWARD, 4, 0.0) == 0
    scores = 4 * 4 * 512 * 512  # four heads at a time
    small = 4 * 4 * (512 + 512) * (64 + 64)
    assert held(ATTENTION, 4, 0.1) == held(ATTENTION, 64, 0.1) == 2 * scores + small
    assert held(ATTENTION_BACKWARD, 4, 0.1) == 3 * scores + small
    assert held(ATTENTION, 2, 0.1, 16) == 2 * 4 * 2 * 8 * 16 * 16 + 4 * 2 * 8 * 32 * 128  # all of it
