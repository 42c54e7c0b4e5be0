"""Every role of a matrix product on every mesh axis: C = A @ B, forward and backward, right and with the exact bytes.

Roles: m, n and k split that dim of the product, "" runs it redundantly. What an operand lacks is gathered from storage
around each use, and what a product is partial over is reduced into storage; so one axis of g ranks moves (g-1)/g of
what stands behind it, for each of: A and B forward, C forward, C's gradient backward, A and B again, their gradients.
"""

import itertools
from math import prod

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.graph import Graph
from autopar.ir.layout import REPLICATE, Layout, Shard
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.trace import capture, lower, normalise
from tests.support.check import mesh_of
from tests.support.lockstep import run_all
from tests.support.machines import WIRES
from tests.support.plans import PlanSampler, Wish, gives, roles
from tests.support.traffic import comms, received

M, K, N = 256, 192, 320  # the sizes of the measured vectors
DIMS = {"a": ("m", "k"), "b": ("k", "n"), "c": ("m", "n")}
SIZES = {"a": M * K * 8, "b": K * N * 8, "c": M * N * 8}


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(M, K).double()), nn.Parameter(torch.randn(K, N).double())

    def forward(self) -> Tensor:
        return self.a @ self.b


def storage(tensor: str, assignment: tuple[str, ...]) -> Layout:
    """As fully split as shards can be that are gathered axis by axis, innermost first: see `autopar.ir.layout`.

    An axis with a role that the tensor lacks splits a dim that no axis behind it needs in the product itself; where
    there is none (three axes only: a matter of shard order), the tensor stays whole. An axis without role splits none.
    """
    layout: list[Layout[0] | None] = []  # type: ignore[index]
    for axis, role in enumerate(assignment):
        behind = {DIMS[tensor].index(later) for later in assignment[axis + 1 :] if later in DIMS[tensor]}
        free = [dim for dim in (0, 1) if dim not in behind]
        if role in DIMS[tensor]:
            layout.append(Shard(DIMS[tensor].index(role)))
        else:
            layout.append(Shard(free[0]) if role and free else REPLICATE)
    return tuple(layout)  # type: ignore[arg-type]


def moved(tensor: str, assignment: tuple[str, ...], stored: Layout, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Bytes to bring the tensor from storage to the product (a gather), and a term of it back (a reduction)."""
    held = SIZES[tensor] // prod(g for g, role in zip(sizes, assignment, strict=True) if role in DIMS[tensor])
    away = [(g, p) for g, role, p in zip(sizes, assignment, stored, strict=True) if role and role not in DIMS[tensor]]
    pieces = prod(g for g, p in away if p != REPLICATE)
    gathered = held - held // pieces
    all_reduced = sum(2 * (g - 1) * (held // pieces) // g for g, p in away if p == REPLICATE)
    return gathered, gathered + all_reduced


def setting() -> tuple[Product, Graph, dict[str, str]]:
    """The module, its graph, and which node is C, dA and dB."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Product()
    graph = normalise(lower(capture(module, (), {})))
    made = {f"d{r.target}": r.ref.name for r in graph.results if r.kind == "gradient" and r.ref is not None}
    made["c"] = next(r.ref.name for r in graph.results if r.kind == "output" and r.ref is not None)
    return module, graph, made


MODULE, GRAPH, MADE = setting()


def forced(mesh: Mesh, assignment: tuple[str, ...], stored: dict[str, Layout]) -> Plan:
    """The best plan with these roles in all three products and these storages."""
    node_of = GRAPH.by_name
    wishes: dict[str, Wish] = {"a": gives(stored["a"]), "b": gives(stored["b"]), "output[0]": gives(stored["c"])}
    for name in ("c", "da", "db"):
        wishes[MADE[name]] = roles(*renamed(node_of[MADE[name]].args[0], name, assignment))
    return PlanSampler(GRAPH, mesh, WIRES, optimizer="none").best(wishes)


def renamed(equation: str, name: str, assignment: tuple[str, ...]) -> tuple[str, ...]:
    """The roles in the letters of a product's own equation."""
    left, result = equation.split("->")
    one, other = (term.split() for term in left.split(","))
    letters = {"c": (one, "mk"), "da": (result.split(), "mk"), "db": (result.split(), "kn")}
    words, dims = letters[name]
    letter_of = dict(zip(dims, words, strict=True))
    third = next(letter for letter in [*one, *other] if letter not in letter_of.values())
    letter_of[next(dim for dim in "mkn" if dim not in dims)] = third
    return tuple(letter_of[role] if role else "" for role in assignment)


def check_numbers(plan: Plan) -> None:
    weights = torch.randn(M, N).double()
    tangent = next(node.name for node in GRAPH.nodes if node.op == "tangent")
    values = {"a": MODULE.a.detach(), "b": MODULE.b.detach(), tangent: weights}
    ran, traffic = run_all(plan, values)
    assert sum(traffic.values()) == sum(plan.comm_bytes.values())
    a, b = values["a"], values["b"]
    wanted = {("output", "0"): a @ b, ("gradient", "a"): weights @ b.T, ("gradient", "b"): a.T @ weights}
    for key, value in wanted.items():
        ours = ran.results[key]
        assert ours is not None
        assert (ours - value).abs().max() <= 1e-10 * value.abs().max(), key  # float64: sums in another order


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (2, 2, 2)], ids=str)
def test_every_assignment_of_roles_is_right_and_moves_what_the_formula_says(sizes: tuple[int, ...]) -> None:
    for assignment in itertools.product(("m", "n", "k", ""), repeat=len(sizes)):
        stored = {tensor: storage(tensor, assignment) for tensor in "abc"}
        plan = forced(mesh_of(*sizes), assignment, stored)
        (a, da), (b, db), (c, dc) = (moved(tensor, assignment, stored[tensor], sizes) for tensor in "abc")
        # c and dc swap: the product's result is reduced forward, and its gradient gathered backward
        formula = a + b + dc, c + a + b + da + db
        found = received(comms(plan, "forward")), received(comms(plan, "backward"))
        if all(assignment):
            assert found == formula, assignment
        else:  # over an axis without a role, a sum may be formed in slices that are gathered again, for fewer bytes
            assert found[0] <= formula[0] and found[1] <= formula[1], assignment
        check_numbers(plan)


S0, S1, R = Shard(0), Shard(1), REPLICATE
# Bytes over all ranks, forward and in all, with operands gathered again for backward: measured with an independent
# implementation. Storages are those of the schemes.
VECTORS = {
    "SUMMA 2x2": ((2, 2), "mn", (S0, S1), (S0, S1), (S0, S1), 884736, 2654208),
    "SUMMA 2x4": ((2, 4), "mn", (S0, S1), (S0, S1), (S0, S1), 1671168, 5013504),
    "2.5D 2x2x2": ((2, 2, 2), "mmn", (S0, S0, S1), (R, S0, S1), (S0, S0, S1), 1376256, 5111808),
}


@pytest.mark.parametrize("name", VECTORS)
def test_named_schemes_move_the_measured_bytes(name: str) -> None:
    sizes, assignment, a, b, c, forward, total = VECTORS[name]
    plan = forced(mesh_of(*sizes), tuple(assignment), {"a": a, "b": b, "c": c})
    assert received(comms(plan, "forward")) * prod(sizes) == forward
    assert sum(plan.comm_bytes.values()) * prod(sizes) == total
    check_numbers(plan)
