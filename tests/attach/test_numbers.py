"""Numbers that forward takes out of tensors, and what it does with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from autopar import CheckFailed, TraceError
from autopar._compat import pytree
from tests.processes.compare import whole


class Model(nn.Module):
    def __init__(self, does: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(8, 8, dtype=dtype), does

    def forward(self, x: Tensor) -> Any:
        return self.does(self, self.linear(x), x)


def of_numbers(model: Model, h: Tensor, x: Tensor) -> Any:
    n, k = (x > 0).sum().item(), h.abs().max().item()
    numbers = (
        n, k, n + 1, 1 + n, n - k, 3 - n, n * k, n / 7, 7 / n, n // 3, -n % 5, k % 0.3, n**2, k**2, 2.0**k, n**0.5,
        -n, abs(-k), +n, round(k, 2), round(k), k > 1, n == 3, (k > 1) + (n > 1), x[0, 0].item() > 0,
    )  # fmt: skip
    return h.square().mean(), {"numbers": [*numbers], "of each": x.sum(0).tolist(), "of one": h.sum().tolist()}


def taken_ahead_of_writes(model: Model, h: Tensor, x: Tensor) -> Any:
    count, each, largest = (x > 0).sum(), (x > 0).sum(0), h.detach().abs().max()
    n, listed, k = count.item(), each.tolist(), float(largest)
    count += 1
    each.mul_(2)
    largest.add_(n)
    return (h * largest + k).square().mean() * n, {"numbers": [n, k, *listed], "count": count, "each": each.sum()}


def with_tensors(model: Model, h: Tensor, x: Tensor) -> Tensor:
    n, k = (x > 0).sum().item(), h.abs().max().item()
    h = torch.where(x < -1, h.clamp(max=k / 2).masked_fill(x > 1, k), n)
    h = n / (k - 2 * h + h * k - n + h / n).square().add(n + 1)
    h += k
    h = h * torch.tensor(n) + torch.tensor([n, 1.0] * 4).to(h.dtype) + (h > k) * (k < h)
    return h.square().sum() / n


def written(model: Model, h: Tensor, x: Tensor) -> Tensor:
    k = h.abs().max().item()
    h = h.clone()
    h[0] = k
    h[x > 1] = k
    return (h + torch.zeros_like(h).fill_(k)).square().mean()


def kept(model: Any, h: Tensor, x: Tensor) -> Tensor:
    loss = h.square().mean()
    model.last, model.stats = loss.item(), {"loss": [loss.item() * 2], "text": "of one step"}
    return loss


def given_to_functions(model: Model, h: Tensor, x: Tensor) -> Any:
    n = x.max().item()
    made = torch.add(h, x, alpha=n) + torch.sub(h, x, alpha=n / 3) + torch.full_like(h, n) + h.new_full((8,), n / 2)
    made = made.addcmul(x, h, value=n).add_(h, alpha=-n).lerp(h, n / 4) + nn.functional.softmax(h / n, -1)
    return (made.clamp_min(-n) + torch.full((8,), n, dtype=h.dtype) + x.new_tensor(n)).sum(), torch.as_tensor(n)


def in_sums(model: Model, h: Tensor, x: Tensor) -> Any:
    losses = [h.square().mean(), h.abs().mean()]
    total = sum(loss.item() for loss in losses)
    return losses[0] / total + losses[1], total


def of_pythons_functions(model: Model, h: Tensor, x: Tensor) -> Any:
    n, k, i = (x > 0).sum().item(), float(h.detach().abs().max()), int(x.sum() * 3)
    least = min([k, 1.0]), min(n, 5), min(float(n), k, 0.5)
    most = max(n, 1), max(k, 0.5, 2.5), max((i, -2)), max(h.sum().item(), float("-inf"))
    return h.square().sum() * min(k, 2.0) / max(n, 1), [i, k, float(n), int(k), min(max(n, 3), 7), *least, *most]


def trained(plain: Model, parallel: nn.Module, x: Tensor) -> tuple[list[Any], list[Any]]:
    """What both give, keep, and have as gradients: in one list each."""
    told: list[list[Any]] = []
    for model in (plain, parallel):
        made = model(x)
        (made[0] if isinstance(made, tuple) else made).backward()
        kept_here = [getattr(model, name, None) for name in ("last", "stats")]
        gradients = [whole(parameter.grad) for parameter in model.parameters()]
        told.append([*pytree.tree_leaves([made, kept_here, gradients])])
        model.zero_grad()
    return told[0], told[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "does",
    [of_numbers, taken_ahead_of_writes, with_tensors, written, kept, given_to_functions, in_sums, of_pythons_functions],
)
def test_they_are_those_of_python(one: DeviceMesh, does: Callable[..., Any], dtype: torch.dtype) -> None:
    plain = Model(does, dtype)
    parallel = autopar.compile(copy.deepcopy(plain), one)
    for _ in range(2):  # other numbers in each call
        for wanted, found in zip(*trained(plain, parallel, torch.randn(4, 8, dtype=dtype)), strict=True):
            assert isinstance(found, type(wanted)), (wanted, found)
            if isinstance(wanted, (Tensor, bool, int, float)):
                wanted, found = torch.as_tensor(wanted), torch.as_tensor(found)
                assert wanted.dtype == found.dtype
                torch.testing.assert_close(found, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)
            else:
                assert wanted == found


def test_bfloat16_is_multiplied_by_a_number_that_is_not_rounded(one: DeviceMesh) -> None:
    def scaled(model: Model, h: Tensor, x: Tensor) -> Tensor:
        return x * (257.0 / x.abs().sum().item()) + 0 * h

    plain = Model(scaled, torch.bfloat16)
    x = torch.randn(4, 8).bfloat16()
    assert whole(autopar.compile(copy.deepcopy(plain), one)(x)).equal(plain(x))


def test_in_micro_batches_they_are_those_of_the_batch(one: DeviceMesh) -> None:
    def of_the_batch(model: Model, h: Tensor, x: Tensor) -> Any:
        n = (x > 0).sum().item()
        loss = h.square().sum() / n
        return loss, {"n": n, "half": loss.item() / 2}

    plain = Model(of_the_batch, torch.float64)
    parallel = autopar.compile(copy.deepcopy(plain), one, micro_batches=2)
    for wanted, found in zip(*trained(plain, parallel, torch.randn(4, 8).double()), strict=True):
        assert type(found) is type(wanted) or isinstance(found, Tensor)
        if wanted is not None:
            torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(wanted))


def test_a_division_by_zero_ends_the_call_as_in_python(one: DeviceMesh) -> None:
    def share(model: Model, h: Tensor, x: Tensor) -> Any:
        return h.square().mean(), 3 / (x > 1).sum().item()

    parallel = autopar.compile(Model(share, torch.float64), one)
    assert parallel(torch.full((4, 8), 2.5).double())[1] == 3 / 32
    with pytest.raises(CheckFailed, match=r"divides by a number at \S+test_numbers.py:\d+ .*that is 0 in this call"):
        parallel(torch.rand(4, 8).double())


def test_an_int_is_not_made_of_what_is_no_number(one: DeviceMesh) -> None:
    def rounded(model: Model, h: Tensor, x: Tensor) -> Any:
        return h.square().mean(), int(x.sum())

    parallel = autopar.compile(Model(rounded, torch.float64), one)
    assert parallel(torch.full((4, 8), 2.5).double())[1] == 80
    with pytest.raises(CheckFailed, match=r"makes an int at \S+test_numbers.py:\d+ .*of what is no number"):
        parallel(torch.full((4, 8), torch.nan).double())


REFUSED: Mapping[str, Callable[..., Any]] = {
    "at once at .*range": lambda model, h, x: sum(h.square().mean() for _ in range((x > 0).sum().item())),
    "at once at .*: x.sum": lambda model, h, x: h[:, : x.sum().long().item()].sum(),
    "depends on values .*max.*clamp": lambda model, h, x: h.sum() / max(x.max().item(), 1),  # an int, or a float
    "depends on values .* if x.max": lambda model, h, x: h.sum() if x.max().item() > 0 else h.mean(),
    "depends on values .* if x.mean": lambda model, h, x: h.sum() if x.mean() > 0 else h.mean(),
    "given to elu": lambda model, h, x: functional.elu(h, x.max().item()).sum(),
    "returns or keeps text": lambda model, h, x: (h.sum(), f"sum {h.sum().item():.3f}"),
    "keeps text with": lambda model, h, x: setattr(model, "text", f"{x.mean():.3f}") or h.sum(),
}  # fmt: skip


@pytest.mark.parametrize("told", REFUSED)
def test_what_a_program_cannot_decide_is_refused_with_its_line(one: DeviceMesh, told: str) -> None:
    def of_parameters(model: Model, h: Tensor, x: Tensor) -> Any:
        return REFUSED[told](model, h, x + 0 * h.detach())

    with pytest.raises(TraceError, match=told):
        autopar.compile(Model(of_parameters, torch.float64), one)(torch.randn(4, 8).double())


def test_a_number_that_is_written_is_noted(one: DeviceMesh, capsys: pytest.CaptureFixture[str]) -> None:
    def prints(model: Model, h: Tensor, x: Tensor) -> Tensor:
        print(f"mean {x.mean():.3f}", x.max().item(), x)
        return h.square().mean()

    parallel = autopar.compile(Model(prints, torch.float64), one)
    parallel(torch.randn(4, 8).double())
    parallel(torch.randn(4, 8).double())
    assert capsys.readouterr().out == "mean (a value of each call) (a value of each call) (a value of each call)\n"
    assert sum("writes a value into text" in note for note in parallel.plan.notes) == 1
