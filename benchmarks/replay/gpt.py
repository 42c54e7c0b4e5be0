"""GPT as Megatron-LM of 2021 to 2023 trained it, as a graph: half-precision weights, attention in single operators.

Scores are materialised, softmax and its dropout are operators of their own, logits go to float32 for the loss. Weights
of q, k and v are three here and one in Megatron, the embedding of words and the head two and one: the same products.
Kernels are the ones that Megatron had written or compiled: scale, mask and softmax; bias and gelu; bias, dropout and
the residual sum; norms. Dropout of probabilities is a kernel of its own. Left out: biases of q, k, v, embedded places.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from autopar.ir.graph import Graph, Node
from autopar.trace import capture, graph_of
from benchmarks.replay.recompute import layer_of
from benchmarks.replay.repeat import TRACED

DROPOUT = 0.1


class Core(nn.Module):
    """Attention between the projections: what selective recomputing runs again."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(DROPOUT)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        scores = torch.softmax(q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5) + mask, -1)
        return (self.drop(scores) @ v).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(width, width)
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.core, self.drop_1, self.drop_2 = Core(heads), nn.Dropout(DROPOUT), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm_1(x)
        x = x + self.drop_1(self.o_proj(self.core(self.q_proj(y), self.k_proj(y), self.v_proj(y), mask)))
        return x + self.drop_2(self.down_proj(nn.functional.gelu(self.up_proj(self.norm_2(x)))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.drop = nn.Dropout(DROPOUT)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = self.drop(self.embed_tokens(ids))
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.lm_head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@cache
def gpt(width: int, heads: int, vocabulary: int, batch: int, sequence: int, layers: int = TRACED) -> Graph:
    """One micro-batch, forward and backward, all in float16 but the loss."""
    with torch.device("meta"):
        model = GPT(layers, width, heads, vocabulary).half()
        ids = torch.empty(batch, sequence, dtype=torch.long)
        mask = torch.empty(1, 1, sequence, sequence, dtype=torch.float16)
    return graph_of(capture(model, (ids, mask, ids), {}))


def kernel_of(node: Node) -> tuple[int | None, str] | None:
    """Which of Megatron's kernels an operator is part of; None: it runs by itself."""
    if node.op.startswith(("aten.native_layer_norm", "aten.embedding")):
        return None
    leaf = node.module.rsplit(".", 1)[-1]
    if node.module.endswith("core.drop"):
        return layer_of(node), "dropout of probabilities"
    return layer_of(node), "core" if leaf == "core" else "rest"
