"""What is a statistic of the whole batch, or of a whole row, stays one where the batch or the row is split.

The split is forced. Everything in float64, to 1e-9 of the largest entry; dropout by its statistics.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.emit.seeded import seeds
from autopar.ir.layout import Shard
from autopar.plan import Plan
from tests.support.check import difference, mesh_of
from tests.support.families import Case, labels
from tests.support.lockstep import run_all
from tests.support.plans import PlanSampler, Wish, takes


class Normalised(nn.Module):
    """A linear map, the layer in question, and a loss that sees every entry differently."""

    def __init__(self, layer: nn.Module, channels: int) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.randn(channels)), layer

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x * self.scale.view(1, -1, *(1 for _ in x.shape[2:]))) * y).sum()


def normalised(layer: nn.Module, *shape: int) -> Case:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return Case(Normalised(layer, shape[1]).train(), {"x": torch.randn(shape) * 2 + 1, "y": torch.randn(shape)})


LAYERS = {
    "batch norm, batch split": (lambda: normalised(nn.BatchNorm2d(6), 8, 6, 4, 4), "batch_norm", 0),
    "batch norm, channels split": (lambda: normalised(nn.BatchNorm2d(8), 4, 8, 4, 4), "batch_norm", 1),
    "layer norm, normalised dim split": (lambda: normalised(nn.LayerNorm(16), 6, 16), "layer_norm", 1),
    "layer norm, two normalised dims": (lambda: normalised(nn.LayerNorm((8, 16)), 6, 8, 16), "layer_norm", 1),
    "group norm, batch split": (lambda: normalised(nn.GroupNorm(4, 16), 8, 16, 4, 2), "layer_norm", 0),
    "group norm, groups split": (lambda: normalised(nn.GroupNorm(4, 16), 8, 16, 4, 2), "layer_norm", 1),
    "group norm, inside the groups": (lambda: normalised(nn.GroupNorm(4, 16), 8, 16, 4, 2), "layer_norm", 2),
    "RMS norm, normalised dim split": (lambda: normalised(nn.RMSNorm(16, eps=1e-5), 6, 16), "rms_norm", 1),
}


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("what", LAYERS)
def test_norms_mean_the_whole(what: str, sizes: tuple[int, ...]) -> None:
    make, op, dim = LAYERS[what]
    case = make()
    sampler = PlanSampler(case.wide_graph, mesh_of(*sizes))
    split = (Shard(dim),) * len(sizes)
    forced = {n.name: n.op for n in case.graph.nodes if op in n.op}
    wishes: dict[str, Wish] = {}
    for name, called in forced.items():
        wishes[name] = takes(split) if "backward" not in called else takes(split, split)
    if not forced:  # RMS norm comes apart into pointwise operators and a mean: split its row sum
        wishes = {
            n.name: takes(split) for n in case.graph.nodes if n.op.startswith("aten.sum") and n.phase == "forward"
        }
    off, where = difference(sampler.best(wishes), case)
    assert off <= 1e-9, where


class Classifier(nn.Module):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.head, self.reduction = nn.Linear(8, 12), reduction

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x).flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction=self.reduction)


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "classes"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_mean_loss_divides_by_the_labels_of_all_ranks(reduction: str, dim: int, sizes: tuple[int, ...]) -> None:
    case = Case(Classifier(reduction), {"x": torch.randn(4, 12, 8), "labels": labels(12)})
    sampler = PlanSampler(case.wide_graph, mesh_of(*sizes))
    split = (Shard(dim),) * len(sizes)
    names = {n.name: n.op for n in case.graph.nodes if "nll_loss" in n.op}
    assert len(names) == 2
    wishes: dict[str, Wish] = {
        name: (lambda strategy, at=int("backward" in op): strategy.takes[at] == split) for name, op in names.items()
    }
    off, where = difference(sampler.best(wishes), case)
    assert off <= 1e-9, where


class Dropped(nn.Module):
    """The output is the dropout of a parameter, so its gradient is the mask that backward used."""

    def __init__(self, p: float, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight, self.p = nn.Parameter(torch.ones(shape)), p

    def forward(self) -> Any:
        out = functional.dropout(self.weight, self.p, training=True)
        return out.sum(), out


def dropped(p: float, split: bool, sizes: tuple[int, ...], seed: int) -> tuple[Case, Plan, Tensor, Tensor]:
    """(case, plan, dropout's result, gradient)"""
    case = Case(Dropped(p, (64, 256)), {}, seed)
    sampler = PlanSampler(case.graph, mesh_of(*sizes))
    names = [n.name for n in case.graph.nodes if n.op == "aten.native_dropout.default"]
    wishes: dict[str, Wish] = {
        name: lambda strategy: all(strategy.roles) == split == any(strategy.roles) for name in names
    }
    assert len(names) == 1
    plan = sampler.best(wishes)
    ran, _ = run_all(plan, case.values(case.graph), seed)
    out, gradient = ran.results["output", "1"], ran.results["gradient", "weight"]
    assert out is not None and gradient is not None
    return case, plan, out, gradient


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_dropout_of_a_whole_tensor_is_what_one_device_draws_from_its_seed(sizes: tuple[int, ...]) -> None:
    case, _, out, gradient = dropped(0.3, False, sizes, seed=7)
    torch.manual_seed(int(seeds(7, 0, (0,))))
    wanted, _ = torch.native_dropout(case.model.weight.detach(), 0.3, True)
    assert out.equal(wanted) and gradient.equal(wanted)  # the weight is all ones


def test_on_one_rank_dropout_draws_what_the_model_draws() -> None:
    case, _, out, gradient = dropped(0.3, False, (1,), seed=7)
    assert out.equal(case.reference.outputs["1"])
    wanted = case.reference.gradients["weight"]
    assert wanted is not None and gradient.equal(wanted)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
def test_dropout_of_a_split_tensor_draws_a_mask_of_its_own_for_each_shard(sizes: tuple[int, ...], p: float) -> None:
    _, plan, out, gradient = dropped(p, True, sizes, seed=3)
    assert out.equal(gradient), "backward used another mask"  # the weight is all ones
    kept = out != 0
    assert torch.allclose(out[kept], torch.full_like(out[kept], 1 / (1 - p)))
    # 16384 independent draws: five standard deviations
    deviation = (p * (1 - p) / out.numel()) ** 0.5
    assert abs(kept.float().mean().item() - (1 - p)) < 5 * deviation
    assert abs(out.mean().item() - 1) < 5 * deviation / (1 - p)
    assert abs(out.var().item() - p / (1 - p)) < 0.05
    shards = [kept]
    layout = next(
        c.gives[0] for n, c in plan.choices.items() if plan.graph.by_name[n].op == "aten.native_dropout.default"
    )
    for placement, size in zip(layout, plan.mesh.sizes, strict=True):
        assert isinstance(placement, Shard)
        shards = [piece for shard in shards for piece in shard.chunk(size, placement.dim)]
    for one in range(len(shards)):
        for other in range(one):
            agree = (shards[one] == shards[other]).float().mean().item()
            expected = p * p + (1 - p) ** 2
            spread = (expected * (1 - expected) / shards[one].numel()) ** 0.5
            assert abs(agree - expected) < 6 * spread, "two shards share a mask"


def test_dropout_draws_anew_in_every_step() -> None:
    one, other = dropped(0.5, True, (2,), seed=1)[2], dropped(0.5, True, (2,), seed=2)[2]
    assert not one.equal(other)
    assert one.equal(dropped(0.5, True, (2,), seed=1)[2]), "one seed, one mask"


class Extremes(nn.Module):
    """Least and largest over the batch, over all, and of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        spread = (y - y.min()) / (y.max() - y.min())
        return spread.square().sum() + (y.amin(0) * y.amax(0)).sum() + (y.amax(1) / (3 + y.amin(1).square())).sum()


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_extremes_are_those_of_the_whole(dim: int, sizes: tuple[int, ...]) -> None:
    case = Case(Extremes(), {"x": torch.randn(8, 8)})
    sampler = PlanSampler(case.wide_graph, mesh_of(*sizes))
    split = (Shard(dim),) * len(sizes)
    found = [n.name for n in case.graph.nodes if n.op.startswith(("aten.amin", "aten.amax", "aten.min", "aten.max"))]
    assert len(found) >= 6
    off, where = difference(sampler.best({name: takes(split) for name in found}), case)
    assert off <= 1e-9, where
