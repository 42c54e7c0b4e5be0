"""One product of two inputs, and every loop that a pattern offers for it, executed beside the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autopar.assemble.problem import output_name
from autopar.emit import ops
from autopar.emit.run_all_ranks import fake_ranks, run
from autopar.ir.graph import Graph, Node, Ref, Result, TensorType
from autopar.ir.layout import local_type
from autopar.ir.mesh import Mesh
from autopar.lower import Program
from autopar.lower.memory import outputs_before, peaks
from autopar.plan import Plan
from autopar.plan.fit import check_rules
from autopar.rules.looped import Offer
from autopar.rules.patterns import offers
from cost_models.hardware import Hardware
from tests.support.plans import PlanSampler, Wish

H100 = Hardware.load("h100-sxm")
TOLERANCE = 1e-12  # in float64: sums of a few dozen terms in another order

Plans = Iterator[tuple[Offer, Plan]]


def graph_of(equation: str, *shapes: tuple[int, ...]) -> Graph:
    """The einsum of inputs x and w in float64; of "mm" the product of two matrices."""
    left, right = (torch.empty(shape, dtype=torch.float64) for shape in shapes)
    made = left @ right if equation == "mm" else ops.einsum(equation, left, right)
    types = [TensorType(shape, "float64") for shape in shapes]
    sources = [Node(name, "input", (), (), (type,), target=name) for name, type in zip("xw", types, strict=True)]
    args = (Ref("x"), Ref("w")) if equation == "mm" else (equation, Ref("x"), Ref("w"))
    op = "aten.mm.default" if equation == "mm" else "autopar.einsum"
    node = Node("product", op, args, (), (TensorType(tuple(made.shape), "float64"),))
    return Graph((*sources, node), (Result("output", "0", Ref("product")),))


def values_of(graph: Graph) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(7)
    return {
        node.name: torch.randn(node.outputs[0].shape, dtype=torch.float64, generator=drawn)
        for node in graph.nodes
        if node.is_source and node.outputs[0] is not None
    }


def offered(graph: Graph, mesh: Mesh, pattern: str) -> list[Offer]:
    node = graph.by_name["product"]
    types = tuple(graph.type_of(ref) for ref in node.operands)
    return [offer for name, offer in offers(node, types, mesh) if name == pattern]


def plans(graph: Graph, mesh: Mesh, pattern: str, output: Callable[[Offer], Wish] | None = None) -> Plans:
    """Each offer, with its operands as they come; `output`: what is wished of the layout of the output."""
    sampler = PlanSampler(graph, mesh, H100, optimizer="none")
    for offer in offered(graph, mesh, pattern):
        wishes: dict[str, Wish] = {
            "product": lambda s, o=offer: (s.body, s.roles) == (pattern, o.roles),
            "x": lambda s, o=offer: s.gives == (o.takes[0],),
            "w": lambda s, o=offer: s.gives == (o.takes[1],),
        }
        if output is not None:
            wishes[output_name("0")] = output(offer)
        yield offer, sampler.best(wishes)


def check_numbers(graph: Graph, mesh: Mesh, made: Plans, prefetches: Sequence[int | None]) -> list[Offer]:
    """The offers of these plans, each of which gave what the operator gives."""
    values, found = values_of(graph), list[Offer]()
    x, w, (first, *_) = values["x"], values["w"], graph.by_name["product"].args
    wanted = torch.einsum(first.replace(" ", ""), x, w) if isinstance(first, str) else x @ w
    with fake_ranks(mesh) as device_mesh:
        for offer, plan in made:
            check_rules(plan)
            for prefetch in prefetches:
                given = run(replace(plan, prefetch=prefetch), device_mesh, values).results["output", "0"]
                assert given is not None
                torch.testing.assert_close(given, wanted, rtol=TOLERANCE, atol=TOLERANCE * wanted.abs().max().item())
            found.append(offer)
    return found


def held_beside(program: Program, graph: Graph, mesh: Mesh, offer: Offer) -> int:
    """Bytes that a program of that product holds, at most, beside its operands and its result, and the one that the
    caller has of the step before.
    """
    held = sum(buffer.nbytes for buffer in program.resident) + outputs_before(program)
    result = local_type(graph.type_of(Ref("product")), offer.gives[0], mesh).nbytes
    return peaks(program)["hbm"] - held - result
