"""Models that take gradients in forward: forces of an energy, and the penalty of a critic."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


class Forces(nn.Module):
    """The energy of atoms, which attend to each other, and the forces on them: what force fields train."""

    def __init__(self, kinds: int = 10, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.kind, self.place = nn.Embedding(kinds, width), nn.Linear(3, width)
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.energy = nn.Linear(width, 2 * width), nn.Linear(2 * width, 1)

    def forward(self, kinds: Tensor, places: Tensor, forces: Tensor) -> tuple[Tensor, Tensor]:
        places = places.detach().requires_grad_()
        hidden = self.kind(kinds) + torch.tanh(self.place(places))
        parts = self.qkv(self.norm(hidden)).unflatten(-1, (3 * self.heads, -1)).transpose(-2, -3).chunk(3, -3)
        with sdpa_kernel(SDPBackend.MATH):  # of others torch has no second derivative
            attended = functional.scaled_dot_product_attention(*parts)
        hidden = hidden + self.proj(attended.transpose(-2, -3).flatten(-2))
        apart = (places[:, :, None] - places[:, None]).square().sum(-1).add(0.1).sqrt()
        energy = self.energy(functional.silu(self.up(hidden))).sum() + torch.exp(-apart).sum()
        (slope,) = torch.autograd.grad(energy, places, create_graph=True)
        return functional.mse_loss(-slope, forces) + 0.01 * energy, slope


class Penalty(nn.Module):
    """A critic of images, the slope of which is to be 1 (Gulrajani et al. 2017)."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            nn.Conv2d(2, channels, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(channels, 2 * channels, 3, stride=2),
            nn.GroupNorm(2, 2 * channels), nn.Softplus(), nn.Flatten(), nn.Linear(18 * channels, 1),
        )  # fmt: skip

    def forward(self, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
        between = (share * real + (1 - share) * fake).requires_grad_(True)
        score = self.critic(between)
        (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty
