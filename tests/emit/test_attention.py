"""The kernels of attention against torch's own formula: numbers where a CPU runs them, shapes on fake CUDA tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar._compat import FakeTensorMode
from autopar.emit import ops
from autopar.ir import attention
from autopar.ir.attention import ATTENTION, ATTENTION_BACKWARD, kernel_of, temporary_bytes
from autopar.ir.graph import Node, Ref, TensorType

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
