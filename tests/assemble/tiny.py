"""Small random programs: a few operators forward, a few backward that read what the forward made."""

from __future__ import annotations

import random
from collections.abc import Mapping

from autopar.ir.graph import Graph, Node, Ref, Result, TensorType
from autopar.ir.mesh import Mesh
from autopar.propose.strategies import Strategy, propose

SIDE = 4
SQUARE = TensorType((SIDE, SIDE), "float32")
ROWS = TensorType((SIDE // 2, SIDE), "float32")
MATMUL = "m k, k n -> m n"


class _Growing:
    def __init__(self, rng: random.Random) -> None:
        self.rng, self.nodes = rng, list[Node]()
        self.forward: list[Ref] = []  # values of the forward, squares all
        self.parameters: list[Ref] = []

    def source(self, name: str, op: str, target: str, phase: str = "forward") -> Ref:
        self.nodes.append(Node(name, op, (), (), (SQUARE,), "backward" if phase == "backward" else "forward", target))
        return Ref(name)

    def node(self, op: str, args: tuple[object, ...], backward: bool, outputs: tuple[TensorType, ...]) -> Ref:
        name = f"{'b' if backward else 'f'}{len(self.nodes)}"
        self.nodes.append(Node(name, op, args, (), outputs, "backward" if backward else "forward"))
        return Ref(name)

    def operator(self, first: Ref, others: list[Ref], backward: bool) -> Ref:
        """A random operator on a square, perhaps of another one, too."""

        def made(op: str, *args: object) -> Ref:
            return self.node(op, args, backward, (SQUARE,))

        kind = self.rng.choice(["unary", "view", "halves", "multiply", "multiply", "product", "product"])
        other = self.rng.choice(others)
        match kind:
            case "unary":
                return made("aten.relu.default", first)
            case "view":
                return made("aten.permute.default", first, (1, 0))
            case "halves":
                split = self.node("aten.split.Tensor", (first, SIDE // 2, 0), backward, (ROWS, ROWS))
                return made("aten.cat.default", (Ref(split.name, 1), Ref(split.name, 0)), 0)
            case "multiply":
                return made("aten.mul.Tensor", first, other)
            case _:
                return made("autopar.einsum", MATMUL, first, other)


def random_graph(rng: random.Random, forward: int, backward: int, parameters: int) -> Graph:
    """The output is the last value of the forward; the gradients are those of backward."""
    growing = _Growing(rng)
    there = [growing.source(f"w{i}", "parameter", f"w{i}") for i in range(parameters)]
    made = [growing.source("x", "input", "x")]
    there += made
    for _ in range(forward):
        made.append(growing.operator(made[-1], there, backward=False))
        there.append(made[-1])
    grads = [growing.source("t", "tangent", "0", "backward")]
    for _ in range(backward):
        grads.append(growing.operator(grads[-1], there[parameters:] if rng.random() < 0.7 else there, backward=True))
    results = [Result("output", "0", made[-1])]
    results += [Result("gradient", f"w{i}", grads[-1 - i % len(grads[1:])]) for i in range(parameters)]
    return Graph(tuple(growing.nodes), tuple(results))


def few_strategies(graph: Graph, mesh: Mesh, rng: random.Random, most: int) -> Mapping[str, tuple[Strategy, ...]]:
    """At most so many of each node's strategies; equal nodes have equal ones."""
    strategies, _ = propose(graph, mesh)
    kept: dict[int, tuple[Strategy, ...]] = {}
    for options in strategies.values():
        if id(options) not in kept:
            kept[id(options)] = tuple(rng.sample(options, min(most, len(options))))
    return {name: kept[id(options)] for name, options in strategies.items()}
