"""Whole models in which every attention runs as a pattern does: numbers, bytes sent, and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.ir.attention import ATTENTION
from autopar.ir.layout import REPLICATE
from autopar.ir.mesh import Mesh
from autopar.lower import lower
from autopar.lower.verify import verify
from autopar.measure.twin import memory_of
from autopar.plan import Plan
from autopar.plan.fit import check
from autopar.plan.reading import split_of
from autopar.price.pricer import Pricer
from autopar.simulate.timeline import timeline_of
from cost_models.hardware import Hardware
from tests.support.check import difference, mesh_of
from tests.support.families import Case, family
from tests.support.lockstep import run_all
from tests.support.plans import PlanSampler, Wish
from tests.support.sends import send_beside_work

MACHINE = Hardware.load("cpu-gloo")
TOLERANCE = 1e-9  # in float64, as in tests/plans/test_random_plans.py
OVER, UNDER = 1.05, 0.98  # as in tests/measure/test_memory.py
PATTERNS = (
    "grouped kv replicated",
    "context parallel: gathered kv",
    "context parallel: ring",
    "context parallel: zigzag ring",
)
MESHES = [(2,), (4,), (2, 2)]
ZIGZAG_OF_ODD_ROWS = PATTERNS[3], (4,)  # twelve tokens have no halves there
CASES = [(one, sizes) for one in PATTERNS for sizes in MESHES if one != PATTERNS[0] or sizes != (2,)]


class Core(nn.Module):
    """Attention alone, of parameters, so that what it holds is most of all."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        q, k, v = (torch.randn(2, heads, 768, 16).to(dtype) for heads in (8, 2, 2))
        self.q, self.k, self.v = nn.Parameter(q), nn.Parameter(k), nn.Parameter(v)

    def forward(self, x: Tensor) -> Tensor:
        out = functional.scaled_dot_product_attention(self.q * x, self.k, self.v, is_causal=True, enable_gqa=True)
        return (out * x).sum()  # so that its gradient lies in memory of its own


CORES = {"alone": torch.float32, "alone, in halves": torch.bfloat16}  # there sums of parts take room in float32


@cache
def case_of(name: str) -> Case:
    if name not in CORES:
        return family(name)
    torch.manual_seed(2)
    return Case(Core(CORES[name]), {"x": torch.ones((), dtype=CORES[name])})


@cache
def patterned(name: str, mesh: Mesh, pattern: str, *, wide: bool) -> Plan:
    case = case_of(name)
    sampler = PlanSampler(case.wide_graph if wide else case.graph, mesh, MACHINE)
    wishes: dict[str, Wish] = {
        node: lambda one: one.body == pattern
        for node, options in sampler.strategies.items()
        if any(one.body == pattern for one in options)
    }
    assert len(wishes) == (2 if name in CORES else 4), "forward and backward"
    for node in case.graph.nodes if name in CORES else ():
        if node.op.startswith("aten.sum"):  # of pieces: else the most is held there
            wishes[node.name] = lambda one: REPLICATE not in one.takes[0]
    return sampler.best(wishes)


@pytest.mark.parametrize("name", ["grouped", "llama"])
@pytest.mark.parametrize(("pattern", "sizes"), [one for one in CASES if one != ZIGZAG_OF_ODD_ROWS])
def test_its_numbers_are_those_of_one_process_and_its_bytes_those_of_the_plan(
    name: str, pattern: str, sizes: tuple[int, ...]
) -> None:
    case, found = case_of(name), patterned(name, mesh_of(*sizes), pattern, wide=True)
    check(found, case.wide_graph, found.mesh)
    for prefetch in (None, 2):
        plan = replace(found, prefetch=prefetch)
        verify(lower(plan, prefetch))
        off, where = difference(plan, case)
        assert off <= TOLERANCE, where
    _, traffic = run_all(found, case.values(found.graph), case.seed)
    assert traffic == {key: nbytes for key, nbytes in found.comm_bytes.items() if nbytes}
    (core, *_) = (node for node in found.graph.nodes if node.op == ATTENTION)
    told = [split_of(found.choices[core.name], axis, False) for axis in range(len(sizes))]
    assert any(f"({pattern})" in words for words in told)


@pytest.mark.parametrize("prefetch", [None, 1])
@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize(("pattern", "sizes"), CASES)
def test_it_holds_what_it_says(
    fake_mesh: Callable[..., object], monkeypatch: pytest.MonkeyPatch, name: str, pattern: str, sizes: tuple[int, ...],
    prefetch: int | None,
) -> None:  # fmt: skip
    """With sends under way beside work, which a program on CPUs waits for at once (docs/design/0018)."""
    send_beside_work(monkeypatch)
    case, mesh = case_of(name), Mesh(("data", "tensor")[: len(sizes)], sizes)
    plan = replace(patterned(name, mesh, pattern, wide=False), prefetch=prefetch)
    fake_mesh(**dict(zip(mesh.names, sizes, strict=True)))
    told = timeline_of(plan, Pricer.on(mesh, MACHINE, plan.optimizer), prefetch).memory["hbm"].peak_bytes
    if prefetch is None:
        assert told == plan.peak_bytes["hbm"]
    assert UNDER <= told / memory_of(plan, case.model, (), case.inputs)["step"].measured <= OVER
