"""Which batch norms become local, over what, and what is refused; and norms whose own forward cannot be traced."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.ir.batch_norm import IN_PARTS, IN_PARTS_BACKWARD, parts_of, statistics_of, told
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.trace import capture, graph_of
from tests.support.check import difference, mesh_of
from tests.support.families import Case
from tests.support.plans import PlanSampler


class Around(nn.Module):
    """A layer between a product and a loss, on what `before` makes of the product."""

    def __init__(self, layer: nn.Module, before: object = None, width: int = 6) -> None:
        super().__init__()
        self.linear, self.layer, self.before = nn.Linear(width, width, bias=False), layer, before

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.layer(x if self.before is None else self.before(x)).square().mul(0.5).sum()


def graph(model: nn.Module, *shape: int, parts: int = 2) -> Graph:
    return graph_of(capture(model.train(), (torch.randn(shape),), {}), parts=parts)


def count(found: Graph, op: str) -> int:
    return sum(node.op == op for node in found.nodes)


KEPT = {  # where the batch lies as the ranks' parts would
    "rows": (nn.BatchNorm1d(6), None, (8, 6)),
    "images": (nn.BatchNorm2d(3), None, (8, 3, 4, 6)),
    "samples and places as rows": (nn.BatchNorm1d(6), lambda x: x.flatten(0, 1), (8, 5, 6)),
    "channels moved": (nn.BatchNorm1d(6), lambda x: x.transpose(1, 2), (8, 5, 6)),
    "padded and cut places": (nn.BatchNorm1d(5), lambda x: x[:, :, 1:], (8, 5, 6)),
    "behind an operator without a rule": (nn.BatchNorm1d(6), lambda x: torch.fft.fft(x, dim=1).real, (8, 6)),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_norm_over_the_batch_takes_it_in_parts(name: str) -> None:
    layer, before, shape = KEPT[name]
    found = graph(Around(layer, before), *shape)
    assert (count(found, IN_PARTS), count(found, IN_PARTS_BACKWARD)) == (1, 1)
    assert statistics_of(found) == ("local",) and told(found).endswith("as DDP")
    assert statistics_of(graph(Around(layer, before), *shape, parts=1)) == ("global",)


REFUSED = {
    "places first": (nn.BatchNorm1d(6), lambda x: x.transpose(0, 1).flatten(0, 1), (8, 4, 6), "normalises 32 rows"),
    "two views in one": (nn.BatchNorm1d(6), lambda x: torch.cat([x, x * 2]), (8, 6), "normalises 16 rows"),
    "a part of the batch": (nn.BatchNorm1d(6), lambda x: x[:4], (8, 6), "normalises 4 rows"),
    "each other": (nn.BatchNorm1d(8), lambda x: x @ x.t(), (8, 6), "normalises 8 rows"),
    "uneven": (nn.BatchNorm1d(6), None, (7, 6), "a batch of 7 cannot be cut into 2 equal parts"),
    "one value": (nn.BatchNorm1d(6), None, (2, 6), "1 value per channel on each of 2 ranks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_would_have_parts_of_in_another_way_is_refused(name: str) -> None:
    layer, before, shape, why = REFUSED[name]
    with pytest.raises(TraceError, match=re.escape(why)) as refused:
        graph(Around(layer, before), *shape)
    assert "batch_norm='global'" in str(refused.value) and "\n" not in str(refused.value)
    assert graph(Around(layer, before), *shape, parts=1)


class ByKernel(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        given = self.weight, self.bias, self.running_mean, self.running_var
        return torch.ops.aten._batch_norm_with_update(x, *given, 0.1, 1e-5)[0]


def test_a_kernel_called_by_name_is_refused() -> None:
    with pytest.raises(TraceError, match=r"layer .* calls aten\._batch_norm_with_update_functional\.default, of which"):
        graph(Around(ByKernel(6)), 8, 6)


def test_a_norm_beside_the_batch_stays_as_it_is() -> None:
    """Each sample has statistics of its own; or the value is no sample's."""
    for layer in (
        nn.InstanceNorm1d(6, affine=True),
        nn.InstanceNorm1d(6, track_running_stats=True),
        nn.GroupNorm(2, 6),
    ):
        found = graph(Around(layer), 8, 6, 6)
        assert not count(found, IN_PARTS) and statistics_of(found) == () and told(found) == ""

    class OfWeights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.norm = nn.Parameter(torch.randn(4, 6)), nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.norm(self.weight).t()).sum()

    assert not count(graph(OfWeights(), 8, 6), IN_PARTS)


def test_eval_mode_has_no_statistics_to_take() -> None:
    model = Around(nn.BatchNorm1d(6)).eval()
    captured = capture(model, (torch.randn(7, 6),), {})
    assert graph_of(captured, parts=2) == graph_of(captured)
    assert statistics_of(graph_of(captured, parts=2)) == ()


def test_local_is_as_many_parts_as_the_mesh_has_ranks() -> None:
    mesh = Mesh(("data", "tensor"), (4, 2))
    assert (parts_of("local", mesh), parts_of("global", mesh)) == (8, 1)
    with pytest.raises(ValueError, match="batch_norm 'sync' is not known; choose global or local"):
        parts_of("sync", mesh)


def test_running_statistics_of_all_layers_are_one_row() -> None:
    layers = nn.Sequential(nn.BatchNorm1d(6), nn.Tanh(), nn.BatchNorm1d(6))
    found = graph(Around(layers), 8, 6)
    assert count(found, "aten.gather.default") == 1
    made = [result.ref.name for result in found.results if result.kind == "buffer" and "running" in result.target]
    assert len(made) == 4 and len(set(made)) == 1


# --- statistics over the batch, of the whole of it -------------------------------------------------------------------


def case(layer: nn.Module) -> Case:
    torch.manual_seed(3)
    model = Around(layer).train()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.fill_(3) if "num" in name else buffer.copy_(torch.rand_like(buffer) + 0.5)
    return Case(model, {"x": torch.randn(8, 6, 6) * 2 + 1})


LAYERS = {
    "cumulative average": lambda: nn.BatchNorm1d(6, momentum=None),
    "no running statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm1d(6, affine=True),
    "instance norm with running statistics": lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
    "synced": lambda: nn.SyncBatchNorm(6),
}


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_any_legal_plan_has_the_statistics_of_one_process(name: str, sizes: tuple[int, ...]) -> None:
    wanted = case(LAYERS[name]())
    sampler = PlanSampler(wanted.wide_graph, mesh_of(*sizes))
    assert not sampler.without_rule
    for seed in range(8):
        off, where = difference(sampler.draw(seed), wanted)
        assert off <= 1e-9, f"seed {seed}: {where} is off by {off:.3g}"


def test_a_cumulative_average_goes_on_as_torch_counts() -> None:
    """The copy that is traced has another forward; the model keeps its own."""
    model = Around(nn.BatchNorm1d(6, momentum=None)).train()
    before = copy.deepcopy(model.state_dict())
    assert count(graph(model, 8, 6, parts=1), "aten.reciprocal.default") == 1
    assert "forward" not in vars(model.layer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_forward_of_the_users_own_stays() -> None:
    class Doubled(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2.5)

    found = graph(Around(Doubled(6)), 8, 6, parts=1)
    assert any(2.5 in node.args for node in found.nodes)
