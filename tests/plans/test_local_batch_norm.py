"""`batch_norm="local"`: every legal plan gives what a model gives whose norms take each of G parts of the batch.

G is the number of ranks, whatever the plan splits. Float64, to 1e-9 of the largest entry: loss, gradients, and running
statistics, which are those of part 0. Statistics of the whole batch are off by a part in ten, as a test here checks.
"""

from collections import Counter
from functools import cache
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.ir.batch_norm import statistics_of
from autopar.ir.graph import Graph
from autopar.ir.layout import Shard
from autopar.plan import Plan
from autopar.search import Request, search
from cost_models.hardware import Hardware
from cost_models.steps import Comm
from tests.support.check import difference, mesh_of, worst_difference
from tests.support.families import FAMILIES
from tests.support.lockstep import run_all
from tests.support.nets import NETS
from tests.support.parts import InParts
from tests.support.plans import PlanSampler

TOLERANCE = 1e-9
MESHES = [(2,), (4,), (2, 2)]


class Norms(nn.Module):
    """Norms of every kind: called twice, with a cumulative average, without running statistics, over merged dims, in
    eval mode, and those that are not local: of one sample, and synced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 8)
        self.twice, self.cumulative = nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)
        self.untracked, self.merged = nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(8, affine=False)
        self.frozen, self.sample = nn.BatchNorm1d(8).eval(), nn.InstanceNorm1d(4, affine=True)
        self.synced = nn.SyncBatchNorm(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(self.one(x))))
        x = self.cumulative(self.two(self.untracked(x)) * 2 + 1)
        rows = torch.relu(self.frozen(self.merged(x.flatten(0, 1))))
        return functional.mse_loss(self.synced(self.sample(rows.view(x.shape))), y)


def norms() -> tuple[nn.Module, dict[str, Tensor]]:
    model = Norms()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.SyncBatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(), module.running_var.uniform_(0.5, 2)
            module.num_batches_tracked.fill_(3)
    return model, {"x": torch.randn(8, 4, 6) * 2 + 1, "y": torch.randn(8, 4, 8)}


MAKE = {
    "norms": norms,
    "cnn": FAMILIES["cnn"],
    "resnet": lambda: (NETS["resnet"][0](), NETS["resnet"][1](2)),
}


@cache
def case(name: str, parts: int) -> InParts:
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        model, inputs = MAKE[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return InParts(model, dict(inputs), parts=parts)


@cache
def sampler(name: str, sizes: tuple[int, ...]) -> PlanSampler:
    return PlanSampler(case(name, prod(sizes)).wide_graph, mesh_of(*sizes))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", MAKE)
def test_any_legal_plan_normalises_each_part_of_the_batch(name: str, sizes: tuple[int, ...]) -> None:
    wrong: list[str] = []
    for seed in range(12):
        off, where = difference(sampler(name, sizes).draw(seed), case(name, prod(sizes)))
        if not off <= TOLERANCE:
            wrong.append(f"seed {seed}: {where} is off by {off:.3g}")
    assert not wrong, "; ".join(wrong[:5])


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=["parts", "channels", "both"])
def test_parts_and_channels_may_be_split(dims: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Forced, at the first norm: all its parts on other ranks, or all its channels."""
    if len(dims) > len(sizes):
        pytest.skip("two dims need two axes")
    wanted = tuple(Shard(dims[place % len(dims)]) for place in range(len(sizes)))
    chosen = sampler("cnn", sizes)
    name = next(node.name for node in chosen.graph.nodes if node.op == "autopar.batch_norm_in_parts")
    plan = chosen.best({name: lambda strategy: strategy.takes[0] == wanted})
    off, where = difference(plan, case("cnn", 4))
    assert off <= TOLERANCE, where


def test_statistics_of_the_whole_batch_are_other_numbers() -> None:
    """What the tests above would see if the parts were not taken."""
    plan = sampler("cnn", (2,)).draw(0)
    ran, _ = run_all(plan, case("cnn", 2).values(plan.graph))
    wholes = InParts(case("cnn", 2).model, case("cnn", 2).inputs, parts=1).wide_reference
    assert worst_difference(ran, wholes)[0] > 1e-2


# --- what it costs ---------------------------------------------------------------------------------------------------


def searched(name: str, ranks: int, policy: str | None = None, parts: int | None = None) -> Plan:
    graph: Graph = case(name, ranks if parts is None else parts).graph
    return search(graph, mesh_of(ranks), Hardware.load("h100-sxm"), Request(policy=policy))


def test_ddp_of_a_resnet_has_no_collective_per_layer() -> None:
    """One sum of the running statistics of all norms, beside the sums of gradients and of the loss and its count."""
    plan = searched("resnet", 8, "ddp")
    counts = Counter(comm.collective for comm in plan.comms())
    gradients = sum(result.kind == "gradient" and result.ref is not None for result in plan.graph.results)
    assert statistics_of(plan.graph) == ("local",)
    assert set(counts) == {"all_reduce"} and counts["all_reduce"] <= gradients + 3
    assert sums_inside(plan) == 0
    running = sum(
        node.outputs[0].nbytes for node in plan.graph.nodes if node.op == "buffer" and "running" in node.target
    )
    assert [comm.nbytes for comm in plan.comms()].count(running) == 1
    whole = searched("resnet", 8, "ddp", parts=1)
    assert statistics_of(whole.graph) == ("global",)
    norms = sum("running_mean" in node.target for node in whole.graph.nodes)
    assert sums_inside(whole) == 3 * norms, "two forward, one backward"


def sums_inside(plan: Plan) -> int:
    """Collectives within operators, not between them."""
    return sum(isinstance(step, Comm) for choice in plan.choices.values() for step in choice.steps)


def test_the_least_sum_splits_the_batch_without_sums_of_statistics() -> None:
    plan = searched("resnet", 8)
    assert not [name for name, choice in plan.choices.items() if choice.body.startswith("batch_norm")]
