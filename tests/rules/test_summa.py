"""SUMMA in panels and rings of more ranks, every offer executed beside the operator that is not split."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from autopar.assemble.problem import assemble
from autopar.ir.graph import Ref
from autopar.ir.layout import Shard
from autopar.ir.mesh import Mesh
from autopar.lower import lower
from autopar.lower.program import Loop
from autopar.lower.verify import verify
from autopar.measure.twin import memory_of, traced
from autopar.plan.reading import split_of
from autopar.price.pricer import Pricer
from autopar.rules.looped import Offer
from cost_models.hardware import Hardware
from cost_models.steps import Comm, unrolled
from tests.support.check import mesh_of
from tests.support.plans import PlanSampler, Wish, gives
from tests.support.products import H100, check_numbers, graph_of, held_beside, offered, plans

M, K, N = 8, 96, 144
PRODUCTS = {  # what a linear layer becomes, and the form of SUMMA that goes with it where weights are [n, k]
    "forward": ("b s k, n k -> b s n", (M, 8, K), (N, K)),
    "forward, weight first": ("n k, b s k -> b s n", (N, K), (M, 8, K)),
    "gradient of the input": ("b s n, n k -> b s k", (M, 8, N), (N, K)),
    "gradient of the weight": ("b s n, b s k -> n k", (M, 8, N), (M, 8, K)),
    "in columns": ("b s n, b s k -> k n", (M, 8, N), (M, 8, K)),
    "rows by themselves": ("m k, k n -> m n", (64, K), (K, N)),
}


def numbers(name: str, mesh: Mesh, pattern: str) -> list[Offer]:
    equation, *shapes = PRODUCTS[name]
    graph = graph_of(equation, *shapes)
    return check_numbers(graph, mesh, plans(graph, mesh, pattern), (None, 1))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4,), (8,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", [name for name in PRODUCTS if name != "in columns"])
def test_a_ring_reduce_scatter_of_more_ranks(name: str, sizes: tuple[int, ...]) -> None:
    assert numbers(name, mesh_of(*sizes), "ring reduce-scatter")


@pytest.mark.parametrize(
    "sizes",
    [(2, 2), (2, 4), *(pytest.param(one, marks=pytest.mark.slow) for one in ((4, 2), (2, 3), (2, 2, 2)))],
    ids=str,
)
@pytest.mark.parametrize("name", PRODUCTS)
def test_panels_give_what_the_operator_gives(name: str, sizes: tuple[int, ...]) -> None:
    found = numbers(name, mesh_of(*sizes), "SUMMA")
    assert len(found) >= 3  # 144 features are no 8 panels of 4 blocks
    forms = {role.split(",")[0] for offer in found for role in offer.roles if role.startswith("SUMMA")}
    expected = {"SUMMA ATB"} if ("weight" in name and "gradient" in name) or name == "in columns" else None
    assert forms == (expected or {"SUMMA AB", "SUMMA ABT"})


@pytest.mark.parametrize(
    "sizes", [(2, 2), *(pytest.param(one, marks=pytest.mark.slow) for one in ((2, 4), (4, 2), (2, 3)))], ids=str
)
@pytest.mark.parametrize("name", PRODUCTS)
def test_they_send_what_the_formula_says_and_hold_what_they_say(name: str, sizes: tuple[int, int]) -> None:
    """(p - 1) / pq of a tensor that moves along p, in elements received per rank (van de Geijn and Watts 1997)."""
    equation, *shapes = PRODUCTS[name]
    graph, mesh = graph_of(equation, *shapes), mesh_of(*sizes)
    pricer = Pricer.on(mesh, H100, "none")
    types = [graph.type_of(Ref(one)) for one in ("x", "w", "product")]
    for offer, plan in plans(graph, mesh, "SUMMA"):
        sent = [step for step in unrolled(plan.choices["product"].steps) if isinstance(step, Comm)]
        panels = int(offer.roles[0].split(", ")[1].split()[0])
        assert len(sent) == 2 * panels
        received = Counter[str]()
        for step in sent:
            size = mesh.sizes[mesh.names.index(step.axis)]
            received[step.axis] += step.nbytes // size * (size - 1)
        assert [received[axis] for axis in mesh.names] in [
            [(size - 1) * type.nbytes // mesh.ranks for size, type in zip(mesh.sizes, pair, strict=True)]
            for pair in itertools.permutations(types, 2)
        ]
        (delivery,) = plan.deliveries
        for prefetch in (None, 1):
            program = lower(plan, prefetch, pricer)
            verify(program)
            loops = [one for _, one in program if isinstance(one, Loop)]
            assert [loop.rounds for loop in loops] == ([panels - 2] if panels > 2 else [])
            extra = held_beside(program, graph, mesh, offer)
            workspace = offer.loop.workspace(beside=prefetch is not None)
            assert extra <= workspace, offer.roles
            if delivery is not None and not delivery.changes:
                assert extra == workspace, offer.roles


def test_text_calls_it_by_its_name() -> None:
    equation, *shapes = PRODUCTS["forward"]
    graph, mesh = graph_of(equation, *shapes), mesh_of(2, 2)
    told = {split_of(plan.choices["product"], 0, True) for _, plan in plans(graph, mesh, "SUMMA")}
    assert told == {f"blocks (SUMMA {form}, {panels} panels)" for form in ("AB", "ABT") for panels in (2, 8)}
    (_, plan), *_ = plans(graph, mesh_of(2), "ring reduce-scatter")
    assert split_of(plan.choices["product"], 0, True) == "sums in a ring (matmul reduce-scatter)"


def test_it_is_offered_on_two_axes_where_panels_divide() -> None:
    def count(x: tuple[int, ...], w: tuple[int, ...], *sizes: int) -> int:
        return len(offered(graph_of("b s k, n k -> b s n", x, w), mesh_of(*sizes), "SUMMA"))

    assert count((4, 8, 32), (48, 32), 2, 2) == 4
    assert count((4, 8, 32), (48, 32), 2, 4) == 3, "48 features are no 8 panels of 4 blocks"
    assert count((4, 8, 32), (48, 32), 4) == 0
    assert count((4, 8, 12), (48, 12), 2, 2) == 3, "12 features are no 16 panels"
    assert count((3, 8, 32), (48, 32), 2, 2) == 0, "the batch does not divide"


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def test_less_memory_than_gathers_need_gives_a_plan_in_panels_that_fits(fake_mesh: Callable[..., object]) -> None:
    """Parameter, input, and what is made of it in blocks, before the product and behind it."""
    model, inputs, mesh = Layer(), {"x": torch.randn(16, 32, 512)}, Mesh(("data", "tensor"), (2, 2))
    graph = traced(model, (), inputs)
    sampler = PlanSampler(graph, mesh, Hardware.load("cpu-gloo"), optimizer="sgd")
    blocks = {2: (Shard(0), Shard(1)), 3: (Shard(0), Shard(2))}

    wishes: dict[str, Wish] = {}
    for node in graph.nodes:
        layout = None if node.outputs[0] is None else blocks.get(len(node.outputs[0].shape))
        able = any(one.gives[0] == layout for one in sampler.strategies[node.name])
        if layout is not None and able and node.op != "autopar.einsum":
            wishes[node.name] = gives(layout)
    gathering = PlanSampler(graph, mesh, Hardware.load("cpu-gloo"), optimizer="sgd", loops=False)
    one_shot = gathering.best(wishes)
    limit = int(0.9 * one_shot.peak_bytes["hbm"])
    sampler.assembled = assemble(graph, sampler.strategies, sampler.pricer, memory=limit)
    plan = sampler.best(wishes)
    assert any(choice.body == "SUMMA" for choice in plan.choices.values())
    fake_mesh(**dict(zip(mesh.names, mesh.sizes, strict=True)))
    measured = memory_of(plan, model, (), inputs)["step"].measured
    assert measured <= limit
