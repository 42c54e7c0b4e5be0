"""Plans that everybody knows fall out of prices alone, and each is the strict optimum: forbidding it costs more."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.decide.referee import seconds_by
from autopar.ir.layout import REPLICATE, Partial, Shard, encode
from autopar.ir.mesh import Mesh
from autopar.lower import lower
from autopar.plan import Plan
from autopar.price.pricer import Pricer
from autopar.search import Request, search
from tests.support.check import difference, mesh_of
from tests.support.families import Case, family
from tests.support.machines import machine
from tests.support.plans import PlanSampler
from tests.support.traffic import comms

S0, S1, R = Shard(0), Shard(1), REPLICATE


class TwoLayers(nn.Module):
    """gain * x -> up -> relu -> down, and a linear functional of the result.

    With the gain (one number, which cannot be split) both weights are needed forward and backward. Without it the first
    one would be gathered only once, and the true optimum is to split it even where memory is ample: a gather and a
    reduce-scatter are an all-reduce, and the optimizer has less to do.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(self.gain * x))) * y).sum()


def two_layers(tokens: int, width: int, hidden: int) -> Case:
    return Case(TwoLayers(width, hidden), {"x": torch.randn(tokens, width), "y": torch.randn(tokens, width)})


def margin(case: Case, mesh: Mesh, hardware: Any, plan: Plan, node: str) -> float:
    """How much more the best plan costs that chooses otherwise for `node`, relative to the best of all."""
    sampler = PlanSampler(case.graph, mesh, hardware)
    given = plan.choices[node].gives
    other = sampler.solve({node: lambda strategy: strategy.gives != given})
    return (other.cost - plan.step_seconds) / plan.step_seconds


def big(found: list[Any]) -> Counter[str]:
    """Collectives of more than a scalar."""
    return Counter(comm.collective for comm in found if comm.nbytes > 8)


def test_many_tokens_and_room_give_data_parallelism() -> None:
    case, mesh = two_layers(tokens=512, width=16, hidden=32), mesh_of(4)
    hardware = machine(1e10, flops=1e10)
    plan = search(case.graph, mesh, hardware, Request(tied=False))
    assert plan.parameters == {"up.weight": (R,), "down.weight": (R,), "gain": (R,)}
    assert plan.choices["x"].gives == ((S0,),) and plan.choices["y"].gives == ((S0,),)
    assert not big(comms(plan, "forward"))
    assert big(comms(plan, "backward")) == {"all_reduce": 2}, "one all-reduce for each gradient"
    assert plan.gap <= 1e-6
    assert margin(case, mesh, hardware, plan, "up_weight") > 1e-3
    assert difference(plan, case)[0] <= 1e-4


