"""The Optimus paper's table: Megatron's rows simulated, Optimus' rows from the closed form of SUMMA.

Megatron: the stack of layers is traced, planned as tensor parallel over all ranks, and simulated. A rank
of a node reaches the other nodes through one adapter that it shares (`cost_models.price.link_of`).

Optimus: a matrix product on a q x q mesh is a loop of q broadcasts of panels along rows and columns. autopar has the
storage (both dims split over both axes) but not that loop, so its rows are arithmetic:

    elements that a rank receives, per layer    forward  f(p) (7 b s h + 12 h^2)      backward  3 times that
    f(p)     tree broadcasts  log2(p) / (2 sqrt(p))      pipelined broadcasts  1 / sqrt(p)

7 b s h are the inputs of the four products, 12 h^2 their weights; with checkpointing backward runs the forward again
and both products of the gradients. Compute is what the simulator has for the layer's operators, split evenly over the
ranks. Bytes go at the rate of the link inside a node for p = 4, else at a node's adapter; pipelined broadcasts keep two
groups of a node busy at once, which halves it. What an implementation does lies between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import log2, sqrt

import torch
from torch import Tensor, nn

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.work import VIEWS, bytes_moved, flops_of
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.propose.strategies import operand_types
from autopar.simulate.timeline import events_of
from autopar.trace import capture, graph_of
from benchmarks.replay.published import plan_of_megatron
from benchmarks.replay.recompute import checkpointed
from benchmarks.replay.repeat import TRACED, repeated
from benchmarks.replay.rows import read
from cost_models.hardware import Hardware, Link
from cost_models.price import seconds
from cost_models.simulator import play
from cost_models.steps import Compute

BYTES = 4  # float32 throughout


@dataclass(frozen=True, slots=True)
class OptimusRow:
    """One published run; see the data file."""

    name: str
    use: str
    scheme: str
    ranks: int
    width: int
    heads: int
    batch: int
    sequences_per_s: float


@dataclass(frozen=True, eq=False)
class OptimusTable:
    rows: tuple[OptimusRow, ...]
    layers: int
    sequence: int
    hardware: str
    url: str
    date: str
    fitted: Mapping[str, str]  # figure -> row

    def row(self, name: str) -> OptimusRow:
        (found,) = (row for row in self.rows if row.name == name)
        return found


@dataclass(frozen=True, slots=True)
class OptimusPrediction:
    """Sequences per second. Optimus has two: with tree broadcasts, and with `pipelined` ones."""

    row: OptimusRow
    sequences_per_s: float
    pipelined: float | None = None


def optimus() -> OptimusTable:
    """The rows of `optimus.toml`."""
    document = read("optimus.toml")
    source = document["source"]
    rows = tuple(OptimusRow(name, **entry) for name, entry in document["rows"].items())
    return OptimusTable(
        rows, source["layers"], source["sequence"], source["hardware"], source["url"], source["date"],
        document["fitted"],
    )  # fmt: skip


class Layer(nn.Module):
    """A layer of Megatron's ParallelTransformer: scores are materialised. Without dropout and biases of q, k and v."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(width, width)
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (self.split(proj(y)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.softmax(q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5) + mask, -1)
        x = x + self.o_proj((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.norm_2(x))))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Stack(nn.Module):
    """Layers, behind a shift that is trained: so the first one makes a gradient of its input too, as in the script."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.shift
        for layer in self.layers:
            x = layer(x, mask)
        return x.sum()


@cache
def _graph(width: int, heads: int, batch: int, sequence: int) -> Graph:
    with torch.device("meta"):
        model = Stack(TRACED, width, heads)
        x, mask = torch.empty(batch, sequence, width), torch.empty(1, 1, sequence, sequence)
    return checkpointed(graph_of(capture(model, (x, mask), {})), "full", whole=True)


@cache
def plan_of(row: OptimusRow, table: OptimusTable, hardware: Hardware) -> Plan:
    graph = _graph(row.width, row.heads, row.batch, table.sequence)
    return repeated(plan_of_megatron(graph, Mesh(("tensor",), (row.ranks,)), hardware), table.layers)


def with_links(hardware: Hardware, intra: float, inter: float) -> Hardware:
    """The same machine with other bytes per second inside a node, and between nodes per rank."""
    links = {
        "intra": Link(hardware.links["intra"].latency_s, intra),
        "inter": Link(hardware.links["inter"].latency_s, inter),
    }
    return replace(hardware, links=links)


def step_seconds(row: OptimusRow, hardware: Hardware, plan: Plan) -> float:
    """Megatron's step: every collective is waited for where it stands, as its functions do."""
    return play(events_of(plan, Pricer.on(plan.mesh, hardware, plan.optimizer, plan.bucket_bytes))).seconds


