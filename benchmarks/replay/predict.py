"""A row's prediction: its model traced, its plan made as published, priced and simulated on its machine.

Time is that of the event simulator with overlap: weights are gathered one layer ahead, a gradient's reduction is waited
for by the optimizer, everything else where it is read.

Memory is compared with what torchtitan logs, the bytes that PyTorch's caching allocator has reserved, workspaces of
libraries among them (`cost_models.caching_allocator`, `reserve`). It keeps what was freed, but only for the stream that
asked for it first. FSDP2 uses three: the compute stream; one that makes the flat buffers of all-gathers, of which the
root's and the first layer's live together; one for what reduce-scatters give, the gradients, which the optimizer frees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from autopar.ir.graph import Graph, Node, TensorType
from autopar.ir.layout import REPLICATE, local_type
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.simulate.kernels import as_kernels
from autopar.simulate.timeline import events_of
from benchmarks.replay.float8 import FLOAT8, as_float8
from benchmarks.replay.llama import SHAPES, graph_of_model, with_batch
from benchmarks.replay.published import CONTEXT, plan_as_published
from benchmarks.replay.recompute import checkpointed, layer_of
from benchmarks.replay.repeat import TRACED, repeated
from benchmarks.replay.rows import Row
from cost_models.caching_allocator import reserved_by
from cost_models.hardware import Hardware
from cost_models.reserve import workspaces
from cost_models.simulator import COMPUTE as COMPUTE_STREAM
from cost_models.simulator import Event, Hold, play

PREFETCH = 8  # matrix operators of a layer's forward pass: seven products and attention
TENSOR = "comm:tensor"  # the stream of its collectives
PIECES = 8  # of a collective of asynchronous tensor parallel: as many as ranks (torch's symmetric memory kernels)
TRACED_BATCH = 131  # a prime, so that no other size is taken for it
COMPUTE, GATHERS, GRADIENTS = "hbm", "hbm of gathers", "hbm of gradients"


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step, and bytes of one rank.

    `parts`: seconds of the compute stream's work, and of its waiting for each other stream. `held_by`, `reserved_by`:
    bytes by the stream that asked for them, the most that are held at a time and what the caching allocator reserves.
    """

    seconds: float
    parts: Mapping[str, float]
    held_by: Mapping[str, int]
    reserved_by: Mapping[str, int]

    @property
    def held(self) -> int:
        return sum(self.held_by.values())

    @property
    def reserved(self) -> int:
        return sum(self.reserved_by.values())


def with_rate(hardware: Hardware, rate: float, dtype: str = "bfloat16") -> Hardware:
    """The same machine with another rate of half-precision products; those of float8 are slower by as much."""
    rates = dict(hardware.achieved_flops_per_s)
    if FLOAT8 in rates:
        rates[FLOAT8] *= rate / hardware.rate(dtype, "matmul")
    return replace(hardware, achieved_flops_per_s={**rates, dtype: rate})


@cache
def plan_of(row: Row, hardware: Hardware) -> Plan:
    """The row's plan at full length, with the steps of its kernels."""
    shape = SHAPES[row.model]
    graph = with_batch(_graph(row.model, row.sequence), TRACED_BATCH, row.batch, row.sequence)
    graph = checkpointed(graph, row.recompute, keep_sums=row.tensor_ranks > 1, hold_saved=not row.compile)
    plan = as_kernels(plan_as_published(graph, row.mesh, hardware), layer_of if row.compile else _none)
    return repeated(as_float8(plan) if row.float8 else plan, shape["layers"])


@cache
def _graph(model: str, sequence: int) -> Graph:
    return graph_of_model(SHAPES[model], TRACED, TRACED_BATCH, sequence)


def _none(node: Node) -> None:
    return None


def predict(row: Row, hardware: Hardware, plan: Plan) -> Prediction:
    """Play the plan on that machine."""
    events = _events(row, hardware, plan)
    events[0] = replace(events[0], holds=(*events[0].holds, *_root(plan)))
    if row.tensor_ranks > 1:
        events = [_with_loss_parallel(event, plan) for event in events]
    events = [_by_stream(event) for event in events]
    timeline = play(events)
    parts = {"compute": timeline.busy_s[timeline.main], **timeline.exposed_s}
    held = {tier: memory.peak_bytes for tier, memory in timeline.memory.items()}
    return Prediction(timeline.seconds, parts, held, _reserved(events, hardware))


