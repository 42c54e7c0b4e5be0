"""Complex numbers on one process: several steps of training beside plain PyTorch, whatever is asked of a number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.processes.compare import adamw, near, same_gradients, same_steps, sgd
from tests.support.complexes import Fno, Parts, Rotary

MODELS: dict[str, Callable[[], tuple[nn.Module, Mapping[str, Tensor]]]] = {
    "rotary": lambda: (Rotary(16, 2, 6), {name: torch.randn(4, 6, 16) for name in ("x", "y")}),
    "fno": lambda: (Fno(4), {"x": torch.randn(4, 2, 8, 8), "y": torch.randn(4, 1, 8, 8)}),
    "parts": lambda: (Parts(6, 8), {name: torch.randn(4, 5, 6) for name in ("x", "y")}),
}


def both(plain: nn.Module, one: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """The plain model and its parallel module. torch's optimizers refuse gradients that are conjugate views, which some
    of the plain model's are, and none of ours.
    """
    parallel = autopar.compile(plain, one)

    def resolve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.resolve_conj()

    for parameter in plain.parameters():
        parameter.register_post_accumulate_grad_hook(resolve)
    return plain, parallel


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_complex_numbers_trains_as_plain_pytorch_does(one: DeviceMesh, name: str, make) -> None:
    torch.manual_seed(0)
    plain, batch = MODELS[name]()
    losses = same_steps(*both(plain, one), batch, make=make)
    assert losses[-1] != losses[0]


ASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "abs": lambda w, x: w.abs(),
    "angle": lambda w, x: w.angle(),
    "sgn": lambda w, x: w.sgn() * x,
    "conj": lambda w, x: w.conj() * x,
    "conj of a conj": lambda w, x: w.conj().mT.conj() @ x,
    "real": lambda w, x: w.real * x,
    "imag": lambda w, x: w.imag * x,
    "imag of a conj": lambda w, x: w.conj().imag * x,
    "negative of an imag of a conj": lambda w, x: -w.conj().imag * x,
    "polar": lambda w, x: torch.polar(w.real, w.imag) * x,
    "complex": lambda w, x: torch.complex(w.imag, w.real) * x,
    "real of a view": lambda w, x: torch.view_as_real(w)[..., 1] * x.abs(),
    "complex of a view": lambda w, x: torch.view_as_complex(torch.view_as_real(w).mul(2)) * x,
    "adjoint": lambda w, x: w.mH @ x,
    "conj beside it": lambda w, x: w.conj() @ x.mT + w @ x.mH,
    "vdot": lambda w, x: torch.vdot(w.flatten(), x.flatten()),
    "dot": lambda w, x: torch.dot(w.flatten(), x.conj().flatten()),
    "exp": lambda w, x: torch.exp(1j * w.real) * x,
    "number": lambda w, x: (2 - 1j) * w + 1j,
    "quotient": lambda w, x: x / w,
    "power": lambda w, x: w**2 + w.reciprocal() + w.sqrt() + w.log(),
    "power of both": lambda w, x: w**x,
    "product of a row": lambda w, x: w.prod(1) * x.sum(1),
    "mean": lambda w, x: w.mean(1, keepdim=True) * x + w.mean(),
    "variance": lambda w, x: w.var(1) * x.sum(1),
    "norm": lambda w, x: w.norm() * x + torch.linalg.vector_norm(w, dim=1, keepdim=True),
    "tanh": lambda w, x: w.tanh() + w.sigmoid() * x,
    "cosines": lambda w, x: w.cos() * w.sinh() * x,
    "cast to complex": lambda w, x: w.real.to(torch.cfloat) * x,
    "running sum": lambda w, x: w.cumsum(0) * x,
    "parts of it": lambda w, x: w[:, [0, 2]].conj() * x[:, ::3],
    "masked": lambda w, x: w.masked_fill(x.real > 0, 0) + torch.where(x.imag > 0, w, x),
    "lower half": lambda w, x: w.tril() * x.roll(1, 0).flip(1),
    "real set": lambda w, x: _with_real(w, x),
    "einsum": lambda w, x: torch.einsum("ab,cb->ac", w, x.conj()),
    "product and sum": lambda w, x: torch.addmm(x @ x.mT, w, x.mH),
    "batched": lambda w, x: torch.bmm(w.view(2, 2, 6), x.view(2, 6, 2).conj()),
    "convolution": lambda w, x: nn.functional.conv1d(x[None], w[:, :4, None]),
    "outer": lambda w, x: torch.outer(w[0], x[0].conj()) + torch.inner(w, x).sum(),
    "fft": lambda w, x: torch.fft.fft(w) * x,
    "ifft": lambda w, x: torch.fft.ifft(w, norm="ortho") * x,
    "rfft": lambda w, x: torch.fft.rfft(w.real) * x[:, :4],
    "irfft of odd size": lambda w, x: torch.fft.irfft(w, n=7),
    "irfft of even size": lambda w, x: torch.fft.irfft(w.conj(), n=10, norm="forward"),
    "hfft": lambda w, x: torch.fft.hfft(w),
    "ihfft": lambda w, x: torch.fft.ihfft(w.imag, norm="ortho"),
    "fft over both": lambda w, x: torch.fft.fftshift(torch.fft.fft2(w, s=(8, 6), norm="backward")),
    "rfft over both": lambda w, x: torch.fft.irfftn(torch.fft.rfftn(w.real, norm="forward").conj()),
    "short time": lambda w, x: torch.stft(w.real.flatten(), 8, window=torch.ones(8) / 3, return_complex=True),
}


def _with_real(w: Tensor, x: Tensor) -> Tensor:
    made = w.clone()
    made.real = x.imag
    return made * x


class Asked(nn.Module):
    """The loss of one question to a complex weight, whose derivative is complex."""

    def __init__(self, question: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.question, self.weight = question, nn.Parameter(torch.randn(4, 6, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        found = self.question(self.weight, x)
        return (found * torch.arange(1, found.numel() + 1).view(found.shape)).abs().square().mean()


@pytest.mark.parametrize("question", ASKED)
def test_what_is_asked_of_a_complex_weight_has_its_gradient(one: DeviceMesh, question: str) -> None:
    torch.manual_seed(0)
    plain = Asked(ASKED[question])
    x = torch.randn(4, 6, dtype=torch.cfloat)
    same_steps(*both(plain, one), {"x": x}, steps=2)


class Whole(nn.Module):
    """A complex output, of which the caller makes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.cfloat))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x @ self.weight.mT).select(-1, 0) + self.bias + 1j * self.bias