def fitted(table: OptimusTable, hardware: Hardware) -> Hardware:
    """The machine with its links fitted: inside a node on one row, between nodes on the other.

    A step's seconds fall with the rate, so bisection finds the rate.
    """
    intra_row, inter_row = (table.row(table.fitted[f"links.{reach}.bytes_per_s"]) for reach in ("intra", "inter"))
    plan = plan_of(intra_row, table, hardware)
    intra = _rate(intra_row, lambda rate: step_seconds(intra_row, with_links(hardware, rate, rate), plan))
    plan_between = plan_of(inter_row, table, hardware)
    inter = _rate(inter_row, lambda rate: step_seconds(inter_row, with_links(hardware, intra, rate), plan_between))
    return with_links(hardware, intra, inter)


def _rate(row: OptimusRow, seconds_at: Callable[[float], float]) -> float:
    low, high = 1e7, 1e12
    wanted = row.batch / row.sequences_per_s
    if not seconds_at(high) < wanted < seconds_at(low):
        raise ValueError(f"no rate of the link gives {wanted:.2f} s a step for row {row.name}")
    while high / low > 1 + 1e-4:
        middle = sqrt(low * high)
        low, high = (middle, high) if seconds_at(middle) > wanted else (low, middle)
    return sqrt(low * high)


def predicted(row: OptimusRow, table: OptimusTable, hardware: Hardware) -> OptimusPrediction:
    """`hardware`: with fitted links."""
    if row.scheme == "megatron":
        seconds_ = step_seconds(row, hardware, plan_of(row, table, hardware))
        return OptimusPrediction(row, row.batch / seconds_)
    tree, pipelined = (
        row.batch / (compute_seconds(row, table, hardware) + broadcast_seconds(row, table, hardware, pipelined=way))
        for way in (False, True)
    )
    return OptimusPrediction(row, tree, pipelined)


def compute_seconds(row: OptimusRow, table: OptimusTable, hardware: Hardware) -> float:
    """Seconds of a step's operators, every one of them split evenly over the ranks."""
    graph = _graph(row.width, row.heads, row.batch, table.sequence)
    total = 0.0
    for node in graph.nodes:
        types = operand_types(node, graph.by_name)
        if not node.is_source and node.op not in VIEWS:
            flops, kind = flops_of(node, types)
            moved = bytes_moved(node, types, node.outputs)
            step = Compute(node.op, flops / row.ranks, moved / row.ranks, "float32", 1, kind)
            total += seconds(step, hardware, {})
    return total * table.layers / TRACED


def broadcast_seconds(row: OptimusRow, table: OptimusTable, hardware: Hardware, *, pipelined: bool) -> float:
    """Seconds of a step's broadcasts and reductions; see the module."""
    root = sqrt(row.ranks)
    share = 1 / root if pipelined else log2(row.ranks) / (2 * root)
    elements = 7 * row.batch * table.sequence * row.width + 12 * row.width**2
    inside = row.ranks <= hardware.ranks_per_node
    node = hardware.ranks_per_node * hardware.links["inter"].bytes_per_s
    rate = hardware.links["intra"].bytes_per_s if inside else node / (2 if pipelined else 1)
    return table.layers * 4 * share * elements * BYTES / rate
