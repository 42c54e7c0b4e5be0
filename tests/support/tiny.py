"""The source of a small model, for tests of the command lines, which read models from files."""

TINY = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.up, self.down = nn.Linear(24, width), nn.Linear(width, 24)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)
"""
BUILD = """
def build():
    with torch.device("meta"):
        return Tiny(), (torch.empty(8, 24), torch.empty(8, 24))
"""
