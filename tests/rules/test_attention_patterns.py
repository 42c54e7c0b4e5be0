"""Every pattern of attention that is offered, executed on all ranks in one process, beside the unsplit operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.emit import ops
from autopar.emit.run_all_ranks import fake_ranks, run
from autopar.ir.attention import ATTENTION, ATTENTION_BACKWARD
from autopar.ir.graph import Graph, Node, Ref, Result, TensorType
from autopar.ir.mesh import Mesh
from autopar.lower import lower
from autopar.lower.verify import verify
from autopar.plan import Plan
from autopar.plan.fit import check_rules
from autopar.plan.store import dumps
from autopar.propose.strategies import propose
from autopar.rules.looped import Offer
from autopar.rules.patterns import offers
from cost_models.hardware import Hardware
from tests.support.check import mesh_of
from tests.support.lockstep import run_all
from tests.support.plans import PlanSampler

H100 = Hardware.load("h100-sxm")
TOLERANCE = 1e-10  # in float64: sums of a few dozen terms in another order
GROUPED, GATHERED, RING = "grouped kv replicated", "context parallel: gathered kv", "context parallel: ring"
MESHES = [(2,), (4,), (2, 2), (8,)]
B, S, D = 2, 16, 6

# heads, kv heads, dim of values, keys, causal, shape of a bias, whether it has a gradient
FORMS: dict[str, tuple[int, int, int, int, bool, tuple[int, ...] | None, bool]] = {
    "causal": (4, 4, D, S, True, None, False),
    "grouped": (8, 2, D, S, True, None, False),
    "grouped, other values": (8, 2, 4, S, True, None, False),
    "grouped, all": (8, 2, D, 12, False, None, False),
    "grouped, eight": (16, 4, D, S, True, None, False),
    "one kv head": (8, 1, D, S, True, None, False),
    "grouped, bias of heads": (8, 2, D, S, False, (B, 8, S, S), True),
    "grouped, causal bias": (8, 2, D, S, True, (1, 1, S, S), True),
    "grouped, padding": (8, 2, D, S, False, (B, 1, 1, S), False),
}


def values_of(form: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    heads, kv, e, keys, _, bias, _ = FORMS[form]
    drawn = torch.Generator().manual_seed(sum(map(ord, form)))

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=drawn).to(dtype)

    values = {"grad": made(B, heads, S, e), "q": made(B, heads, S, D), "k": made(B, kv, keys, D)}
    values["v"] = made(B, kv, keys, e)
    if bias is not None:
        values["bias"] = made(*bias)
        if "padding" in form:  # the keys of one entry, and all of the other's: its rows see nothing
            values["bias"][0, ..., 5:] = -torch.inf
            values["bias"][1] = -torch.inf
    return values


@cache
def graph_of(form: str, dtype: str = "float64") -> Graph:
    """Forward and backward of attention by itself; its gradients are outputs."""
    values = values_of(form, getattr(torch, dtype))
    *_, causal, _, bias_grad = FORMS[form]
    types = {name: TensorType(tuple(value.shape), dtype) for name, value in values.items()}
    sources = [Node(name, "input", (), (), (type,), target=name) for name, type in types.items()]
    bias = Ref("bias") if "bias" in types else None
    out = TensorType((*types["q"].shape[:3], types["v"].shape[3]), dtype)
    lse = TensorType(types["q"].shape[:3], "float64" if dtype == "float64" else "float32")
    asked = causal, 0.3, 0.0, bias_grad
    q, k, v = Ref("q"), Ref("k"), Ref("v")
    forward = Node("forward", ATTENTION, (q, k, v, bias, *asked), (), (out, lse, None))
    gradients = types["q"], types["k"], types["v"], types["bias"] if bias_grad else None
    given = Ref("grad"), q, k, v, bias, Ref("forward", 0), Ref("forward", 1), None
    backward = Node("backward", ATTENTION_BACKWARD, (*given, *asked), (), gradients)
    made = [Ref("forward", 0), Ref("forward", 1), *(Ref("backward", i) for i, t in enumerate(gradients) if t)]
    results = tuple(Result("output", str(place), ref) for place, ref in enumerate(made))
    return Graph((*sources, forward, backward), results)


def wanted(form: str, values: dict[str, Tensor]) -> list[Tensor]:
    *_, causal, _, bias_grad = FORMS[form]
    bias = values.get("bias")
    out, lse, _ = ops.attention(values["q"], values["k"], values["v"], bias, causal, 0.3, 0.0, bias_grad, "math")
    made = ops.attention_backward(
        values["grad"], values["q"], values["k"], values["v"], bias, out, lse, None, causal, 0.3, 0.0, bias_grad, "math"
    )
    return [out, lse, *(one for one in made if one is not None)]


def offered(graph: Graph, node: str, mesh: Mesh) -> list[tuple[str, Offer]]:
    strategies = propose(graph, mesh)[0][node]
    kept = {(one.body, one.roles) for one in strategies}
    types = tuple(graph.type_of(ref) for ref in graph.by_name[node].operands)
    return [(name, one) for name, one in offers(graph.by_name[node], types, mesh) if (name, one.roles) in kept]


def plans(graph: Graph, mesh: Mesh, hardware: Hardware = H100) -> Iterator[tuple[str, Plan]]:
    """Each offer of forward, and each of backward; the operands come and the results go as suits it."""
    sampler = PlanSampler(graph, mesh, hardware, optimizer="none")
    for node in ("forward", "backward"):
        for name, offer in offered(graph, node, mesh):
            wish: Any = lambda s, n=name, o=offer: (s.body, s.roles) == (n, o.roles)  # noqa: E731
            yield f"{node}: {name} {offer.roles}", sampler.best({node: wish})


def off(made: Tensor | None, right: Tensor) -> float:
    assert made is not None and made.shape == right.shape and made.dtype == right.dtype
    seen = right != torch.inf  # the lse of a row that sees nothing is the kernel's own
    return ((made - right).abs() / (1 + right.abs()))[seen].max().item()


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_offer_gives_what_the_operator_gives(form: str, sizes: tuple[int, ...]) -> None:
    graph, mesh, values = graph_of(form), mesh_of(*sizes), values_of(form)
    right = wanted(form, values)
    for label, plan in plans(graph, mesh):
        check_rules(plan)
        assert Plan.loads(dumps(plan), "text") == plan
        for prefetch in (None, 1):
            verify(lower(replace(plan, prefetch=prefetch), prefetch))
            ran, traffic = run_all(replace(plan, prefetch=prefetch), values)
            for place, one in enumerate(right):
                assert off(ran.results["output", str(place)], one) <= TOLERANCE, (label, prefetch, place)
            assert traffic == {key: nbytes for key, nbytes in plan.comm_bytes.items() if nbytes}, label


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("form", ["causal", "grouped"])
def test_ranks_that_torch_simulates_say_the_same(form: str, sizes: tuple[int, ...]) -> None:
    graph, mesh, values = graph_of(form), mesh_of(*sizes), values_of(form)
    right = wanted(form, values)
    with fake_ranks(mesh) as device_mesh:
        for label, plan in plans(graph, mesh):
            ran = run(replace(plan, prefetch=1), device_mesh, values)
            for place, one in enumerate(right):
                assert off(ran.results["output", str(place)], one) <= TOLERANCE, (label, place)
