"""Small plans, made once: a model of equal layers, traced, and laid out in textbook ways by fixing its parameters."""

import json
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from autopar.ir.graph import Graph
from autopar.ir.layout import REPLICATE, Layout, Shard
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.plan.store import _digest
from autopar.search import Request, search
from autopar.trace import capture, lower, normalise
from cost_models.hardware import Hardware

MESH = Mesh(("data", "tensor"), (4, 2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Token ids and labels in, loss out; `layers` equal blocks, a masked fill with -inf, a buffer, tied weights."""

    def __init__(self, layers: int = 3, width: int = 64, classes: int = 96, act=None) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)
        self.register_buffer("closed", torch.zeros(classes, dtype=torch.bool))
        self.act = act

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        if self.act is not None:
            x = self.act(x)
        scores = self.head(x).masked_fill(self.closed, float("-inf"))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def trace(model: nn.Module, *args, **kwargs) -> Graph:
    return normalise(lower(capture(model, args, kwargs)))


def net_graph(batch: int = 16, length: int = 8, **sizes) -> Graph:
    ids = torch.zeros(batch, length, dtype=torch.int64)
    with torch.device("meta"):
        model = Net(**sizes)
    return trace(model, ids=ids, labels=ids)


def plan_of(graph: Graph, mesh: Mesh = MESH, layout_of: Callable[[str, int], Layout] | None = None, **options) -> Plan:
    """`layout_of(name, number of dims)`: the settled layout of each parameter."""
    fixed = {
        node.target: layout_of(node.target, len(node.outputs[0].shape))
        for node in graph.nodes
        if node.op == "parameter" and layout_of is not None
    }
    return search(graph, mesh, Hardware.load("h100-sxm"), Request(fixed=fixed, tied=True, **options))


def sharded(name: str, ndim: int) -> Layout:
    return Shard(0), REPLICATE


def megatron(name: str, ndim: int) -> Layout:
    """Over the axis tensor: `up` by its output features, `down` by its input features (nn.Linear keeps out x in)."""
    if name.endswith("up.weight") or name.endswith("up.bias"):
        return REPLICATE, Shard(0)
    return REPLICATE, Shard(1) if name.endswith("down.weight") else REPLICATE


def sign(content: dict) -> str:
    """The text of edited content, with a digest that fits: what is wrong with it must be found otherwise."""
    content.pop("digest", None)
    rest = {name: value for name, value in content.items() if name != "autopar_plan"}
    return json.dumps({"autopar_plan": content.get("autopar_plan", 2), "digest": _digest(rest), **rest})
