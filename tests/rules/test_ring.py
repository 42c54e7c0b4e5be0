"""Every ring product that is offered, executed on all ranks in one process, beside the operator that is not split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.graph import Graph, Node, Ref, Result, TensorType
from autopar.ir.layout import Shard
from autopar.ir.mesh import Mesh
from autopar.lower import lower
from autopar.lower.program import Launch, Loop, Wait, Within
from autopar.lower.verify import flat, verify
from autopar.price.pricer import Pricer
from autopar.rules.looped import Offer
from autopar.rules.patterns import offers
from autopar.simulate.events import events
from cost_models.hardware import Link
from cost_models.simulator import play
from tests.support import products
from tests.support.check import mesh_of
from tests.support.products import H100

PATTERNS = ("ring", "ring reduce-scatter")
# What a linear layer becomes: forward, the gradients of its input and of its weight; a matrix product as it is.
PRODUCTS = {
    "forward": ("b s k, n k -> b s n", (6, 12, 12), (24, 12)),
    "forward, weight first": ("n k, b s k -> b s n", (24, 12), (6, 12, 12)),
    "gradient of the input": ("b s n, n k -> b s k", (6, 12, 24), (24, 12)),
    "gradient of the weight": ("b s n, b s k -> n k", (6, 12, 24), (6, 12, 36)),
    "in columns": ("b s n, b s k -> k n", (6, 12, 24), (6, 12, 36)),
    "rows by themselves": ("m k, k n -> m n", (24, 12), (12, 12)),
    "matrices": ("mm", (24, 12), (12, 36)),
}


def graph_of(name: str) -> Graph:
    equation, *shapes = PRODUCTS[name]
    return products.graph_of(equation, *shapes)


def all_split(offer: Offer) -> bool:
    return all(isinstance(placement, Shard) for placement in offer.gives[0])


def plans(graph: Graph, mesh: Mesh, pattern: str) -> products.Plans:
    """Each ring, with its operands as they come and its result as it is."""
    return products.plans(graph, mesh, pattern, lambda o: lambda s: s.gives == o.gives or not all_split(o))


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_ring_gives_what_the_operator_gives(pattern: str, name: str, sizes: tuple[int, ...]) -> None:
    graph, mesh = graph_of(name), mesh_of(*sizes)
    found = products.check_numbers(graph, mesh, plans(graph, mesh, pattern), (1,))
    assert len(found) >= 2, "too few rings to mean anything"


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_its_program_is_a_loop_that_holds_what_it_says(pattern: str, ranks: int) -> None:
    for name in PRODUCTS:
        graph, mesh = graph_of(name), mesh_of(ranks)
        pricer = Pricer.on(mesh, H100, "none")
        for offer, plan in plans(graph, mesh, pattern):
            for prefetch in (None, 1):
                program = lower(plan, prefetch, pricer)
                verify(program)
                loops = [one for _, one in program if isinstance(one, Loop)]
                assert [loop.rounds for loop in loops] == ([ranks - 2] if ranks > 2 else [])
                sent = [one for one in flat(program) if isinstance(one, Launch) and one.of == Within("product")]
                assert len(sent) == ranks - 1 and sum(isinstance(one, Wait) for one in flat(program)) >= len(sent)
                extra = products.held_beside(program, graph, mesh, offer)
                workspace = offer.loop.workspace(beside=prefetch is not None)
                assert extra <= workspace
                if all_split(offer):  # the output is the product itself
                    assert extra == workspace, (name, offer.roles)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_round_sends_beside_its_product_and_computes_what_the_whole_product_does(pattern: str) -> None:
    """On a link that is quick, all is hidden; on a slow one the sends follow each other without a gap."""
    k, n = (4096, 16384) if pattern == "ring" else (16384, 4096)
    x, w, made = (TensorType(shape, "bfloat16") for shape in ((16, 512, k), (n, k), (16, 512, n)))
    sources = [Node(n, "input", (), (), (t,), target=n) for n, t in (("x", x), ("w", w))]
    node = Node("product", "autopar.einsum", ("b s k, n k -> b s n", Ref("x"), Ref("w")), (), (made,))
    graph = Graph((*sources, node), (Result("output", "0", Ref("product")),))
    mesh = mesh_of(4)
    _, plan = next(plans(graph, mesh, pattern))
    slow = replace(H100, links={"intra": Link(1e-6, 1e9), "inter": Link(1e-6, 1e9)})
    for hardware in (H100, slow):
        pricer = Pricer.on(mesh, hardware, "none")
        program = lower(plan, 1, pricer)
        timeline = play(events(program, graph, pricer))
        shifts = [at for at, event in enumerate(timeline.events) if event.stream == "comm:a" and event.seconds]
        products = [at for at, event in enumerate(timeline.events) if event.name.endswith("multiply")]
        assert len(shifts) == 3 and len(products) == 4
        begins = [end - event.seconds for end, event in zip(timeline.ends, timeline.events, strict=True)]
        for sent, computed in zip(
            shifts, products[pattern != "ring" :], strict=False
        ):  # a sum is there after the first
            assert begins[sent] <= begins[computed] + 1e-12 and begins[computed] < timeline.ends[sent]
        alone = play(events(lower(plan, None, pricer), graph, pricer)).seconds
        assert timeline.seconds < alone
        exposed_s, sent_s = timeline.exposed_s["comm:a"], timeline.busy_s["comm:a"]
        assert exposed_s < 1e-9 if hardware is H100 else exposed_s > 0.5 * sent_s


def test_it_is_offered_for_products_that_divide_and_for_nothing_else() -> None:
    dtype = "float32"

    def count(equation: str, x: tuple[int, ...], w: tuple[int, ...], out: tuple[int, ...], *sizes: int) -> int:
        types = TensorType(x, dtype), TensorType(w, dtype)
        node = Node("p", "autopar.einsum", (equation, Ref("x"), Ref("w")), (), (TensorType(out, dtype),))
        return len([*offers(node, types, mesh_of(*sizes))])

    linear = "b s k, n k -> b s n"
    assert count(linear, (4, 8, 6), (12, 6), (4, 8, 12), 1) == 0
    assert count(linear, (4, 8, 6), (12, 6), (4, 8, 12), 4) == 2, "k does not divide: gathered alone"
    assert count(linear, (4, 8, 8), (12, 8), (4, 8, 12), 4) == 4
    assert count(linear, (4, 8, 6), (12, 6), (4, 8, 12), 2, 2) == 9, "one of them in panels"
    assert count(linear, (4, 9, 8), (12, 8), (4, 9, 12), 4) == 4, "the sequence does not divide, the batch does"
    assert count(linear, (3, 9, 6), (13, 6), (3, 9, 13), 4) == 0
    assert count(linear, (3, 9, 8), (13, 8), (3, 9, 13), 4) == 0, "what is summed divides, what is made does not"
    attention = "b h q d, b h k d -> b h q k"
    assert count(attention, (4, 4, 8, 8), (4, 4, 8, 8), (4, 4, 8, 8), 2) == 0
    dtype = "complex64"
    assert count(linear, (4, 8, 8), (12, 8), (4, 8, 12), 4) == 0, "gloo sends no complex numbers"
