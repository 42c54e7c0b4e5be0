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
from autopar.ir.work import flops_of
from autopar.lower import lower
from autopar.lower.program import Launch
from autopar.lower.verify import flat, verify
from autopar.plan import Plan
from autopar.plan.fit import check_rules
from autopar.plan.store import dumps
from autopar.price.pricer import Pricer
from autopar.propose.strategies import propose
from autopar.rules.looped import Offer
from autopar.rules.patterns import offers
from cost_models.hardware import Hardware
from cost_models.steps import Comm, Compute, unrolled
from tests.support.check import mesh_of
from tests.support.lockstep import run_all
from tests.support.plans import PlanSampler

H100 = Hardware.load("h100-sxm")
TOLERANCE = 1e-10  # in float64: sums of a few dozen terms in another order
GROUPED, GATHERED, RING = "grouped kv replicated", "context parallel: gathered kv", "context parallel: ring"
ZIGZAG = "context parallel: zigzag ring"
MESHES = [(2,), (4,), (2, 2), (8,)]
B, S, D = 2, 16, 6

# heads, kv heads, dim of values, keys, causal, shape of a bias, whether it has a gradient
FORMS: dict[str, tuple[int, int, int, int, bool, tuple[int, ...] | None, bool]] = {
    "causal": (4, 4, D, S, True, None, False),
    "grouped": (8, 2, D, S, True, None, False),
    "grouped, other values": (8, 2, 4, S, True, None, False),
    "grouped, all": (8, 2, D, 24, False, None, False),
    "grouped, eight": (16, 4, D, S, True, None, False),
    "of three": (4, 4, D, 12, True, None, False),
    "one kv head": (8, 1, D, S, True, None, False),
    "grouped, bias of heads": (8, 2, D, S, False, (B, 8, S, S), True),
    "grouped, causal bias": (8, 2, D, S, True, (1, 1, S, S), True),
    "grouped, padding": (8, 2, D, S, False, (B, 1, 1, S), False),
    "grouped, padding of pairs": (8, 2, D, 24, False, (B, 1, S, 24), False),
}


ODD = "of three"  # ranks: the middle one is its own mirror


def values_of(form: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    heads, kv, e, keys, causal, bias, _ = FORMS[form]
    rows = keys if causal else S
    drawn = torch.Generator().manual_seed(sum(map(ord, form)))

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=drawn).to(dtype)

    values = {"grad": made(B, heads, rows, e), "q": made(B, heads, rows, D), "k": made(B, kv, keys, D)}
    values["v"] = made(B, kv, keys, e)
    if bias is not None:
        values["bias"] = made(*bias)
        if "padding" in form:  # keys of one entry, and all of some rows of the other: they see nothing
            values["bias"][0, ..., 5:] = -torch.inf
            values["bias"][1, ..., -7:, :] = -torch.inf
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