def test_weights_that_do_not_fit_are_split_and_gathered_around_their_use() -> None:
    case, mesh = two_layers(tokens=2048, width=64, hidden=128), mesh_of(4)
    hardware = machine(1e10, flops=1e10)
    roomy = search(case.graph, mesh, hardware, Request(tied=False))
    assert roomy.parameters == {"up.weight": (R,), "down.weight": (R,), "gain": (R,)}
    whole = 4 * 4 * 2 * 64 * 128  # parameters, gradients and two optimizer states
    plan = search(
        case.graph, mesh, hardware, Request(memory=roomy.peak_bytes["hbm"] - whole // 2, tied=False, allow=())
    )
    assert all(isinstance(plan.parameters[name][0], Shard) for name in ("up.weight", "down.weight"))
    assert plan.choices["x"].gives == ((S0,),), "still split by the batch"
    assert big(comms(plan, "forward")) == {"all_gather": 2}
    assert big(comms(plan, "backward"))["reduce_scatter"] == 2 and "all_reduce" not in big(comms(plan, "backward"))
    assert difference(plan, case)[0] <= 1e-4


def test_few_tokens_and_large_weights_give_column_then_row_with_one_all_reduce() -> None:
    case, mesh = two_layers(tokens=6, width=96, hidden=192), mesh_of(4)
    hardware = machine(1e11, flops=1e11)
    plan = search(case.graph, mesh, hardware, Request(tied=False))
    assert plan.parameters == {"up.weight": (S0,), "down.weight": (S1,), "gain": (R,)}, "column, then row"
    first, second = [n for n in case.graph.nodes if n.op == "autopar.einsum" and n.phase == "forward"]
    assert plan.choices[first.name].gives == ((S1,),) and plan.choices[second.name].gives == ((Partial(),),)
    forward = big(comms(plan, "forward"))
    # the sum over ranks is linear in the product: it may also be formed on the way, in another shape
    assert sum(forward.values()) <= 1 and set(forward) <= {"all_reduce", "reduce_scatter"}
    assert plan.gap <= 1e-6
    assert margin(case, mesh, hardware, plan, "up_weight") > 1e-3
    assert difference(plan, case)[0] <= 1e-4


class Squared(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h * h).sum()


def test_one_producer_used_twice_by_one_node_is_paid_once_and_paid() -> None:
    """h * h, forced from rows to columns: the change is one all-to-all. (A rival paid for one operand of two.)"""
    case, mesh = Case(Squared(32), {"x": torch.randn(64, 32)}), mesh_of(8)
    sampler = PlanSampler(case.graph, mesh, machine(1e9))
    first = next(n for n in case.graph.nodes if n.op == "autopar.einsum")
    product = next(n for n in case.graph.nodes if n.op == "aten.mul.Tensor" and n.phase == "forward")
    shares = [n.name for n in case.graph.nodes if n.op == "autopar.share" and Counter(n.operands)[product.operands[0]]]
    plan = sampler.best({first.name: lambda s: s.gives == ((S0,),), product.name: lambda s: s.takes == ((S1,), (S1,))})
    assert not shares
    at = [
        n
        for n in case.graph.nodes
        if n.name == product.name or (n.op == "autopar.share" and n.operands[0].name == first.name)
    ]
    changes = [change for node in at for change in plan.choices[node.name].reads[0]]
    assert [change.kind for change in changes] == ["all_to_all"]
    assert changes[0].local.nbytes == 64 * 32 * 4 // 8
    pricer = sampler.pricer
    priced = sum(seconds_by(lower(plan, None, pricer), pricer).values())
    assert priced == pytest.approx(plan.step_seconds, rel=1e-12)
    without = replace(plan.choices[at[0].name], reads=tuple(() for _ in plan.choices[at[0].name].reads))
    free = replace(plan, choices={**plan.choices, at[0].name: without})
    paid = priced - sum(seconds_by(lower(free, None, pricer), pricer).values())
    assert len(at) == 2 or paid == pytest.approx(sampler.pricer.seconds([s for c in changes for s in c.steps(8)]))
    assert difference(plan, case)[0] <= 1e-4


def test_more_and_equal_layers_cost_as_the_plan_says_tied_or_not() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(5)
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    case, mesh, hardware = Case(Deep(), {"x": torch.randn(16, 16)}), mesh_of(4), machine(1e11, flops=1e11)
    tied, free = (search(case.graph, mesh, hardware, Request(tied=tied)) for tied in (True, False))
    assert free.step_seconds <= tied.step_seconds * (1 + 1e-9)
    first = PlanSampler(case.graph, mesh, hardware)
    for plan in (tied, free):
        pricer = Pricer.on(mesh, hardware, "adamw", plan.bucket_bytes)
        assert sum(seconds_by(lower(plan, None, pricer), pricer).values()) == pytest.approx(plan.step_seconds, rel=1e-9)
        assert difference(plan, case)[0] <= 1e-4
    assert first.solve().cost == pytest.approx(free.step_seconds, rel=1e-6)


def outline(plan: Plan) -> dict[str, Any]:
    """Everything that was decided, as plain values."""
    return {
        "choices": {
            name: [list(map(encode, c.takes)), list(map(encode, c.gives)), c.roles] for name, c in plan.choices.items()
        },
        "seconds": plan.step_seconds,
        "bytes": {" ".join(key): nbytes for key, nbytes in plan.comm_bytes.items()},
    }


SEARCH = """
import json, sys
from tests.plans.test_textbook import outline
from tests.support.check import mesh_of
from tests.support.families import family
from tests.support.machines import machine
from autopar.search import Request, search
graph, hardware = family("mlp").graph, machine(1e11, flops=1e11)
plans = [search(graph, mesh_of(int(ranks)), hardware, Request(tied=False)) for ranks in sys.argv[1:]]
print(json.dumps([outline(plan) for plan in plans]))
"""


def in_a_process_of_its_own(hash_seed: str, *ranks: int) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", SEARCH, *map(str, ranks)]
    root = __file__.rsplit("/tests/", 1)[0]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_searches_of_several_meshes_in_one_process_do_not_meet() -> None:
    """Equal to fresh processes, whatever came before and however strings are hashed."""
    eight, four, again = in_a_process_of_its_own("1", 12, 4, 12)
    assert eight == again
    assert [four, eight] == in_a_process_of_its_own("2", 4, 12)


def test_a_mesh_axis_of_size_one_changes_nothing() -> None:
    case, hardware = family("mlp"), machine(1e11, flops=1e11)
    plain = search(case.graph, mesh_of(4), hardware, Request(tied=False))
    for sizes in ((1, 4), (4, 1)):
        plan = search(case.graph, mesh_of(*sizes), hardware, Request(tied=False))
        assert plan.step_seconds == pytest.approx(plain.step_seconds, rel=1e-9)
        assert difference(plan, case)[0] <= 1e-4
    alone = search(case.graph, mesh_of(1), hardware, Request(tied=False))
    assert not alone.comm_bytes and difference(alone, case)[0] <= 1e-5


class Odd(nn.Module):
    """Vocabulary 101, hidden size 33, batch 5: nothing divides by 2 but the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(101, 34), nn.Linear(34, 33), nn.Linear(33, 34)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.down(torch.relu(self.up(self.embed(ids))))
        return functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (3,), (5,)], ids=str)
def test_sizes_that_do_not_divide_are_never_split(sizes: tuple[int, ...]) -> None:
    ids, labels = torch.randint(0, 101, (5, 12)), torch.randint(0, 101, (5, 12))
    labels[0, :9] = -100
    case, mesh = Case(Odd(), {"ids": ids, "labels": labels}), mesh_of(*sizes)
    plan = search(case.graph, mesh, machine(), Request(tied=False))
    for node in case.graph.nodes:
        for type, layout in zip(node.outputs, plan.choices[node.name].gives, strict=True):
            for placement, size in zip(layout, mesh.sizes, strict=True):
                if isinstance(placement, Shard) and type is not None:
                    assert type.shape[placement.dim] % size == 0, f"%{node.name} is split unevenly"
    assert any(isinstance(p, Shard) for choice in plan.choices.values() for layout in choice.gives for p in layout)
    off, where = difference(plan, case)
    assert off <= 1e-4, where
    wide = PlanSampler(case.wide_graph, mesh)
    for seed in range(5):
        off, where = difference(wide.draw(seed), case)
        assert off <= 1e-9, f"seed {seed}: {where}"
