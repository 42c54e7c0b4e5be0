"""How well a plan uses its machine: model flops, their share of the peak (MFU), samples and tokens per second.

Model flops are what a step of the model needs, whatever the plan: products, attention and convolutions of the graph as
it was traced, forward and backward, each once. What a plan runs again does not count, nor does what ranks repeat.
Causal attention counts as half of the square, and its backward as twice its forward, as in PaLM (Chowdhery 2022,
appendix B): that it computes the scores again is the kernel's affair. The step is the predicted one; the peak is the
profile's `flops_per_s`, of a data sheet on GPUs, of the dtype that most of the model flops are in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from autopar.ir.graph import Graph, input_type
from autopar.ir.work import flops_of
from autopar.plan.value import PlanValue
from autopar.propose.strategies import operand_types
from autopar.rewrite.apply_choices import plain
from cost_models.hardware import Hardware
from cost_models.steps import MATRIX_KINDS

BACKWARD_PRODUCTS = 4 / 5  # of attention: its kernels make five, one of them for the second time
INTEGERS = ("int64", "int32")  # dtypes of tokens
PEAK = "peak_flops_per_s:"  # fact of a search, of a dtype that follows
COUNTED = "products, attention and convolutions of forward and backward, each once; causal attention as half"


@dataclass(frozen=True)
class Utilisation:
    """Of one step on all ranks. `dtype`: what most of the flops are in, and `peak_flops_per_s` that of one rank; `mfu`
    is None where no peak is known, `samples` and `tokens` (a step) where the inputs do not say.
    """

    model_flops: float
    seconds: float
    ranks: int
    dtype: str
    peak_flops_per_s: float | None
    samples: int | None
    tokens: int | None

    @property
    def mfu(self) -> float | None:
        if self.peak_flops_per_s is None or not self.seconds:
            return None
        return self.model_flops / (self.seconds * self.ranks * self.peak_flops_per_s)

    def to_json(self) -> dict[str, object]:
        """As `--json` has it; rates are per second."""
        found: dict[str, object] = {
            "model_flops": self.model_flops,
            "model_flops_counted": COUNTED,
            "dtype": self.dtype,
            "peak_flops_per_s": self.peak_flops_per_s,
            "mfu": self.mfu,
        }
        for name, count in (("samples", self.samples), ("tokens", self.tokens)):
            rate = None if count is None or not self.seconds else count / self.seconds
            found[f"{name}_per_s"] = rate
            found[f"{name}_per_s_and_rank"] = None if rate is None else rate / self.ranks
        return found

    def told(self) -> Iterator[str]:
        """In words; nothing where the model has no products."""
        if not self.model_flops or not self.seconds:
            return
        text = f"model flops {short(self.model_flops)} a step ({COUNTED})"
        if self.mfu is not None and self.peak_flops_per_s is not None:
            text += f": MFU {100 * self.mfu:.1f} % of the {self.peak_flops_per_s / 1e12:.4g} TFLOP/s of {self.dtype}"
        yield text
        rates = [
            f"{short(count / self.seconds)} {name}/s, {short(count / self.seconds / self.ranks)} on each rank"
            for name, count in (("samples", self.samples), ("tokens", self.tokens))
            if count is not None
        ]
        if rates:
            yield "; ".join(rates)


def short(number: float) -> str:
    """Four digits, and tera for what is that large."""
    if number >= 1e12:
        return f"{number / 1e12:,.4g}T"
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def utilisation(plan: PlanValue) -> Utilisation:
    """What the plan's predicted step makes of its machine."""
    graph = plain(plan.graph)
    rounds = graph.rounds.count
    flops = {dtype: flops * rounds for dtype, flops in flops_by_dtype(graph, plan.tf32).items()}
    dtype = max(flops, key=lambda name: flops[name], default="")
    samples, tokens = _batch(graph)
    peak = _peaks(plan).get(dtype)
    return Utilisation(sum(flops.values()), plan.predicted_seconds, plan.mesh.ranks, dtype, peak, samples, tokens)


def flops_by_dtype(graph: Graph, tf32: tuple[str, ...] = ()) -> dict[str, float]:
    """Model flops of a traced graph, by what they are computed in. `tf32`: as in `Plan`."""
    node_of = graph.by_name
    found: dict[str, float] = defaultdict(float)
    for node in graph.nodes:
        if node.is_source:
            continue
        flops, kind = flops_of(node, operand_types(node, node_of))
        made = next((type.dtype for type in node.outputs if type is not None), "")
        if kind not in MATRIX_KINDS:
            continue
        if kind == "attention" and "backward" in node.op:
            flops *= BACKWARD_PRODUCTS
        found["tf32" if made == "float32" and kind in tf32 else made] += flops
    return dict(found)


def _peaks(plan: PlanValue) -> dict[str, float]:
    """Dtype -> peak of one rank: what the search noted, else that of a profile which autopar comes with."""
    if noted := {name.removeprefix(PEAK): float(x) for name, x in plan.search.items() if name.startswith(PEAK)}:
        return noted
    with suppress(ValueError):
        hardware = Hardware.known(plan.hardware)
        if hardware.allowing(plan.tf32).digest == plan.hardware_digest:
            return dict(hardware.flops_per_s)
    return {}


def _batch(graph: Graph) -> tuple[int | None, int | None]:
    """(samples, tokens) of a step: dim 0 of the inputs where all have the same, and the size of those integer inputs
    that are [samples, length], where all have the same.
    """
    types = [input_type(graph, node) for node in graph.nodes if node.op == "input"]
    firsts = {type.shape[0] for type in types if type.shape}
    if len(firsts) != 1:
        return None, None
    sizes = {type.numel for type in types if len(type.shape) == 2 and type.dtype in INTEGERS}
    return firsts.pop(), sizes.pop() if len(sizes) == 1 else None
