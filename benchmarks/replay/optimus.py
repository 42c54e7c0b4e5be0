"""The Optimus paper's table: both schemes planned by their policies and simulated.

Megatron: the stack of layers is traced, planned as tensor parallel over all ranks, and every collective is waited for
where it stands. A rank of a node reaches the other nodes through one adapter that it shares
(`cost_models.price.link_of`).

Optimus: the policy optimus-2d on q x q ranks, so that every product with a weight is a loop over panels
(`autopar.rules.summa`). Its transfers are waited for, too: the published code calls torch.distributed.broadcast and
reduce without async_op (github.com/xuqifan897/Optimus, summa/mpu/layers.py, 2021). The paper's loop broadcasts each
panel from the ranks that have it, where ours gathers and reduce-scatters pieces of it. So the links of both axes are
slowed down by what a broadcast takes more, for each of the two ways to broadcast; an implementation lies between them:

    tree         log2(q) panels one after the other, in place of (q - 1) / q of one
    pipelined    one panel; two groups of a node are busy at once, and share its adapter

A node has 2 x 2 ranks of the grid, as the paper places them. Links are those inside a node for q = 2, else the adapters
of nodes: all of one for a tree, half of it for pipelined broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import isqrt, log2, sqrt

import torch
from torch import Tensor, nn

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.search.request import Request
from autopar.search.search import Question, answer, ask
from autopar.simulate.timeline import timeline_of
from autopar.trace import capture, graph_of
from benchmarks.replay.published import plan_of_megatron
from benchmarks.replay.recompute import checkpointed
from benchmarks.replay.repeat import TRACED, repeated
from benchmarks.replay.rows import read
from cost_models.hardware import Hardware, Link
from cost_models.simulator import Timeline
from cost_models.steps import DEVICE

BYTES = 4  # float32 throughout
DROPOUT = 0.1  # of scores and of what is added to the residual: the scripts' default


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
class Step:
    """Sequences per second of training, and of the forward pass by itself."""

    training: float
    forward: float


@dataclass(frozen=True, slots=True)
class OptimusPrediction:
    """Optimus has two: with tree broadcasts, and with `pipelined` ones. `peak_bytes`: of a rank, of tensors."""

    row: OptimusRow
    step: Step
    peak_bytes: int
    pipelined: Step | None = None


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
    """A layer of Megatron's ParallelTransformer: scores are materialised. Without biases of q, k and v."""

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
        x = x + dropped(self.o_proj((dropped(scores) @ v).transpose(1, 2).flatten(2)))
        return x + dropped(self.down_proj(nn.functional.gelu(self.up_proj(self.norm_2(x)))))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def dropped(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, DROPOUT)


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
    if row.scheme == "megatron":
        plan = plan_of_megatron(graph, Mesh(("tensor",), (row.ranks,)), hardware)
    else:
        plan = answer(_on_a_square(row, graph, hardware), Request(policy="optimus-2d", tied=True))
    return repeated(plan, table.layers)


def _on_a_square(row: OptimusRow, graph: Graph, hardware: Hardware) -> Question:
    side = isqrt(row.ranks)
    return ask(graph, Mesh(("row", "column"), (side, side)), hardware, optimizer="none")


def own_step(row: OptimusRow, table: OptimusTable, hardware: Hardware) -> tuple[Step, Plan]:
    """What the search finds for the model and batch of a row on the same grid; its axes lie as ranks are numbered."""
    graph = _graph(row.width, row.heads, row.batch, table.sequence)
    plan = answer(_on_a_square(row, graph, hardware), Request(tied=True, simulation=True))
    plan = repeated(plan, table.layers)
    return _step(row, timeline_of(plan, _pricer(hardware, plan), plan.prefetch)), plan


def with_links(hardware: Hardware, intra: float, inter: float) -> Hardware:
    """The same machine with other bytes per second inside a node, and between nodes per rank."""
    links = {
        "intra": Link(hardware.links["intra"].latency_s, intra),
        "inter": Link(hardware.links["inter"].latency_s, inter),
    }
    return replace(hardware, links=links)


def step_seconds(row: OptimusRow, hardware: Hardware, plan: Plan) -> float:
    """Megatron's step: every collective is waited for where it stands, as its functions do."""
    return timeline_of(plan, _pricer(hardware, plan)).seconds


def _pricer(hardware: Hardware, plan: Plan) -> Pricer:
    """Of other links than the plan was made with."""
    return Pricer.on(plan.mesh, hardware, plan.optimizer, plan.bucket_bytes)


def _step(row: OptimusRow, timeline: Timeline) -> Step:
    return Step(row.batch / timeline.seconds, row.batch / timeline.phase_seconds["forward"])


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
    plan = plan_of(row, table, hardware)
    if row.scheme == "megatron":
        timeline = timeline_of(plan, _pricer(hardware, plan))
        return OptimusPrediction(row, _step(row, timeline), timeline.memory[DEVICE].peak_bytes)
    tree, pipelined = (_broadcasting(plan, hardware, pipelined=way) for way in (False, True))
    return OptimusPrediction(row, _step(row, tree), tree.memory[DEVICE].peak_bytes, _step(row, pipelined))


def _broadcasting(plan: Plan, hardware: Hardware, *, pipelined: bool) -> Timeline:
    """The plan of Optimus, with panels of its loops that are broadcast; see the module."""
    side = plan.mesh.sizes[0]
    inside = plan.mesh.ranks <= hardware.ranks_per_node
    link = hardware.links["intra" if inside else "inter"]
    rate = link.bytes_per_s if inside else hardware.ranks_per_node * link.bytes_per_s / (2 if pipelined else 1)
    panels = 1.0 if pipelined else log2(side)
    slower = Link(link.latency_s, rate * (side - 1) / side / panels)
    pricer = _pricer(hardware, plan)
    links = dict.fromkeys(pricer.resharder.links, slower)
    return timeline_of(plan, replace(pricer, resharder=pricer.resharder.at(links)))


def most_sequences(one: OptimusPrediction, table: OptimusTable, memory: float) -> float:
    """The largest batch whose tensors fit: parameters and gradients stay, all else grows with the batch. Megatron's
    checkpoints are cut in pieces for it, as its option has it, which its replayed program has not.
    """
    row = one.row
    held = 2 * 12 * row.width**2 * table.layers * BYTES / row.ranks
    grows = one.peak_bytes - held
    if row.scheme == "megatron":
        checkpoints = table.layers * row.batch * table.sequence * row.width * BYTES
        grows -= checkpoints * (1 - 1 / row.ranks)
    return row.batch * (memory - held) / grows