def test_what_is_lazily_conjugated_outside_is_seen_inside(one: DeviceMesh) -> None:
    """Inputs, and the gradients of outputs, may be views that torch has marked as conjugate or negative."""
    torch.manual_seed(0)
    plain, x = Whole(), torch.randn(3, 6, dtype=torch.cfloat)
    parallel = autopar.compile(plain, one, outputs="global")
    for model in (plain, parallel):
        made = model(x.conj())
        (made.conj() * torch.arange(4)).abs().sum().backward()
    near(parallel(x.conj()), plain(x.conj()), 1e-5, "output")
    same_gradients(plain, parallel)


def test_weights_that_are_conjugate_views_are_taken_as_they_look(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Whole()
    plain.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.cfloat).conj())
    plain.bias = nn.Parameter(torch.randn(4, dtype=torch.cfloat).conj().imag)
    assert plain.weight.is_conj() and plain.bias.is_neg()
    parallel = autopar.compile(copy.deepcopy(plain), one, outputs="global")
    x = torch.randn(3, 6, dtype=torch.cfloat)
    for model in (plain, parallel):
        model(x).abs().sum().backward()
    same_gradients(plain, parallel)


class Held(nn.Module):
    """Constants and buffers that are conjugate and negative views."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(4, 6, dtype=torch.cfloat).conj()
        self.weight, self.constant, self.factor = (
            nn.Parameter(torch.randn(6, dtype=torch.cfloat)),
            drawn[0],
            drawn[1].imag,
        )
        self.register_buffer("shift", drawn[2])
        self.register_buffer("scale", drawn[3].imag)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.view_as_real(self.weight * self.constant + self.shift) * x).square().sum() + (
            self.weight * self.factor * self.scale
        ).abs().sum()


def test_constants_and_buffers_that_are_conjugate_views_are_taken_as_they_look(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Held()
    assert plain.constant.is_conj() and plain.scale.is_neg()
    same_steps(*both(plain, one), {"x": torch.randn(6, 2)}, steps=2)


class Pairs(nn.Module):
    """A real weight seen as a complex one, and a complex bias: one gradient is a view of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(4, 6, 2))
        self.bias = nn.Parameter(torch.randn(4, 6, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return ((torch.view_as_complex(self.pairs) + self.bias) * x).abs().square().sum()


def test_a_gradient_that_is_a_view_of_another_has_storage_of_its_own(one: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain, x = Pairs(), torch.randn(4, 6, dtype=torch.cfloat)
    parallel = autopar.compile(plain, one, example_kwargs={"x": x})
    for model in (plain, parallel):
        model(x).backward()
        model.bias.grad.mul_(3)
    same_gradients(plain, parallel)