@pytest.mark.parametrize(
    ("form", "sizes"), [*((form, sizes) for form in FORMS if form != ODD for sizes in MESHES), (ODD, (3,))], ids=str
)
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


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("form", ["grouped, padding", "grouped, padding of pairs"])
def test_the_rule_splits_rows_behind_a_mask_that_hides_some_from_all(form: str, sizes: tuple[int, ...]) -> None:
    graph, values = graph_of(form), values_of(form)
    rows: Any = lambda s: s.roles == ("s",) * len(sizes)  # noqa: E731
    plan = PlanSampler(graph, mesh_of(*sizes), H100, "none").best({"forward": rows, "backward": rows})
    assert all(plan.choices[node].roles == ("s",) * len(sizes) for node in ("forward", "backward"))
    ran, _ = run_all(plan, values)
    for place, one in enumerate(wanted(form, values)):
        assert off(ran.results["output", str(place)], one) <= TOLERANCE, place


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


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("form", ["grouped", "one kv head"])
def test_a_ring_goes_round_beside_an_axis_of_copied_heads(form: str, sizes: tuple[int, ...]) -> None:
    """Of the one head that a rank needs: no more bytes go round than where heads divide."""
    graph, values = graph_of(form), values_of(form)
    right = wanted(form, values)
    beside = [(label, plan) for label, plan in plans(graph, mesh_of(*sizes)) if "s:" in label and "h:grouped" in label]
    assert len(beside) == 4, "ring and zigzag ring, forward and backward"
    for label, plan in beside:
        verify(lower(replace(plan, prefetch=1), 1))
        ran, traffic = run_all(plan, values)
        for place, one in enumerate(right):
            assert off(ran.results["output", str(place)], one) <= TOLERANCE, (label, place)
        assert traffic == {key: nbytes for key, nbytes in plan.comm_bytes.items() if nbytes}, label
        head = graph.type_of(Ref("k")).nbytes // graph.type_of(Ref("k")).shape[1]
        rounds = 2 if label.startswith("forward") else 4  # keys, values, and their gradients
        assert traffic["shift", plan.mesh.names[sizes.index(2)]] == rounds * head // 2, label


def counted(form: str, *sizes: int, node: str = "forward", **asked: object) -> dict[str, int]:
    """How many offers of each pattern. `asked`: arguments of the operator that are others."""
    graph = graph_of(form)
    core, places = graph.by_name[node], {"causal": 4, "dropout": 6}
    args = tuple(next((v for name, v in asked.items() if places[name] == at), arg) for at, arg in enumerate(core.args))
    types = tuple(graph.type_of(ref) for ref in core.operands)
    found = [name for name, _ in offers(replace(core, args=args), types, mesh_of(*sizes))]
    return {name: found.count(name) for name in (GROUPED, GATHERED, RING, ZIGZAG)}


def test_they_are_offered_where_they_are_right_and_nowhere_else() -> None:
    assert counted("grouped", 2) == {GROUPED: 0, GATHERED: 1, RING: 1, ZIGZAG: 1}, "two kv heads split over two ranks"
    assert counted("grouped", 4) == counted("grouped", 8) == {GROUPED: 1, GATHERED: 1, RING: 1, ZIGZAG: 1}
    assert counted("grouped", 16) == {GROUPED: 0, GATHERED: 1, RING: 1, ZIGZAG: 0}, "eight query heads, no half rows"
    assert counted("grouped", 32) == {GROUPED: 0, GATHERED: 0, RING: 0, ZIGZAG: 0}
    assert counted("grouped", 3) == {GROUPED: 0, GATHERED: 0, RING: 0, ZIGZAG: 0}
    assert counted("one kv head", 4)[GROUPED] == 0, "its rule splits the query heads"
    assert counted("causal", 4)[GROUPED] == 0
    assert counted("grouped, all", 4) == {GROUPED: 1, GATHERED: 0, RING: 1, ZIGZAG: 0}, "its rule splits the rows"
    assert counted(ODD, 3) == {GROUPED: 0, GATHERED: 1, RING: 1, ZIGZAG: 1}
    assert counted("grouped, bias of heads", 4) == {GROUPED: 1, GATHERED: 0, RING: 0, ZIGZAG: 0}
    assert counted("grouped, causal bias", 4) == {GROUPED: 1, GATHERED: 0, RING: 0, ZIGZAG: 0}
    assert counted("grouped, all", 4, causal=True) == {GROUPED: 1, GATHERED: 0, RING: 0, ZIGZAG: 0}, "unequal numbers"
    for size in (2, 4):
        assert not any(counted("grouped", size, dropout=0.1).values())
    assert not any(counted("grouped", 1).values())
    for sizes in ((4,), (2, 2), (8,)):
        assert counted("grouped", *sizes) == counted("grouped", *sizes, node="backward")


