"""The smallest example for the search: an MLP in plain PyTorch.

    python -m autopar.search examples/mlp.py:build --mesh data=2,tensor=4 --hardware h100-sxm --precision bf16

Shapes only: nothing is fetched or allocated.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Mlp(nn.Module):
    """Residual blocks of two linear layers; returns the loss, so that the search sees a whole training step."""

    def __init__(self, layers: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, hidden) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(hidden, width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(functional.relu(up(x)))
        return functional.mse_loss(x, y)


def build(layers: int = 4, width: int = 4096, hidden: int = 16384, batch: int = 8192) -> tuple[Mlp, tuple[Tensor, ...]]:
    with torch.device("meta"):
        return Mlp(layers, width, hidden), (torch.empty(batch, width), torch.empty(batch, width))
