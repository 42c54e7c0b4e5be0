"""The models of the acceptance list: an MLP, a tied GPT, a half-frozen one, a small ResNet and a mixture of experts.

Biases and scales are random: those that are zero or one hide gradients that are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, SEQUENCE, WIDTH, HEADS, LAYERS, VOCABULARY, CLASSES = 4, 32, 64, 4, 4, 257, 12

Batch = Mapping[str, Any]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 48), nn.Tanh(), nn.Linear(48, 24))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.layers(x), y)


class Layer(nn.Module):
    """Causal attention and what a model has behind it, each with a norm in front."""

    def __init__(self, behind: nn.Module) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # the gradient of a bias of keys is zero, and rounding noise
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (part.view(b, s, HEADS, -1).transpose(1, 2) for part in self.qkv(self.before(x)).split(h, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.behind(self.between(x))


class Gpt(nn.Module):
    """Embeddings, layers, and the first embedding again as the head."""

    def __init__(self, layers: int, behind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.ModuleList(Layer(behind()) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Experts(nn.Module):
    """The best two of four experts for each token, weighted by their scores. All experts see all tokens, and the
    weights of those that were not chosen are zero: which expert a token goes to is a value, not a shape.
    """

    def __init__(self, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.chosen, self.router = chosen, nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        best, which = scores.topk(self.chosen, -1)
        weights = torch.zeros_like(scores).scatter(-1, which, best.softmax(-1))
        made = torch.einsum("bsef,efh->bseh", functional.gelu(torch.einsum("bsh,ehf->bsef", x, self.up)), self.down)
        return (weights.unsqueeze(-1) * made).sum(2)


class Residual(nn.Module):
    def __init__(self, width: int, made: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, made, 3, stride, padding=1, bias=False)
        self.two = nn.Conv2d(made, made, 3, padding=1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(made), nn.BatchNorm2d(made)
        self.beside = nn.Conv2d(width, made, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        made = self.norm_two(self.two(torch.relu(self.norm_one(self.one(x)))))
        return torch.relu(made + self.beside(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.norm(self.stem(x))))
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def _feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def _half_frozen() -> nn.Module:
    """The first of two layers, and the embedding of places."""
    model = Gpt(2, _feed_forward)
    model.places.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


def _text(batch: int) -> Batch:
    ids = torch.randint(0, VOCABULARY, (batch, SEQUENCE + 1))
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "mlp": (Mlp, lambda batch: {"x": torch.randn(batch, 6, 24), "y": torch.randn(batch, 6, 24)}),
    "gpt": (lambda: Gpt(LAYERS, _feed_forward), _text),
    "half-frozen": (_half_frozen, _text),
    "experts": (lambda: Gpt(1, Experts), _text),
    "resnet": (
        ResNet,
        lambda batch: {"x": torch.randn(4 * batch, 3, 8, 8), "labels": torch.randint(0, CLASSES, (4 * batch,))},
    ),
}


def made(name: str, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = NETS[name][0]()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def batch_of(name: str, seed: int, size: int = BATCH) -> Batch:
    with torch.random.fork_rng():
        torch.manual_seed(1000 + seed)
        return NETS[name][1](size)
