"""Published runs in pipeline stages: stages made of priced parts, played by `autopar.pipeline`.

Of a row's model three layers are traced, planned as Megatron has it (tensor parallel, with sequence parallel where the
row splits), and priced (`parts.py`). A stage is so many layers, with the embedding in front of the first and the head
behind the last. A step is the play of the schedule, the sum of gradients over data-parallel ranks behind it, and the
optimizer; Megatron of those years overlaps neither with anything. Without a `barrier` (zero bubble validates a step
after it was taken) a rank begins its next step when it is done, so that a step is the longest span of a rank.

A message over a cut is split over the ranks of tensor parallel and gathered by NVLink on arrival (SC'21, 4.1).

Llama's rows are of FSDP in stages: weights are gathered once a step and gradients scattered once, which is priced as
one sum of the mean of their bytes; states of the optimizer are split, as they are with `zero`. With `async_tp` a
collective of tensor parallel is cut into pieces beside its product, and the first piece alone is waited for.

A program holds more than tensors. What BLOOM's held beside them is fitted on one run, as the rate of products is, and
says with `held` whether a row fits the memory of its machine; of other programs tensors alone are asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache

from autopar.ir.mesh import Mesh, parse_mesh
from autopar.pipeline import Durations, Schedule, StageBytes, make_schedule, memory, play
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.simulate.kernels import as_kernels
from benchmarks.replay.float8 import as_float8
from benchmarks.replay.gpt import gpt, kernel_of
from benchmarks.replay.llama import half_precision_graph
from benchmarks.replay.parts import FRONT, HEAD, LAYER, Part, parts_of
from benchmarks.replay.predict import PIECES, with_rate
from benchmarks.replay.predict import fitted_rate as titan_rate
from benchmarks.replay.predict import plan_of as titan_plan
from benchmarks.replay.published import SEQUENCE, plan_of_megatron
from benchmarks.replay.recompute import checkpointed, layer_of
from benchmarks.replay.repeat import TRACED
from benchmarks.replay.rows import machine, read, row_of, torchtitan
from cost_models.hardware import Hardware
from cost_models.price import link_of, links_of, seconds
from cost_models.steps import Comm

PARAMETERS = {"llama-3.1-405b": 405.85e9}  # of the model; six flops each for a token, forward and backward
HALF = 2  # bytes of an activation's element
# Bytes that an optimizer step moves for a parameter: the gradient widened (2 + 4), its norm (4), scaled (8), Adam in
# float32 (four read, three written), the parameter in half precision (4 + 2).
UPDATE = 52
# Half-precision parameter and gradient, float32 parameter, gradient, and Adam's two states (Korthikanti 2022: 45.56 GiB
# of 22B's layers on 8 GPUs are 18 a parameter).
STATE = 18
KEPT = 6  # of these a rank of FSDP that gathers once a step holds whole: the parameter, and its gradient's sum
# DeepSpeed has both gradients, in half precision and in float32: 20, of which a rank of ZeRO's first stage keeps whole
# 4 (half precision alone) or 8 (gradients added up in float32).
ZERO_STATE = 20
ACCUMULATE = 10  # bytes that adding a half-precision gradient to a float32 sum moves, for each micro-batch


@dataclass(frozen=True)
class PipelineRow:
    """One published run; see the data file."""

    name: str
    source: str
    layers: int
    width: int
    heads: int
    mesh: Mesh
    batch: int
    micro: int
    chunks: int
    schedule: str
    unit: str
    hardware: str
    vocabulary: int
    sequence: int
    recompute: str
    gradient_bytes: int
    rate: float | None = None  # None: it did not fit, or its memory alone is asked
    model: str = "gpt"
    split: bool = False
    gb: float | None = None
    gib: float | None = None
    fits: bool = True
    barrier: bool = True
    fsdp: bool = False
    zero: bool = False
    kept: int = KEPT
    float8: bool = False
    async_tp: bool = False

    @property
    def ranks(self) -> Mapping[str, int]:
        return dict(zip(self.mesh.names, self.mesh.sizes, strict=True))

    @property
    def dtype(self) -> str:
        """Of products in half precision."""
        return "float16" if self.model == "gpt" else "bfloat16"

    @property
    def micro_batches(self) -> int:
        return self.batch // self.micro // self.ranks["data"]

    @property
    def flops(self) -> float:
        """Of a step on all ranks, by the formulas of the papers."""
        if self.model != "gpt":
            attention = 6 * self.layers * self.width * self.sequence  # forward and backward, half of the square
            return self.batch * self.sequence * (6 * PARAMETERS[self.model] + attention)
        extra = 1 + self.sequence / (6 * self.width) + self.vocabulary / (16 * self.layers * self.width)
        return 96 * self.batch * self.sequence * self.layers * self.width**2 * extra

    def seconds_at(self, rate: float) -> float:
        """Seconds of a step at that published rate."""
        if self.unit == "s":
            return rate
        if self.unit == "samples/GPU/s":
            return self.batch / (self.mesh.ranks * rate)
        if self.unit == "tokens/GPU/s":
            return self.batch * self.sequence / (self.mesh.ranks * rate)
        return self.flops / (self.mesh.ranks * rate * 1e12)

    @property
    def seconds(self) -> float | None:
        return None if self.rate is None else self.seconds_at(self.rate)

    @property
    def bytes(self) -> float | None:
        """Of memory, as published."""
        if self.gib is not None:
            return self.gib * 2**30
        return None if self.gb is None else self.gb * 1e9

    @property
    def state(self) -> tuple[float, float]:
        """Bytes of a parameter, its gradient and its states: what every rank holds, and what is split over `data`."""
        if self.zero:
            return self.kept, ZERO_STATE - self.kept
        return (self.kept, STATE - self.kept) if self.fsdp else (STATE, 0)


@dataclass(frozen=True)
class PipelineTable:
    rows: tuple[PipelineRow, ...]
    sources: Mapping[str, Mapping[str, object]]
    fitted: Mapping[str, str]  # source -> the row, of this table or of torchtitan's, that its rate is fitted on
    beside: Mapping[str, str]  # source -> the row that what its program holds beside tensors is fitted on

    def row(self, name: str) -> PipelineRow:
        return row_of(self.rows, name)


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step in parts; the most bytes that a rank holds: of tensors, of these for backward, beside them."""

    row: PipelineRow
    pipeline_s: float
    sums_s: float
    update_s: float
    held: float
    activations: float
    beside: float = 0.0

    @property
    def bytes(self) -> float:
        return self.held + self.beside

    @property
    def fits(self) -> bool:
        return self.bytes <= machine(self.row.hardware).tiers["hbm"].capacity_bytes

    @property
    def seconds(self) -> float:
        return self.pipeline_s + self.sums_s + self.update_s

    @property
    def error(self) -> float | None:
        """Of its time."""
        return None if self.row.seconds is None else self.seconds / self.row.seconds - 1


