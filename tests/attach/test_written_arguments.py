"""Arguments that forward changes in place: the caller has them as the plain model leaves them, with their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

import autopar
from autopar import TraceError
from tests.processes.compare import same_gradients

ROWS, WIDTH, CALLS = 8, 4, 3


class Layer(nn.Module):
    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.token, self.form = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH)), form

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.form(self, x, y)


def labels_that_are_left_out(model: Layer, x: Tensor, y: Tensor) -> Tensor:
    y[y == 0] = -100
    return functional.cross_entropy(model.linear(x), y)


def by_a_parameter(model: Layer, x: Tensor, y: Tensor) -> Tensor:
    x += model.token
    return model.linear(x).square().mean()


def both(model: Layer, x: Tensor, y: Tensor) -> Tensor:
    x[:, 0] = 0
    x.mul_(2)
    y += 1
    return model.linear(x).square().mean()


def activation_in_place(model: Layer, x: Tensor, y: Tensor) -> Tensor:
    return model.linear(functional.leaky_relu(x, inplace=True)).square().mean()


def returned(model: Layer, x: Tensor, y: Tensor) -> Any:
    x -= x.mean(0)
    return model.linear(x).mean(), x, y


def through_a_view(model: Layer, x: Tensor, y: Tensor) -> Any:
    x.t()[:2].copy_(x.t()[2:] * 3)
    y.view(2, -1)[0] = 1
    return model.linear(x).mean(), y.view(2, -1)


def asked_behind(model: Layer, x: Tensor, y: Tensor) -> Tensor:
    y[y < 2] = 0
    return model.linear(x)[: int(y.max()) + 1].square().mean()


def in_a_branch(model: Layer, x: Tensor, y: Tensor) -> Tensor:
    if model.linear(x).sum() > 0:
        x[x < 0] = 0
    return model.linear(x).square().mean()


def kept(model: Layer, x: Tensor, y: Tensor) -> Tensor:
    x *= 2
    model.kept = x  # type: ignore[assignment]
    return model.linear(x).square().mean()


def in_eval_alone(model: Layer, x: Tensor, y: Tensor) -> Tensor:
    if not model.training:
        x.clamp_(0)
    return model.linear(x).square().mean()


FORMS = [
    labels_that_are_left_out, by_a_parameter, both, activation_in_place, returned, through_a_view, asked_behind,
    in_a_branch, kept, in_eval_alone,
]  # fmt: skip


def given(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, WIDTH, (ROWS,), generator=generator)


def outcome(model: nn.Module, x: Tensor, y: Tensor, base: Tensor | None = None) -> list[Tensor]:
    """What a call gives, and leaves in its arguments, of which the first may be made of `base`."""
    made = model(x, y)
    outputs = made if isinstance(made, tuple) else (made,)
    loss = outputs[0] if base is None else outputs[0] + x.square().sum()
    if loss.requires_grad:
        loss.backward()
    same = torch.tensor([one is x or one is y for one in outputs])
    held = [model.kept] if hasattr(model, "kept") else []
    gradients = [base.grad] if base is not None and base.grad is not None else []
    return [*(one.detach() for one in (*outputs, x, y, *held, *gradients)), same, torch.tensor(x.requires_grad)]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"outputs": "sharded"}, marks=pytest.mark.slow), {"inputs": "local"}], ids=str
)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_caller_has_what_forward_makes_of_them(
    one: DeviceMesh, form: Callable[..., Any], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    plain = Layer(form).double()
    parallel = autopar.compile(copy.deepcopy(plain), one, **options)
    for number in range(2 * CALLS):
        found = list[list[Tensor]]()
        for model in (plain, parallel):
            model.train(number != 2).zero_grad()
            x, y = given(number)
            base = x.requires_grad_() if number >= CALLS and options.get("inputs") != "local" else None
            found.append(outcome(model, x if base is None else x * 1.5, y, base))
        for wanted, ours in zip(*found, strict=True):
            ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
            if not (options and wanted.dtype == torch.bool):  # which output is which argument
                torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)
        same_gradients(plain, parallel)


def test_without_gradients_too(one: DeviceMesh) -> None:
    for form in FORMS:
        plain = Layer(form).double()
        parallel, found = autopar.compile(copy.deepcopy(plain), one), list[list[Tensor]]()
        with torch.no_grad():
            for model in (plain, parallel):
                found.append(outcome(model, *given(7)))
        for wanted, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)


def test_in_containers_and_in_micro_batches(one: DeviceMesh) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, batch: dict[str, Any]) -> Tensor:
            batch["x"] += 1
            batch["more"][0].mul_(2)
            return self.linear(batch["x"] + batch["more"][0]).square().mean()

    plain = Nested().double()
    for parallel in (autopar.compile(copy.deepcopy(plain), one, micro_batches=count) for count in (1, 2)):
        plain.zero_grad()
        batches = [{"x": given(1)[0], "more": [given(2)[0]]} for _ in (plain, parallel)]
        for model, batch in zip((plain, parallel), batches, strict=True):
            model(batch).backward()
        for wanted, ours in ((batches[0]["x"], batches[1]["x"]), (batches[0]["more"][0], batches[1]["more"][0])):
            torch.testing.assert_close(ours, wanted, rtol=0.0, atol=0.0)
        same_gradients(plain, parallel)


def test_gradients_that_have_gradients(one: DeviceMesh) -> None:
    plain = Layer(by_a_parameter).double()
    parallel, found = autopar.compile(copy.deepcopy(plain), one), list[list[Tensor]]()
    for model in (plain, parallel):
        base, y = given(3)
        base.requires_grad_()
        x = base * 1.5
        loss = model(x, y)
        (by_base,) = torch.autograd.grad(loss, base, create_graph=True)
        (loss + by_base.square().sum() + x.sum()).backward()
        assert base.grad is not None
        found.append([loss.detach(), by_base.detach(), x.detach(), base.grad])
    for wanted, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)
    same_gradients(plain, parallel)


def test_what_cannot_be_changed_is_refused_and_stays(one: DeviceMesh) -> None:
    parallel = autopar.compile(Layer(both).double(), one)
    x, y = given(0)
    parallel(*given(0))
    before, leaf = x.clone(), given(0)[0].requires_grad_()
    retained = leaf * 1
    retained.retain_grad()
    refused: list[tuple[Any, type[Exception], str]] = [
        ((leaf, y), RuntimeError, r"an argument \[8, 4\] in place that is a leaf and requires grad"),
        ((retained, y), RuntimeError, r"an argument \[8, 4\] in place that retains its gradient"),
        (
            (torch.randn(4, 8, dtype=x.dtype).t(), y),
            TraceError,
            "lies in another order than that of its dims, or with gaps",
        ),
        ((x, x), TraceError, r"\[8, 4\] in place, which shares its memory with another argument"),
        ((x, x[0]), TraceError, "shares its memory with another argument of this call"),
        ((DTensor.from_local(x, one, [Replicate()]), y), TraceError, "which is a DTensor in this call.*clone it first"),
    ]
    for arguments, kind, told in refused:
        with pytest.raises(kind, match=told):
            parallel(*arguments)
    assert torch.equal(x, before) and torch.equal(leaf.detach(), before)


@pytest.mark.parametrize("name", ["unsqueeze_", "t_"])
def test_another_shape_is_refused(one: DeviceMesh, name: str) -> None:
    def reshaped(model: Layer, x: Tensor, y: Tensor) -> Tensor:
        getattr(x, name)(*([0] if name == "unsqueeze_" else []))
        return x.square().mean() * model.token.sum()

    with pytest.raises(TraceError, match=r"changes in place how its argument \['x'\] lies"):
        autopar.compile(Layer(reshaped).double(), one)(*given(0))


def left_out(model: Layer, x: Tensor, y: Tensor) -> Tensor:
    y[y == 0] = -100
    x[x > 1] = 0
    return functional.cross_entropy(model.linear(x), y)


def test_labels_that_are_left_out_in_micro_batches(one: DeviceMesh) -> None:
    plain = Layer(left_out).double()
    parallel = autopar.compile(copy.deepcopy(plain), one, micro_batches=2)
    for number in range(CALLS):
        found = list[list[Tensor]]()
        for model in (plain, parallel):
            model.zero_grad()
            found.append(outcome(model, *given(number)))
        for wanted, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)
        same_gradients(plain, parallel)
