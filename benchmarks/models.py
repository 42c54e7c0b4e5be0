"""The models of the benchmarks: each returns (model, keyword arguments of a call, a short description)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """Two wide layers and a classifier."""

    def __init__(self, width: int = 1024, classes: int = 100) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x + self.down(F.gelu(self.up(x)))), y)


class ConvTrunk(nn.Module):
    """A convolution trunk (few weights, large activations) with a large classifier (many weights, small
    activations).
    """

    def __init__(self, channels: int = 32, hidden: int = 4096, classes: int = 1000) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.fc1 = nn.Linear(2 * channels * 8 * 8, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.fc2(F.relu(self.fc1(self.trunk(x).flatten(1)))), y)


class AlexNet(nn.Module):
    """Nine tenths of the work in convolutions, nine tenths of the weights in the classifier (Krizhevsky 2014, "One
    weird trick for parallelizing convolutional neural networks": data-parallel trunk, tensor-parallel classifier).
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.fc1 = nn.Linear(256 * 6 * 6, 4096)
        self.fc2 = nn.Linear(4096, 4096)
        self.head = nn.Linear(4096, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.relu(self.fc2(F.relu(self.fc1(self.trunk(x).flatten(1)))))), y)


class Embeddings(nn.Module):
    """Large embedding tables with an MLP on top, as recommenders have them."""

    def __init__(self, rows: int = 50_000, width: int = 64, tables: int = 4) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.mlp = nn.Sequential(
            nn.Linear(tables * width, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        features = torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        return F.binary_cross_entropy_with_logits(self.mlp(features).squeeze(1), y)


def gpt2(
    layers: int = 4, width: int = 256, batch: int = 8, sequence: int = 128
) -> tuple[nn.Module, dict[str, Tensor], str]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=1024, n_positions=sequence, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    ids = torch.randint(0, 1024, (batch, sequence))
    return (
        GPT2LMHeadModel(config),
        {"input_ids": ids, "labels": ids.clone()},
        f"GPT-2 {layers}x{width}, {batch}x{sequence} tokens",
    )


def mlp(width: int = 1024, batch: int = 64) -> tuple[nn.Module, dict[str, Tensor], str]:
    return (
        Mlp(width),
        {"x": torch.randn(batch, width), "y": torch.randint(0, 100, (batch,))},
        f"MLP {width}, batch {batch}",
    )


def conv(batch: int = 32) -> tuple[nn.Module, dict[str, Tensor], str]:
    data = {"x": torch.randn(batch, 3, 32, 32), "y": torch.randint(0, 1000, (batch,))}
    return ConvTrunk(), data, f"conv trunk + large classifier, batch {batch}"


def alexnet(batch: int = 16) -> tuple[nn.Module, dict[str, Tensor], str]:
    data = {"x": torch.randn(batch, 3, 224, 224), "y": torch.randint(0, 1000, (batch,))}
    return AlexNet(), data, f"AlexNet, 224x224, batch {batch}"


def embeddings(batch: int = 512) -> tuple[nn.Module, dict[str, Tensor], str]:
    data = {"ids": torch.randint(0, 50_000, (batch, 4)), "y": torch.rand(batch)}
    return Embeddings(), data, f"4 tables of 50,000x64 + MLP, batch {batch}"


def tiny() -> tuple[nn.Module, dict[str, Tensor], str]:
    return Mlp(32, 10), {"x": torch.randn(16, 32), "y": torch.randint(0, 10, (16,))}, "MLP 32, batch 16"


MODELS: dict[str, Any] = {
    "gpt2": gpt2, "mlp": mlp, "conv": conv, "alexnet": alexnet, "embeddings": embeddings, "tiny": tiny,
}  # fmt: skip
