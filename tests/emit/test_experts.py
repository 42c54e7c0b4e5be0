"""Products of rows with the matrices of their experts, beside one product for each row."""

import pytest
import torch
from torch import Tensor

from autopar._compat import FakeTensorMode
from autopar.emit import experts, ops
from autopar.ir.graph import Ref
from autopar.ir.work import EXPERTS
from tests.rules.harness import make_call

TOKENS, EACH, WIDTH, MADE, COUNT = 40, 3, 16, 24, 6


def chosen(kind: str) -> Tensor:
    """Experts of each token. In all but one case one of them has no token."""
    match kind:
        case "all":
            return torch.randint(0, COUNT, (TOKENS, EACH))
        case "one":
            return torch.full((TOKENS, EACH), 2)
        case "none":
            return torch.full((TOKENS, EACH), COUNT)
        case _:  # as where another rank has some of them
            return torch.randint(-4, COUNT + 3, (TOKENS, EACH)).masked_fill_(torch.rand(TOKENS, EACH) < 0.1, 4)


def each_by_itself(rows: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    here = (ids >= 0) & (ids < COUNT)
    picked = weight[ids.clamp(0, COUNT - 1)]
    made = torch.einsum("tki,tkio->tko", rows.expand(-1, EACH, -1).double(), picked.double())
    return torch.where(here.unsqueeze(-1), made, 0)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("each", [1, EACH])
@pytest.mark.parametrize("kind", ["all", "one", "none", "others"])
@pytest.mark.parametrize("grouped", [False, True])
def test_products_are_those_of_each_row(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, kind: str, each: int, turned: bool
) -> None:
    """By torch's grouped product, too, which a CPU has in bfloat16, and which leaves what is behind the last group."""
    if grouped:
        monkeypatch.setattr(experts, "_takes", lambda *operands: True)
    dtype, off = (torch.bfloat16, 2**-6) if grouped else (torch.float64, 1e-12)
    ids, rows = chosen(kind), torch.randn(TOKENS, each, WIDTH, dtype=dtype)
    weight = torch.randn(COUNT, *((MADE, WIDTH) if turned else (WIDTH, MADE)), dtype=dtype)
    made = ops.expert_mm(rows, weight, ids, turned)
    wide = rows.double().requires_grad_(), weight.double().requires_grad_()
    wanted = each_by_itself(wide[0], wide[1].mT if turned else wide[1], ids)
    torch.testing.assert_close(made.double(), wanted, rtol=off, atol=off * 16)
    grad = torch.randn(TOKENS, EACH, MADE, dtype=dtype)
    of_rows, of_weight = torch.autograd.grad(wanted, wide, grad.double())
    torch.testing.assert_close(
        ops.expert_mm(grad, weight, ids, not turned).double().sum(1, keepdim=True) if each == 1
        else ops.expert_mm(grad, weight, ids, not turned).double(),
        of_rows, rtol=off, atol=off * 32,
    )  # fmt: skip
    left, right = (grad, rows) if turned else (rows, grad)
    given = ops.expert_mm_weight(left, right, ids, COUNT).double()
    torch.testing.assert_close(given, of_weight, rtol=off, atol=off * 64)


@pytest.mark.parametrize(
    ("dtype", "width", "taken"),
    [(torch.bfloat16, 16, True), (torch.bfloat16, 12, False), (torch.float32, 16, False)],
    ids=str,
)
def test_torchs_kernel_takes_whole_strides_of_halves_on_cuda(dtype: torch.dtype, width: int, taken: bool) -> None:
    with FakeTensorMode():
        rows = torch.empty(40, width, dtype=dtype, device="cuda")
        weight = torch.empty(6, 24, width, dtype=dtype, device="cuda").mT
        assert experts._takes(rows, weight) is taken
        assert not experts._takes(rows.cpu(), weight.cpu())


def test_an_expert_has_a_split_of_its_own() -> None:
    rows, weight, ids = torch.randn(12, 1, 6), torch.randn(4, 6, 8), torch.randint(0, 4, (12, 2))
    call = make_call(EXPERTS[0], (rows, weight, ids, False))
    assert isinstance(call.node.args[0], Ref)
    assert call.rule is not None and call.rule.splittable == ("t", "i", "e", "o", "k")
