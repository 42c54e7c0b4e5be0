"""Models that compute with complex numbers: rotary attention, a Fourier neural operator, and all parts of a number.

No value lies near zero, where absolute values and angles have no derivative.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Rotary(nn.Module):
    """Causal attention as the first Llama has it: queries and keys turned as complex numbers, by a complex buffer."""

    freqs_cis: Tensor

    def __init__(self, width: int = 48, heads: int = 4, sequence: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        pace = 1.0 / 100 ** (torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(sequence), pace)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.freqs_cis[None, :, None, :]).flatten(3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (part.view(b, s, self.heads, -1) for part in self.qkv(self.norm(x)).split(h, -1))
        q, k, v = (part.transpose(1, 2) for part in (self.turned(q), self.turned(k), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.mse_loss(x + self.proj(mixed.transpose(1, 2).reshape(b, s, h)), y)


class Spectral(nn.Module):
    """The lowest `modes` frequencies of an image, mixed by complex weights of their own."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        for name in ("low", "high"):
            drawn = torch.randn(channels, channels, modes, modes, dtype=torch.cfloat) / channels
            self.register_parameter(name, nn.Parameter(drawn))

    def forward(self, x: Tensor) -> Tensor:
        m, sizes = self.modes, x.shape[-2:]
        found = torch.fft.rfft2(x)
        made = torch.zeros(*x.shape[:2], sizes[0], sizes[1] // 2 + 1, dtype=found.dtype, device=x.device)
        made[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, :m, :m], self.low)
        made[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(made, s=sizes)


class Fno(nn.Module):
    """A Fourier neural operator (Li et al. 2021) of two layers."""

    def __init__(self, channels: int = 12, modes: int = 3) -> None:
        super().__init__()
        self.lift, self.proj = nn.Conv2d(2, channels, 1), nn.Conv2d(channels, 1, 1)
        self.spectral = nn.ModuleList(Spectral(channels, modes) for _ in range(2))
        self.beside = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.lift(x)
        for spectral, beside in zip(self.spectral, self.beside, strict=True):
            x = functional.gelu(spectral(x) + beside(x))
        return functional.mse_loss(self.proj(x), y)


class Parts(nn.Module):
    """Complex layers, and the loss of everything that one can ask of a complex number."""

    def __init__(self, width: int = 12, made: int = 24) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(*sizes, dtype=torch.cfloat) for sizes in ((width, made), (made, width)))
        self.shift = nn.Parameter(torch.randn(made, dtype=torch.cfloat))
        self.length, self.turn = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.first(torch.complex(x, y)) + self.shift.conj()
        z = self.second(z * torch.sigmoid(z.abs())) * torch.polar(self.length.exp(), self.turn)
        gram = torch.fft.fft(z.mH @ (z / (3 - 1j)), norm="ortho")
        wave = torch.fft.irfft(z.conj().imag + 1j * z.real, n=15)
        spread = (z.sgn().conj() * x).imag.mean() + z.angle().cos().mean() + torch.exp(1j * z.imag).real.mean()
        return spread + gram.abs().mean() + wave.square().mean() + (2j - z.conj()).abs().mean()
