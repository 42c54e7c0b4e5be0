"""`backend="inductor"` gets each emitted function as one graph: where Dynamo breaks it, fragments are compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.emit import emit
from autopar.emit.at_once import AT_ONCE
from autopar.emit.compiled import compiled
from autopar.emit.groups import name_groups
from autopar.emit.run_all_ranks import fake_ranks
from autopar.emit.seeded import pieces_of, seeds
from autopar.ir.graph import TensorType
from autopar.ir.layout import Layout, local_type
from autopar.lower import lower
from autopar.lower.program import Launch
from autopar.plan import Plan
from autopar.rewrite.micro_batches import in_rounds
from autopar.rules.patterns import is_pattern
from tests.support import recurrent
from tests.support.check import mesh_of
from tests.support.families import FAMILIES, Case, family
from tests.support.plans import PlanSampler
from tests.support.residence import ResidenceSampler

FEW = ("mlp", "cnn", "gpt2")
OURS = torch.ops.autopar


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run_whole(plan: Plan, backend: Any = "eager", one_at_a_time: bool = False) -> int:
    """The number of functions that ran. Raises torch._dynamo's Unsupported where one is more than one graph.

    `backend`: "aot_eager" does with the graph what is done before inductor writes kernels. `one_at_a_time`: as on CPUs.
    """
    mesh = plan.mesh
    whole = partial(compiled, backend=backend, one_at_a_time=one_at_a_time, fullgraph=True)

    def piece(type: TensorType | None, layout: Layout) -> Tensor:
        assert type is not None
        local = local_type(type, layout, mesh)
        dtype = getattr(torch, local.dtype)
        return torch.randn(local.shape).to(dtype) if dtype.is_floating_point else torch.zeros(local.shape, dtype=dtype)

    def source(name: str) -> Tensor:
        return piece(plan.graph.by_name[name].outputs[0], plan.choices[name].gives[0])

    with fake_ranks(mesh) as device_mesh, torch.no_grad():
        program = emit(plan, name_groups({}, plan.groups(), device_mesh, mesh), one_at_a_time=one_at_a_time)
        own = [torch.zeros((), dtype=torch.int64) for _ in mesh.groups]
        if program.drawing:
            own.append(seeds(0, 0, pieces_of(program.drawing, mesh, mesh.coordinate(0))))
        forward = whole(program.forward)
        outputs = forward(*(source(node.name) for node in program.inputs), *own)
        if program.backward is None:
            return 1
        so_far = [None if t is None else torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in program.added_up]
        saved = list(outputs[len(program.results) :])
        backward = whole(program.backward)
        backward(saved, *(source(node.name) for node in program.tangents), *own, *([so_far] if so_far else []))
    return 2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_function_is_one_graph(name: str) -> None:
    """With values that are run again or offloaded and with parameters on the host."""
    assert run_whole(ResidenceSampler(family(name).graph, mesh_of(2)).draw(5)) == 2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in FAMILIES]
)
def test_nothing_in_it_keeps_torch_from_compiling_it(name: str) -> None:
    """Sums of gradients are made in place, which only what runs as it is written may do."""
    drawn = [PlanSampler(family(name).graph, mesh_of(2)).draw(seed) for seed in range(12)]
    bucketed = (replace(plan, bucket_bytes=1 << 20, prefetch=1) for plan in drawn)
    summing = next(plan for plan in bucketed if sums_in_place(plan))
    assert run_whole(summing, "aot_eager") == 2


def sums_in_place(plan: Plan) -> bool:
    return any(isinstance(one, Launch) and one.in_place for _, one in lower(plan, plan.prefetch))


def test_what_is_compiled_has_no_operator_whose_operand_a_compiler_may_lend_out() -> None:
    given: list[fx.GraphModule] = []

    def looked_at(graph: fx.GraphModule, _: object) -> fx.GraphModule:
        given.append(graph)
        return graph

    plan = ResidenceSampler(family("mlp").graph, mesh_of(2)).draw(5)
    assert run_whole(plan, looked_at) == 2
    called = Counter(node.target for graph in given for node in graph.graph.nodes if node.op == "call_function")
    assert called[OURS.store_copied.default] > 0 and called[OURS.fetch.default] > 0
    assert not called.keys() & {OURS.store.default, OURS.shift.default, OURS.mirror.default}


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_on_cpus_a_collective_is_one_operator_with_its_wait(name: str) -> None:
    """Each takes what the one before has made: inductor can neither move a wait away nor change the order."""
    given: list[fx.GraphModule] = []

    def looked_at(graph: fx.GraphModule, _: object) -> fx.GraphModule:
        given.append(graph)
        return graph

    plan = replace(PlanSampler(family(name).graph, mesh_of(2)).draw(3), bucket_bytes=1 << 20, prefetch=1)
    assert run_whole(plan, looked_at, one_at_a_time=True) == 2
    for graph in given:
        ones = [node for node in graph.graph.nodes if node.target in AT_ONCE.values()]
        assert len(ones) > 1 and ones[0].args[1] is None
        for one, before in zip(ones[1:], ones, strict=False):
            assert isinstance(token := one.args[1], fx.Node) and token.args == (before, 1)
        assert not any("_c10d_functional" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize("name", ["mlp", "block", "llama"])
def test_patterns_are(name: str) -> None:
    """Random plans with loops: rings, panels that are broadcast."""
    sampler = PlanSampler(family(name).graph, mesh_of(2, 2))
    drawn = [sampler.draw(seed) for seed in range(8)]
    looping = [plan for plan in drawn if any(is_pattern(choice.body) for choice in plan.choices.values())]
    assert looping
    assert run_whole(looping[0], "aot_eager") == 2


def test_micro_batches_are() -> None:
    """Backward adds to sums that it is given."""
    plan = PlanSampler(in_rounds(family("gpt2").wide_graph, 2), mesh_of(2)).draw(0)
    assert run_whole(plan) == 2


def test_recurrent_layers_are() -> None:
    model = recurrent.made("lstm")
    case = Case(model, recurrent.batch_of(model))
    assert run_whole(PlanSampler(case.graph, mesh_of(2)).draw(1)) == 2


def test_what_draws_numbers_is() -> None:
    case = Case(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)), {"input": torch.randn(4, 8)})
    assert run_whole(PlanSampler(case.graph, mesh_of(2)).draw(1)) == 2