def _reserved(events: list[Event], hardware: Hardware) -> Mapping[str, int]:
    return reserved_by(events, expandable=True, beside={COMPUTE: workspaces(hardware)})


def seconds_of(row: Row, hardware: Hardware, plan: Plan) -> float:
    """Only the seconds."""
    return play(_events(row, hardware, plan)).seconds


def _events(row: Row, hardware: Hardware, plan: Plan) -> list[Event]:
    """In asynchronous tensor parallel collectives are cut into pieces beside their product: one piece is waited for."""
    events = events_of(plan, Pricer.on(row.mesh, hardware, plan.optimizer, plan.bucket_bytes), prefetch=PREFETCH)
    if not row.async_tp:
        return events
    return [replace(one, seconds=one.seconds / PIECES) if one.stream == TENSOR else one for one in events]


def fitted_rate(row: Row, hardware: Hardware, plan: Plan) -> float:
    """The rate of bfloat16 products at which the simulated step takes the seconds of the row.

    Seconds are close to linear in 1 / rate, so a secant in that finds it in a few steps.
    """
    slow, fast = (1 / rate for rate in (hardware.rate("bfloat16", "matmul"), hardware.flops_per_s["bfloat16"]))
    ends = [(inverse, seconds_of(row, with_rate(hardware, 1 / inverse), plan)) for inverse in (fast, slow)]
    for _ in range(8):
        (x0, y0), (x1, y1) = ends[-2:]
        x2 = x1 + (row.seconds - y1) * (x1 - x0) / (y1 - y0)
        ends.append((x2, seconds_of(row, with_rate(hardware, 1 / x2), plan)))
        if abs(ends[-1][1] / row.seconds - 1) < 1e-4:
            return 1 / x2
    raise ValueError(f"no rate of products gives {row.seconds:.3f} s a step for row {row.name}")


def _root(plan: Plan) -> list[Hold]:
    """What FSDP2 keeps gathered although nothing reads it: the embedding, which is of its root, and between forward and
    backward the last layer (`apply_fsdp` does not reshard it). And the flat buffers of all-gathers, see the module.
    """
    gathered: dict[int | None, int] = defaultdict(int)  # layer -> bytes of its parameters as they are gathered
    embedding, fsdp = 0, ("data", CONTEXT)
    for node in plan.graph.nodes:
        if node.op == "parameter":
            (type,), (layout, *_) = node.outputs, plan.choices[node.name].gives
            assert type is not None
            whole = tuple(REPLICATE if name in fsdp else one for name, one in zip(plan.mesh.names, layout, strict=True))
            nbytes = local_type(TensorType(type.shape, "bfloat16"), whole, plan.mesh).nbytes
            gathered[layer_of(node)] += nbytes
            embedding += nbytes if "embed" in node.target else 0
    return [
        Hold("embedding, gathered", embedding, COMPUTE, resident=True),
        Hold("last layer, gathered", gathered[max(filter(None, gathered), default=0)], COMPUTE, resident=True),
        Hold("flat buffers of all-gathers", gathered[None] + gathered[0], GATHERS, resident=True),
    ]


def _with_loss_parallel(event: Event, plan: Plan) -> Event:
    """torch's `loss_parallel` runs the backward pass of the loss as (grad_input + exp(x)) * grad_output.

    While its last product runs four tensors as large as the logits in float32 are alive, one more than the backward
    operators of the traced loss hold (torch/distributed/tensor/parallel/loss.py).
    """
    about = dict(event.about)
    if about.get("op") != "aten._log_softmax_backward_data.default" or event.stream != COMPUTE_STREAM:
        return event
    node = plan.graph.by_name[str(about["node"])]
    (type,) = node.outputs
    assert type is not None
    nbytes = local_type(type, plan.choices[node.name].gives[0], plan.mesh).nbytes
    return replace(event, holds=(*event.holds, Hold("loss parallel, exp(x) + grad", nbytes, COMPUTE)))


def _by_stream(event: Event) -> Event:
    """The same event, gradients in the memory of the stream that makes them."""
    if not any(hold.tenant.startswith("gradient of ") for hold in event.holds):
        return event
    holds = tuple(
        replace(hold, tier=GRADIENTS) if hold.tenant.startswith("gradient of ") else hold for hold in event.holds
    )
    return replace(event, holds=holds)