def pipelines() -> PipelineTable:
    """The rows of `pipelines.toml`."""
    document = read("pipelines.toml")
    own = {field.name for field in fields(PipelineRow)}
    rows: list[PipelineRow] = []
    for name, entry in document["rows"].items():
        source = document["sources"][entry["source"]]
        given = {key: source[key] for key in own if key in source} | entry | {"mesh": parse_mesh(entry["mesh"])}
        rows.append(PipelineRow(name=name, **given))
    return PipelineTable(tuple(rows), document["sources"], document["fitted"], document["beside"])


def plan_of(row: PipelineRow, hardware: Hardware) -> Plan:
    """Three layers of its model on the ranks of tensor parallel, by the kernels that its authors had."""
    split = SEQUENCE if row.split else None
    if row.model != "gpt":
        return _plan_of_llama(
            row.model, row.micro, row.sequence, row.recompute, row.ranks["tensor"], row.float8, hardware
        )
    return _plan(
        row.width, row.heads, row.vocabulary, row.micro, row.sequence, row.recompute, row.ranks["tensor"], split,
        hardware,
    )  # fmt: skip


@cache
def _plan(
    width: int, heads: int, vocabulary: int, micro: int, sequence: int, recompute: str, ranks: int, split: int | None,
    hardware: Hardware,
) -> Plan:  # fmt: skip
    graph = checkpointed(gpt(width, heads, vocabulary, micro, sequence), recompute, whole=recompute == "full")
    return as_kernels(plan_of_megatron(graph, Mesh(("tensor",), (ranks,)), hardware, split), kernel_of)