@pytest.mark.parametrize("node", ["forward", "backward"])
def test_without_a_mask_a_ring_is_even_work(node: str) -> None:
    graph = graph_of("grouped, all")
    core = graph.by_name[node]
    types = tuple(graph.type_of(ref) for ref in core.operands)
    (around,) = (one.loop for name, one in offers(core, types, mesh_of(4)) if name == RING)
    steps = [step for step in unrolled(around.steps("a", 4)) if isinstance(step, Compute)]
    assert sum(step.flops for step in steps) == pytest.approx(flops_of(core, types)[0] / 4)
    assert {step.op.rpartition(".")[2] for step in steps if step.kind == "attention"} == {"full"}


def test_a_rank_is_priced_as_the_last_one_which_sees_all_keys() -> None:
    """Of contiguous rows: of g ranks it computes g - 1/2 squares, where g/2 would be its part, and is in zigzag."""
    graph = graph_of("grouped")
    for node in ("forward", "backward"):
        core = graph.by_name[node]
        types = tuple(graph.type_of(ref) for ref in core.operands)
        whole, _ = flops_of(core, types)
        for ranks in (2, 4, 8):
            for name, one in offers(core, types, mesh_of(ranks)):
                steps = [step for step in unrolled(one.loop.steps(one.axis, ranks)) if isinstance(step, Compute)]
                flops = sum(step.flops for step in steps)
                uneven = (2 * ranks - 1) / ranks if name in (GATHERED, RING) else 1.0
                assert flops == pytest.approx(uneven * whole / ranks), (name, ranks)
                kinds = {step.op.rpartition(".")[2] for step in steps if step.kind == "attention"}
                assert kinds == ({"causal"} if name == GROUPED else {"causal", "full"})


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_more_to_choose_from_is_never_slower(sizes: tuple[int, ...]) -> None:
    for form in ("grouped", "causal"):
        graph, mesh = graph_of(form), mesh_of(*sizes)
        with_them, without = (PlanSampler(graph, mesh, H100, "none", loops=loops).best() for loops in (True, False))
        assert with_them.step_seconds <= without.step_seconds * (1 + 1e-9)


def test_halves_are_summed_up_in_float32() -> None:
    """Eight parts of bfloat16 are as near to the truth as one call is."""
    graph, mesh, values = graph_of("grouped", "bfloat16"), mesh_of(8), values_of("grouped", torch.bfloat16)
    right = wanted("grouped", {name: value.double() for name, value in values.items()})
    for label, plan in plans(graph, mesh):
        ran, _ = run_all(plan, values)
        for place, one in enumerate(right):
            made = ran.results["output", str(place)]
            assert made is not None
            assert (made.double() - one).abs().max() <= 2**-7 * one.abs().max(), (label, place)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_passes_on_what_it_must_and_no_more(ranks: int) -> None:
    """Keys, values, and in backward their gradients: one shift less than ranks of each (Liu et al. 2023). In zigzag
    half of every operand and result goes to the mirror rank, too.
    """
    graph, mesh = graph_of("grouped"), mesh_of(ranks)
    pricer = Pricer.on(mesh, H100, "none")
    for label, plan in plans(graph, mesh):
        steps = (one.step for one in flat(lower(plan, 1, pricer)) if isinstance(one, Launch))
        sent = [step for step in steps if isinstance(step, Comm)]
        found = {to: [one for one in sent if one.collective == to] for to in ("shift", "mirror")}
        rings = [node for node, choice in plan.choices.items() if choice.body in (RING, ZIGZAG)]
        assert len(found["shift"]) == sum(2 if node == "forward" else 4 for node in rings) * (ranks - 1), label
        mirrored = [graph.by_name[node] for node in rings if plan.choices[node].body == ZIGZAG]
        swapped = [t for node in mirrored for t in (*map(graph.type_of, node.operands), *node.outputs) if t is not None]
        nbytes = sum(one.nbytes for one in found["mirror"])
        assert nbytes == sum(type.nbytes // ranks // 2 for type in swapped), label