@cache
def _plan_of_llama(
    model: str, micro: int, sequence: int, recompute: str, ranks: int, float8: bool, hardware: Hardware
) -> Plan:
    """Layers are compiled, each by itself; activations are split along the sequence between products."""
    graph = checkpointed(half_precision_graph(model, TRACED, micro, sequence), recompute, keep_sums=True)
    plan = as_kernels(plan_of_megatron(graph, Mesh(("tensor",), (ranks,)), hardware, SEQUENCE), layer_of)
    return as_float8(plan) if float8 else plan


def layers_of(row: PipelineRow) -> list[int]:
    """Layers of each stage: equal, or one less in the first and the last."""
    stages = row.ranks["pipe"] * row.chunks
    if row.layers % stages == 0:
        return [row.layers // stages] * stages
    if (row.layers + 2) % stages == 0 and stages > 1:
        each = (row.layers + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    raise ValueError(f"row {row.name}: {row.layers} layers do not go into {stages} stages")


def priced(row: PipelineRow, hardware: Hardware) -> dict[str, Part]:
    plan = plan_of(row, machine(row.hardware))
    found = parts_of(plan, Pricer.on(plan.mesh, hardware, "none"), PIECES if row.async_tp else 1)
    for part in found.values() if row.fsdp or (row.zero and row.kept > 4) else ():
        part.weights += part.numel * ACCUMULATE / hardware.tiers["hbm"].bytes_per_s
    return found


def predict(row: PipelineRow, hardware: Hardware, parts: Mapping[str, Part]) -> Predicted:
    """Play the row's schedule with stages of these parts."""
    layers = layers_of(row)
    schedule = make_schedule(row.schedule, row.ranks["pipe"], row.micro_batches, row.chunks)
    send = _send_seconds(row, hardware)
    durations = Durations(
        tuple(_stages(parts, layers, "forward")), tuple(_stages(parts, layers, "inputs")),
        tuple(_stages(parts, layers, "weights")), (send,) * (len(layers) - 1),
    )  # fmt: skip
    numel = max(_of_ranks(schedule, _stages(parts, layers, "numel")))
    links = links_of(hardware, row.mesh.names, row.mesh.sizes) if row.ranks["data"] > 1 else {}
    sums = seconds(Comm("all_reduce", "data", row.ranks["data"], int(numel * row.gradient_bytes)), hardware, links)
    update = numel / _split_states(row) * UPDATE / hardware.tiers["hbm"].bytes_per_s
    held, activations = _memory(row, schedule, parts, layers)
    played = play(schedule, durations)
    spent = played.makespan if row.barrier else max(end - begin for begin, end in played.spans)
    return Predicted(row, spent, sums, update, held, activations)


def _stages(parts: Mapping[str, Part], layers: list[int], what: str) -> list[float]:
    found = [count * float(getattr(parts[LAYER], what)) for count in layers]
    found[0] += getattr(parts[FRONT], what)
    found[-1] += getattr(parts[HEAD], what)
    return found


def _of_ranks(schedule: Schedule, values: list[float]) -> list[float]:
    found = [0.0] * schedule.ranks
    for rank, value in zip(schedule.rank_of, values, strict=True):
        found[rank] += value
    return found


def _split_states(row: PipelineRow) -> int:
    """Ranks that have a part each of the optimizer's states."""
    return row.ranks["data"] if row.fsdp or row.zero else 1


def _sent(row: PipelineRow) -> float:
    return row.micro * row.sequence * row.width * HALF / row.ranks["tensor"]


def _send_seconds(row: PipelineRow, hardware: Hardware) -> float:
    if row.ranks["pipe"] == 1:
        return 0.0
    link = link_of(hardware, row.mesh.names, row.mesh.sizes, "pipe")
    link = link.hop or link
    gather = 0.0
    if (tensor := row.ranks["tensor"]) > 1 and not row.split:
        whole = Comm("all_gather", "tensor", tensor, int(_sent(row) * tensor))
        gather = seconds(whole, hardware, {"tensor": hardware.links["intra"]})
    return link.latency_s + _sent(row) / link.bytes_per_s + gather


def _memory(row: PipelineRow, schedule: Schedule, parts: Mapping[str, Part], layers: list[int]) -> tuple[float, float]:
    """The most that a rank holds, and of it what micro-batches keep of the layers for backward."""
    whole, split = row.state
    each = whole + split / _split_states(row)
    state = [each * numel for numel in _stages(parts, layers, "numel")]
    state = [one + parts[LAYER].again for one in state]
    saved, pending = _stages(parts, layers, "saved"), [parts[LAYER].pending * count for count in layers]
    sent = (_sent(row),) * (len(layers) - 1)
    ranks = memory(schedule, StageBytes(tuple(state), tuple(saved), tuple(map(float, pending)), sent))
    only = [float(parts[LAYER].saved * count) for count in layers]
    none = (0.0,) * len(layers)
    kept = memory(schedule, StageBytes(none, tuple(only), none, none[1:]))
    return max(one.peak for one in ranks), max(one.peak for one in kept)


def fitted_rate(row: PipelineRow, hardware: Hardware) -> float:
    """The rate of half-precision products at which the step of that row takes its seconds (bisection)."""
    low, high = 1e13, hardware.flops_per_s[row.dtype]

    assert row.seconds is not None, row.name

    def seconds_with(rate: float) -> float:
        machine_ = with_rate(hardware, rate, row.dtype)
        return predict(row, machine_, priced(row, machine_)).seconds

    if seconds_with(high) > row.seconds:
        raise ValueError(f"row {row.name} is quicker than the peak of {hardware.name} allows; fit on another row")
    while high / low > 1 + 1e-4:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if seconds_with(middle) < row.seconds else (middle, high)
    return (low * high) ** 0.5


def rates_of(table: PipelineTable, sources: Collection[str]) -> dict[str, float]:
    """Source -> the rate of products that its rows are predicted with, where one is fitted."""
    found: dict[str, float] = {}
    titan = torchtitan()
    for source, name in table.fitted.items():
        if source in sources and name in (row.name for row in titan.rows):
            row = titan.row(name)
            hardware = machine(row.source.hardware)
            found[source] = titan_rate(row, hardware, titan_plan(row, hardware))
        elif source in sources:
            found[source] = fitted_rate(table.row(name), machine(table.row(name).hardware))
    return found


def predictions(table: PipelineTable, rows: list[PipelineRow]) -> tuple[list[Predicted], dict[str, float]]:
    """Of these rows, and the rates that were fitted: source -> products per second."""
    rates = rates_of(table, {row.source for row in rows})
    found: list[Predicted] = []
    parts: dict[object, dict[str, Part]] = {}  # plans are kept, and each is priced once for each rate
    for row in rows:
        hardware = machine(row.hardware)
        if row.source in rates:
            hardware = with_rate(hardware, rates[row.source], row.dtype)
        key = id(plan_of(row, machine(row.hardware))), row.source
        if key not in parts:
            parts[key] = priced(row, hardware)
        found.append(predict(row, hardware, parts[key]))
    beside = {source: _beside(table.row(name)) for source, name in table.beside.items()}
    return [replace(one, beside=beside.get(one.row.source, 0.0)) for one in found], rates


def _beside(row: PipelineRow) -> float:
    """Bytes that its program held and that are no tensors, as far as its tensors are known."""
    hardware = machine(row.hardware)
    assert row.bytes is not None, row.name
    return row.bytes - predict(row, hardware, priced(row, hardware)).held
